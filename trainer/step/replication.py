"""Replicas: what an owner sends after a step to the trainers that hold copies of its lanes.

Of the rows that the step changed, a replica has the optimizer state, and the weights of those that the copy's trainer does not get anyway: a row
that a lane of that trainer uses in the next training step comes with that step's exchange, on its critical path, since this step changed it.
Sizes and order follow from the schedule's masks on both sides, as in `exchange`. Of a copy that is still seeded (`seeding`), only the slots that it
has already are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreload.base.compiled import nb
from foreload.cache.rows.partition import Partition
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import LaneEvent
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.step.exchange import REPLICA, ExchangePlan
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.replicas import LaneReplica
from foreload.trainer.step.seeding import Seeding, Seeds
from foreload.trainer.step.transport import Transport, Work

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
