"""Replicas: what an owner sends after a step to the trainers that hold copies of its lanes, and how a new copy is seeded.

Of the rows that the step changed, a replica has the optimizer state, and the weights of those that
the copy's trainer does not get anyway: a row that a lane of that trainer uses in the next training
step comes with that step's exchange, on its critical path, since this step changed it. Sizes and
order follow from the schedule's masks on both sides, as in `exchange`. Of a copy that is still
seeded, only the slots that it has already are sent.

A new copy is seeded in stretches of slots, one after a step while training goes on, or all at once
before it. A stretch is as its step left it; from the next step on, replicas have what changes in
it. Both sides know which stretch follows which step, since they begin with the term and are of
fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foreload.base.compiled import nb
from foreload.cache.rows.partition import Partition
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import LaneEvent
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.step.exchange import REPLICA, SEED, ExchangePlan
from foreload.trainer.step.hosted_lanes import HostedLanes, LaneReplica
from foreload.trainer.step.transport import Transport, Work

SLOTS_AT_ONCE = 1 << 16  # of a stretch where nobody trains yet


@dataclass(frozen=True, slots=True)
class Stretch:
    """A lane's slots first .. first + slots - 1, from or for `peer`, as a message: uint8."""

    lane: int
    peer: int
    first: int
    slots: int
    message: Tensor


@dataclass(slots=True)
class Seeds:
    """The stretches that go and come after one step."""

    outgoing: list[Stretch] = field(default_factory=list)
    incoming: list[Stretch] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class Seeding:
    """One trainer's side of it, for one term. to: peer -> the lanes hosted here of which it holds copies; copies: those held here, by lane.

    seeded: (lane, rank) of the copies that hold every slot already. stretch: slots that go after a step while training goes on.
    """

    stretch = 4096

    def __init__(
        self,
        transport: Transport,
        lane_map: Sequence[int],
        to: Mapping[int, list[int]],
        lanes: HostedLanes,
        copies: Mapping[int, LaneReplica],
        seeded: Iterable[tuple[int, int]],
    ) -> None:
        self._transport, self._map, self._lanes, self._copies = transport, tuple(lane_map), lanes, copies
        whole = set(seeded)
        self._cursors = {
            (lane, peer): lanes.partitions[lane].slots if (lane, peer) in whole else 0 for peer in to for lane in to[peer]
        }

    def cursor(self, lane: int, peer: int) -> int:
        """A peer's copy has, or is being sent, the slots below it."""
        return self._cursors[lane, peer]

    def next_seeds(self, slots: int) -> Seeds:
        """The next stretch for each copy that lacks slots, and room for those that come here."""
        seeds = Seeds()
        for (lane, peer), cursor in self._cursors.items():
            partition = self._lanes.partitions[lane]
            count = min(slots, partition.slots - cursor)
            if count:
                message = torch.empty(_bytes(partition, count, self._lanes.given[lane].size), dtype=torch.uint8)
                self._write(message, lane, cursor, count)
                seeds.outgoing.append(Stretch(lane, peer, cursor, count, message.to(self._transport.device)))
                self._cursors[lane, peer] += count
        for lane, copy in self._copies.items():
            count = min(slots, copy.partition.slots - copy.cursor)
            if count:
                size = _bytes(copy.partition, count, copy.given.size)
                message = torch.empty(size, dtype=torch.uint8, device=self._transport.device)
                seeds.incoming.append(Stretch(lane, self._map[lane], copy.cursor, count, message))
        return seeds

    def _write(self, message: Tensor, lane: int, first: int, count: int) -> None:
        partition = self._lanes.partitions[lane]
        head, whole_numbers, values = _parts(message, partition, count, self._lanes.given[lane].size)
        head[:2] = self._lanes.traffic.released(lane)
        head[2:] = self._lanes.given[lane]
        for part, column in zip(whole_numbers, (*partition.occupants.columns(), partition.occupants.stored_tag), strict=True):
            part[:] = column[first : first + count]
        for tensor, rows in zip(values, (partition.weights, partition.state), strict=True):
            tensor.copy_(rows[first : first + count])

    def post(self, seeds: Seeds) -> None:
        """Send the stretches, and begin to receive: by lane, so in the same order on both sides."""
        for lane in range(len(self._map)):
            sends = {stretch.peer: stretch.message for stretch in seeds.outgoing if stretch.lane == lane}
            receives = {stretch.peer: stretch.message for stretch in seeds.incoming if stretch.lane == lane}
            if sends or receives:
                seeds.works.append(self._transport.post(sends, receives, SEED))

    def wait(self, seeds: Seeds) -> None:
        """Return when all have come and gone. Raises PeerLost."""
        for work in seeds.works:
            work.wait()
        seeds.works.clear()

    def install(self, seeds: Seeds, step: int) -> None:
        """Put the stretches that have come into their copies, which are those of `step` otherwise."""
        for stretch in seeds.incoming:
            copy = self._copies[stretch.lane]
            partition, slots = copy.partition, slice(stretch.first, stretch.first + stretch.slots)
            head, whole_numbers, values = _parts(stretch.message.cpu(), partition, stretch.slots, copy.given.size)
            for part, column in zip(whole_numbers, (*partition.occupants.columns(), partition.occupants.stored_tag), strict=True):
                column[slots] = part
            for tensor, rows in zip(values, (partition.weights, partition.state), strict=True):
                rows[slots].copy_(tensor)
            copy.cursor, copy.seeded_at = slots.stop, step
            copy.given[:] = head[2:]
            copy.note_released(int(head[0]), int(head[1]))

    def seed_all(self, step: int) -> None:
        """Bring every copy that lacks slots to the state after `step`, where nobody trains yet. Raises PeerLost."""
        while True:
            seeds = self.next_seeds(SLOTS_AT_ONCE)
            if not seeds.outgoing and not seeds.incoming:
                return
            self.post(seeds)
            self.wait(seeds)
            self.install(seeds, step)


