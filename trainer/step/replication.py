"""Replication: what an owner sends after a step to the trainers with replicas of its lanes.

The messages of a step are its *replica update*.

A replica update has the optimizer state of all rows that the step changed. It has the weights only
of those rows that the replica's trainer does not get anyway. A row that a lane of that trainer uses
in the next training step comes with that step's exchange, on its critical path, since this step
changed the row. Both sides derive sizes and order from the schedule's masks, as in `exchange`. A
replica that is still being seeded gets only updates of the slots that it has already.

A new replica is seeded in stretches of slots: one stretch after each step while training goes on,
or all of them before training begins. A stretch has the state that its step left. From the next
step on, replica updates have what changes in it. Both sides know which stretch follows which step,
since they begin with the term and all stretches have the same length.
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

# The number of slots in a stretch before training begins.
SLOTS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive slots of a lane, as a message to or from a peer.

    Attributes:
        first: the first slot.
        slots: the number of slots.
        message: uint8.
    """

    lane: int
    peer: int
    first: int
    slots: int
    message: Tensor


@dataclass(slots=True)
class Seeds:
    """The stretches that this trainer sends and receives after one step."""

    outgoing: list[Stretch] = field(default_factory=list)
    incoming: list[Stretch] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class Seeding:
    """One trainer's side of seeding, for one term.

    Attributes:
        stretch: the number of slots sent to a replica after a step while training goes on.
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
        """Begin with the replicas that are complete.

        Args:
            lane_map: for each lane, the rank that hosts it.
            to: by peer, the lanes hosted here of which the peer holds replicas.
            copies: the replicas held here, by lane.
            seeded: (lane, rank) of the replicas that already hold every slot.
        """
        self._transport, self._map, self._lanes, self._copies = transport, tuple(lane_map), lanes, copies
        whole = set(seeded)
        # The cursor of each replica elsewhere: complete ones have all slots.
        self._cursors = {
            (lane, peer): lanes.partitions[lane].slots if (lane, peer) in whole else 0 for peer in to for lane in to[peer]
        }

    def cursor(self, lane: int, peer: int) -> int:
        """Return the cursor of a peer's replica: it has, or is being sent, all slots below it."""
        return self._cursors[lane, peer]

    def next_seeds(self, slots: int) -> Seeds:
        """Return the next stretch for each incomplete replica, and room for those that arrive here.

        Args:
            slots: the largest number of slots in a stretch.
        """
        seeds = Seeds()
        for (lane, peer), cursor in self._cursors.items():
            partition = self._lanes.partitions[lane]
            count = min(slots, partition.slots - cursor)
            if count:
                # Copy the rows now, since the next boundary may change slots before the message is
                # sent.
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
        """Send the stretches, and start to receive.

        Both sides go by lane, and therefore in the same order.
        """
        for lane in range(len(self._map)):
            sends = {stretch.peer: stretch.message for stretch in seeds.outgoing if stretch.lane == lane}
            receives = {stretch.peer: stretch.message for stretch in seeds.incoming if stretch.lane == lane}
            if sends or receives:
                seeds.works.append(self._transport.post(sends, receives, SEED))

    def wait(self, seeds: Seeds) -> None:
        """Wait until all stretches have been sent and received. Raises PeerLost."""
        for work in seeds.works:
            work.wait()
        seeds.works.clear()

    def install(self, seeds: Seeds, step: int) -> None:
        """Put the received stretches into their replicas.

        The other slots of these replicas have the state after `step` already.
        """
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
        """Bring every incomplete replica to the state after `step`, before training begins.

        Raises PeerLost.
        """
        while True:
            seeds = self.next_seeds(SLOTS_AT_ONCE)
            if not seeds.outgoing and not seeds.incoming:
                return
            self.post(seeds)
            self.wait(seeds)
            self.install(seeds, step)


def _bytes(partition: Partition, slots: int, tables: int) -> int:
    """Return the size of a stretch's message: the head, the occupants, weights and states."""
    return 8 * (2 + tables) + slots * (26 + 4 * (partition.weights.shape[1] + partition.state.shape[1]))


def _parts(message: Tensor, partition: Partition, slots: int, tables: int) -> tuple[np.ndarray, list[np.ndarray], list[Tensor]]:
    """Return views of a stretch's message in CPU memory.

    Returns:
        The head, int64 [released boundary, batch, ordinals given]; the columns of the occupants;
        and the weights and states.
    """
    start = 0

    def following(kind: torch.dtype, count: int) -> Tensor:
        nonlocal start
        size = count * kind.itemsize
        start += size
        return message[start - size : start].view(kind)

    head = following(torch.int64, 2 + tables).numpy()
    # Columns of 8-byte values come first, so that every column is aligned.
    ordinal, number = (following(torch.int64, slots).numpy() for _ in range(2))
    values = [
        following(torch.float32, slots * rows.shape[1]).view(slots, rows.shape[1])
        for rows in (partition.weights, partition.state)
    ]
    tag, stored_tag = (following(torch.int32, slots).numpy() for _ in range(2))
    table = following(torch.int16, slots).numpy()
    return head, [table, ordinal, number, tag, stored_tag], values


# In float32 values. These are two int64: the lane's released boundary and batch.
_HEAD = 4