def _bytes(partition: Partition, slots: int, tables: int) -> int:
    """Of a stretch: the head, who sits there, weights and states."""
    return 8 * (2 + tables) + slots * (26 + 4 * (partition.weights.shape[1] + partition.state.shape[1]))


def _parts(message: Tensor, partition: Partition, slots: int, tables: int) -> tuple[np.ndarray, list[np.ndarray], list[Tensor]]:
    """Views of a message in CPU memory: the head, int64 [released boundary, batch, ordinals given]; occupants' columns; weights and state."""
    start = 0

    def following(kind: torch.dtype, count: int) -> Tensor:
        nonlocal start
        size = count * kind.itemsize
        start += size
        return message[start - size : start].view(kind)

    head = following(torch.int64, 2 + tables).numpy()
    # Those of 8 bytes first, so that each is aligned.
    ordinal, number = (following(torch.int64, slots).numpy() for _ in range(2))
    values = [
        following(torch.float32, slots * rows.shape[1]).view(slots, rows.shape[1])
        for rows in (partition.weights, partition.state)
    ]
    tag, stored_tag = (following(torch.int32, slots).numpy() for _ in range(2))
    table = following(torch.int16, slots).numpy()
    return head, [table, ordinal, number, tag, stored_tag], values


_HEAD = 4  # float32 values: two int64, the lane's released boundary and batch


@nb.njit(nogil=True, cache=True)
def _split_by_use(slots, next_users, bits, below):  # type: ignore[no-untyped-def]
    """The slots under `below`, in two lists: of rows that no lane of `bits` uses next, and the others; int32."""
    first, second = np.empty(slots.size, np.int32), np.empty(slots.size, np.int32)
    a = b = 0
    for i in range(slots.size):
        if slots[i] < below:
            if next_users[i] & bits:
                second[b] = slots[i]
                b += 1
            else:
                first[a] = slots[i]
                a += 1
    return first[:a], second[:b]


@nb.njit(nogil=True, cache=True)
def _places_of(wanted, slots, users, bits, scratch):  # type: ignore[no-untyped-def]
    """Places in a list of rows, int32, of those that a lane of `bits` uses and whose slots are `wanted`. scratch: uint8 [slots], zeros."""
    for i in range(wanted.size):
        scratch[wanted[i]] = 1
    out = np.empty(wanted.size, np.int32)
    count = 0
    for i in range(slots.size):
        if users[i] & bits and scratch[slots[i]]:
            out[count] = i
            count += 1
    for i in range(wanted.size):
        scratch[wanted[i]] = 0
    return out[:count]


@dataclass(frozen=True, slots=True)
class LanePart:
    """A lane's rows in a replica, by their slots, int32: changed, all of which the state is sent; sent, with weights, too; later, the others."""

    lane: int
    changed: np.ndarray
    sent: np.ndarray
    later: np.ndarray


@dataclass(slots=True)
class Replica:
    """The messages of one step, on their way.

    events: every lane's part of the step; whole: all weights are in it; parts, incoming: what comes from each peer, by lane, and its message;
    arrived: all of it is here.
    """

    step: int
    events: Sequence[LaneEvent]
    whole: bool
    outgoing: dict[int, Tensor]
    parts: dict[int, list[LanePart]]
    incoming: dict[int, Tensor]
    seeds: Seeds
    work: Work | None = None
    arrived: bool = False