@nb.njit(nogil=True, cache=True)
def _split_by_use(slots, next_users, bits, below):  # type: ignore[no-untyped-def]
    """Split the slots below `below` by whether some lane of `bits` uses the row next.

    Returns two int32 arrays: the slots of rows that no such lane uses, and the others.
    """
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
    """Return the places, int32, of rows in `wanted` slots that a lane of `bits` uses.

    The places are those in a list of rows. `scratch` is uint8 [slots] and holds zeros, before and
    after.
    """
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
    """A lane's rows in a replica update, by their slots.

    Attributes:
        changed: int32, the rows that changed. The update has the state of all of them.
        sent: int32, those of which the update also has the weights.
        later: int32, the others, whose weights come with the next step's exchange.
    """

    lane: int
    changed: np.ndarray
    sent: np.ndarray
    later: np.ndarray


@dataclass(slots=True)
class Replica:
    """The replica update of one step: the messages sent and received.

    Attributes:
        events: every lane's part of the step.
        whole: whether the update has all weights.
        outgoing: the message to each peer.
        parts: by peer, the parts of the lanes in the message from that peer.
        incoming: the message from each peer.
        seeds: the stretches that go with it.
        work: the messages under way, or None before they are posted.
        arrived: whether all messages have arrived.
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
    """One trainer's side of replication, for one term.

    Attributes:
        copies: the replicas held here, by lane.
        seeding: the seeding of replicas that are incomplete.
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
        """Set up replication for a term's lanes and replicas.

        Args:
            lane_map: for each lane, the rank that hosts it.
            copy_map: for each lane, the ranks that hold a replica of it.
            copies: the replicas held here, by lane.
            seeded: (lane, rank) of the replicas that hold every slot when the term begins.
        """
        self._transport, self._kernels, self._lanes, self.copies = transport, kernels, lanes, copies
        own, world = transport.rank, transport.world
        self._masks = [np.uint64(sum(1 << lane for lane, host in enumerate(lane_map) if host == rank)) for rank in range(world)]
        peers = [peer for peer in range(world) if peer != own]
        # By peer: the lanes hosted here of which the peer has replicas, and the peer's lanes of
        # which this trainer has replicas.
        self._to = {
            peer: [lane for lane, host in enumerate(lane_map) if host == own and peer in copy_map[lane]] for peer in peers
        }
        self._from = {
            peer: [lane for lane, host in enumerate(lane_map) if host == peer and own in copy_map[lane]] for peer in peers
        }
        self.seeding = Seeding(transport, lane_map, self._to, lanes, copies, seeded)

    def fill(self, step: int, events: Sequence[LaneEvent], whole: bool) -> Replica:
        """Return the replica update of a step that was just applied, without sending it.

        Args:
            events: every lane's part of the step.
            whole: whether to put in all weights, since the next step's exchange may not come.
        """
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
        """Return what the update of a lane has for one trainer.

        Args:
            rank: the rank of the trainer that holds the replica.
            cursor: the replica has the slots below it.
            whole: whether all weights are sent.
        """
        moves = events[lane]
        sent, later = _split_by_use(moves.slots, moves.next_users, np.uint64(0) if whole else self._masks[rank], cursor)
        return LanePart(lane, moves.slots if cursor == partition.slots else moves.slots[moves.slots < cursor], sent, later)

    def _packed(self, parts: list[LanePart]) -> Tensor:
        """Return the message for one trainer.

        It begins with the heads of all lanes. Then come the weights and states of each lane.
        """
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
        """Send the update, and start to receive those of the other trainers."""
        replica.work = self._transport.post(replica.outgoing, replica.incoming, REPLICA)
        self.seeding.post(replica.seeds)

    def wait(self, replica: Replica) -> None:
        """Wait until all updates for the replicas here have arrived. Raises PeerLost."""
        assert replica.work is not None
        replica.work.wait()
        self.seeding.wait(replica.seeds)
        replica.arrived = True
        replica.outgoing.clear()

    def install(self, replica: Replica, following: ExchangePlan | None) -> None:
        """Bring every replica here to the state after the update's step.

        Args:
            following: the exchange of the next step, which has arrived. It is needed unless the
                update is `whole`.
        """
        for peer, parts in replica.parts.items():
            buffer, start = replica.incoming[peer], _HEAD * len(parts)
            heads = buffer[:start].cpu().view(torch.int64).tolist()
            for place, part in enumerate(parts):
                copy = self.copies[part.lane]
                # The boundary comes first, since the values that follow are for rows in the slots
                # they have during the step.
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
        """Put weights that came with the next step's exchange into a replica."""
        moves, weights = following.events[part.lane], copy.partition.weights
        places = _places_of(part.later, moves.slots, moves.users, self._masks[self._transport.rank], copy.scratch)
        # What a step says of the next step's users must agree with the next step.
        if places.size != part.later.size:
            raise ScheduleError(
                f"lane {part.lane}: {part.later.size} rows that a step changes should be used in the next, {places.size} are: the schedule is "
                "damaged; prepare it again"
            )
        values = torch.empty((places.size, weights.shape[1]), device=self._transport.device)
        self._kernels.take_rows(following.buffers[peer], following.at[part.lane][places], values)
        self._kernels.put_rows(weights, moves.slots[places], values)


def _size(part: LanePart, partition: Partition) -> int:
    """Return the size of a lane's part of a message, in float32 values."""
    return _HEAD + part.sent.size * partition.weights.shape[1] + part.changed.size * partition.state.shape[1]