class Replication:
    """One trainer's side of it, for one term. copy_map[lane]: the ranks that hold a copy of the lane; copies: those that are held here, by lane.

    seeded: (lane, rank) of the copies that hold every slot when the term begins.
    """

    def __init__(
        self,
        transport: Transport,
        lane_map: Sequence[int],
        copy_map: Sequence[Iterable[int]],
        kernels: Kernels,
        lanes: HostedLanes,
        copies: Mapping[int, LaneReplica],
        seeded: Iterable[tuple[int, int]],
    ) -> None:
        self._transport, self._kernels, self._lanes, self.copies = transport, kernels, lanes, copies
        own, world = transport.rank, transport.world
        self._masks = [np.uint64(sum(1 << lane for lane, host in enumerate(lane_map) if host == rank)) for rank in range(world)]
        peers = [peer for peer in range(world) if peer != own]
        # By peer: the lanes hosted here of which it has copies, and its lanes of which copies are here.
        self._to = {
            peer: [lane for lane, host in enumerate(lane_map) if host == own and peer in copy_map[lane]] for peer in peers
        }
        self._from = {
            peer: [lane for lane, host in enumerate(lane_map) if host == peer and own in copy_map[lane]] for peer in peers
        }
        self.seeding = Seeding(transport, lane_map, self._to, lanes, copies, seeded)

    def fill(self, step: int, events: Sequence[LaneEvent], whole: bool) -> Replica:
        """The replica of a step that was just applied; nothing is sent yet. whole: with all weights, as the next step's exchange may not come."""
        partitions = self._lanes.partitions
        outgoing, incoming, parts = {}, {}, {}
        for peer, lanes in self._to.items():
            outgoing[peer] = self._packed(
                [self._part(events, lane, partitions[lane], peer, self.seeding.cursor(lane, peer), whole) for lane in lanes]
            )
        for peer, lanes in self._from.items():
            copies = [self.copies[lane] for lane in lanes]
            parts[peer] = [self._part(events, c.lane, c.partition, self._transport.rank, c.cursor, whole) for c in copies]
            size = sum(_size(part, copy.partition) for part, copy in zip(parts[peer], copies, strict=True))
            incoming[peer] = torch.empty(size, device=self._transport.device)
        return Replica(step, events, whole, outgoing, parts, incoming, self.seeding.next_seeds(self.seeding.stretch))

    def _part(
        self, events: Sequence[LaneEvent], lane: int, partition: Partition, rank: int, cursor: int, whole: bool
    ) -> LanePart:
        """What the replica of a lane consists of for trainer `rank`, whose copy has the slots below `cursor`."""
        moves = events[lane]
        sent, later = _split_by_use(moves.slots, moves.next_users, np.uint64(0) if whole else self._masks[rank], cursor)
        return LanePart(lane, moves.slots if cursor == partition.slots else moves.slots[moves.slots < cursor], sent, later)

    def _packed(self, parts: list[LanePart]) -> Tensor:
        """What goes to one trainer: first the heads of all lanes, then of each its weights and states."""
        partitions = self._lanes.partitions
        buffer = torch.empty(sum(_size(part, partitions[part.lane]) for part in parts), device=self._transport.device)
        start = _HEAD * len(parts)
        if parts:
            heads = torch.tensor([self._lanes.traffic.released(part.lane) for part in parts], dtype=torch.int64)
            buffer[:start] = heads.view(torch.float32).reshape(-1).to(buffer.device)
        for part in parts:
            partition = partitions[part.lane]
            for rows, slots in ((partition.weights, part.sent), (partition.state, part.changed)):
                size = slots.size * rows.shape[1]
                if size:
                    self._kernels.take_rows(rows, slots, buffer[start : start + size].view(slots.size, rows.shape[1]))
                start += size
        return buffer

    def post(self, replica: Replica) -> None:
        """Send it, and begin to receive the others'."""
        replica.work = self._transport.post(replica.outgoing, replica.incoming, REPLICA)
        self.seeding.post(replica.seeds)

    def wait(self, replica: Replica) -> None:
        """Return when everything that comes here has come. Raises PeerLost."""
        assert replica.work is not None
        replica.work.wait()
        self.seeding.wait(replica.seeds)
        replica.arrived = True
        replica.outgoing.clear()

    def install(self, replica: Replica, following: ExchangePlan | None) -> None:
        """Bring every copy to the state after the replica's step. following: the next step's exchange, which has come; needed unless `whole`."""
        for peer, parts in replica.parts.items():
            buffer, start = replica.incoming[peer], _HEAD * len(parts)
            heads = buffer[:start].cpu().view(torch.int64).tolist()
            for place, part in enumerate(parts):
                copy = self.copies[part.lane]
                copy.move(replica.step, replica.events[part.lane])
                for rows, slots in ((copy.partition.weights, part.sent), (copy.partition.state, part.changed)):
                    size = slots.size * rows.shape[1]
                    if size:
                        self._kernels.put_rows(rows, slots, buffer[start : start + size].view(slots.size, rows.shape[1]))
                    start += size
                if part.later.size:
                    assert following is not None
                    self._put_exchanged(copy, part, peer, following)
                copy.note_released(*heads[2 * place : 2 * place + 2])
        self.seeding.install(replica.seeds, replica.step)

    def _put_exchanged(self, copy: LaneReplica, part: LanePart, peer: int, following: ExchangePlan) -> None:
        """Weights that the next step's exchange has brought."""
        moves, weights = following.events[part.lane], copy.partition.weights
        places = _places_of(part.later, moves.slots, moves.users, self._masks[self._transport.rank], copy.scratch)
        if places.size != part.later.size:
            raise ScheduleError(
                f"lane {part.lane}: {part.later.size} rows that a step changes are said to be used in the next, {places.size} are: the schedule is "
                "damaged; prepare it again"
            )
        values = torch.empty((places.size, weights.shape[1]), device=self._transport.device)
        self._kernels.take_rows(following.buffers[peer], following.at[part.lane][places], values)
        self._kernels.put_rows(weights, moves.slots[places], values)


def _size(part: LanePart, partition: Partition) -> int:
    """Of a lane's part of a message: float32 values."""
    return _HEAD + part.sent.size * partition.weights.shape[1] + part.changed.size * partition.state.shape[1]
