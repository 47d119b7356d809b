"""The lanes that a trainer hosts, and the replicas of other lanes that it holds.

Hosted lanes have rows in their slots and traffic with the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foreload.base.compiled import nb
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.device_copies import upload
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.staging import EndedRows
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.format import Arrivals, Event, LaneEvent
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.step.term_session import Clock


class LaneReplica:
    """A replica of another trainer's lane, in the state after a committed step.

    It has the rows, states and occupants of the lane's slots, and the rows that the owner still
    owes the store. The schedule moves rows in it as it does in the owner's partition. The owner
    sends the new values of rows that changed (`replication`). A replica that is seeded while
    training goes on holds only the slots below `cursor`.

    Attributes:
        partition: the slots, without base.
        given: int64 [tables], the number of the lane's ordinals given so far.
        owed: by boundary, the rows that ended there, for each boundary that is not known to be
            released.
        released: the last boundary up to which all rows are released, as the owner last reported.
        batch: the last write-back batch that is released, as the owner last reported.
        cursor: the replica holds the slots below it.
        seeded_at: the step after which the last slots arrived. Rows that ended up to that step may
            be missing from `owed`.
        scratch: uint8 [slots], zeros between uses.
    """

    def __init__(self, lane: int, partition: Partition, tables: int, empty: bool) -> None:
        """Make a replica whose slots are all free.

        Args:
            tables: the number of tables.
            empty: whether no row sits in the lane's slots and no row is owed. Then the replica is
                complete, otherwise it must be seeded.
        """
        self.lane, self.partition = lane, partition
        self.given = np.zeros(tables, np.int64)
        self.owed: dict[int, EndedRows] = {}
        self.released, self.batch = -1, 0
        self.cursor = partition.slots if empty else 0
        self.seeded_at = -1
        self.scratch = np.zeros(partition.slots, np.uint8)

    @classmethod
    def of_owner(cls, lane: int, partition: Partition, given: np.ndarray, released: tuple[int, int]) -> LaneReplica:
        """Make the replica that a former owner keeps, which owes the store nothing.

        Args:
            given: int64 [tables], the ordinals given so far.
            released: the last released boundary and write-back batch, as the traffic of the lane
                had them.
        """
        partition.forget_base()
        copy = cls(lane, partition, given.size, empty=True)
        copy.given[:] = given
        copy.note_released(*released)
        return copy

    @property
    def seeded(self) -> bool:
        """Whether the replica holds every slot."""
        return self.cursor == self.partition.slots

    @property
    def complete(self) -> bool:
        """Whether its trainer can take the lane over from it.

        It must hold every slot and every row that is owed.
        """
        return self.seeded and self.released >= self.seeded_at

    def move(self, step: int, moves: LaneEvent) -> None:
        """Pass the boundary before a training step, and set the tags that the step gives.

        The caller writes the values of the step's rows.
        """
        ends, arrivals, slots = moves.ends, moves.arrivals, moves.slots
        # Slots from the cursor on arrive later, with all that has happened in them.
        if not self.seeded:
            ends, slots = ends[ends < self.cursor], slots[slots < self.cursor]
            here = arrivals.slot < self.cursor
            arrivals = Arrivals(*arrivals.columns(here), arrivals.slot[here], arrivals.after[here])
        if ends.size:
            self.owed[step] = self.partition.end(ends)
        if arrivals.slot.size:
            self.partition.seat(arrivals)
        self.partition.mark_trained(slots, step)
        self.given += initial_by_table(moves.arrivals, self.given.size)

    def note_released(self, boundary: int, batch: int) -> None:
        """Record a report of the owner and drop the owed rows that are in the store.

        Args:
            boundary: rows that ended up to this boundary are in the store.
            batch: the last write-back batch that is in the store.
        """
        # An owner that has just taken the lane over may report less than the owner before it.
        self.released, self.batch = max(self.released, boundary), max(self.batch, batch)
        for past in [number for number in self.owed if number <= boundary]:
            del self.owed[past]


def initial_by_table(arrivals: Arrivals, tables: int) -> np.ndarray:
    """Return how many arriving rows get their ordinals now, int64 [tables].

    These are the rows that were never written.
    """
    return np.bincount(arrivals.table[arrivals.tag == 0], minlength=tables).astype(np.int64)


@nb.njit(nogil=True, cache=True)
def _arrival_of(slots: np.ndarray, arriving: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Set `out[i]` to the number of the arrival that takes `slots[i]`, or to -1.

    `scratch` is int32 [slots] and holds only -1, before and after.
    """
    for a in range(arriving.size):
        scratch[arriving[a]] = a
    for i in range(slots.size):
        out[i] = scratch[slots[i]]
    for a in range(arriving.size):
        scratch[arriving[a]] = -1


@dataclass(frozen=True, slots=True)
class KeptBoundary:
    """What it takes to undo a boundary of a lane.

    Attributes:
        slots: int32 [E], the slots that rows left.
        ended: the rows that left them.
        taken: int32 [A], the slots that arrivals took.
        given: int64 [tables], the number of ordinals that the arrivals were given.
        at_stop: whether the residencies ended because of a clean stop, beyond the schedule.
    """

    slots: np.ndarray
    ended: EndedRows
    taken: np.ndarray
    given: np.ndarray
    at_stop: bool = False


class HostedLanes:
    """The partitions of the hosted lanes, and the one traffic that serves them.

    Lanes come and go between steps. All methods are for the trainer's own thread.

    Attributes:
        stored: access to the rows in the store. It belongs to the traffic's thread.
        partitions: by lane.
        given: by lane, int64 [tables], the number of ordinals given so far.
        keeps: whether boundaries can be undone. If so, rows that ended at a boundary are handed to
            the traffic only when the step before it is committed (`commit`).
    """

    def __init__(self, stored: StoredRows, traffic: Traffic) -> None:
        self.stored, self.traffic = stored, traffic
        self.partitions: dict[int, Partition] = {}
        self.given: dict[int, np.ndarray] = {}
        self.keeps = False
        # By lane, the scratch array of `_arrival_of`: int32 [slots], all -1 between calls.
        self._arrivals: dict[int, np.ndarray] = {}
        # How long the traffic had no room.
        self._held_up = 0.0  # seconds
        # The last boundary that was passed.
        self._boundary = -1
        # By lane, the last boundary whose rows the traffic has.
        self._handed: dict[int, int] = {}
        # By boundary and lane, what undoes it.
        self._kept: dict[int, dict[int, KeptBoundary]] = {}
        # By lane, the ordinals given at each of the last two boundaries, where these cannot be
        # undone.
        self._given_last: dict[int, deque[tuple[int, np.ndarray]]] = {}

    @property
    def numbers(self) -> list[int]:
        """The numbers of the lanes."""
        return list(self.partitions)

    def add(self, partition: Partition, plan: LanePlan, given: np.ndarray) -> None:
        """Host one more lane, which was taken over.

        Args:
            partition: the lane's slots, with its rows in them.
            plan: the plan of its traffic.
            given: int64 [tables], the number of the lane's ordinals given so far.

        Raises:
            CacheError: the traffic serves the lane already, or has failed.
        """
        self.traffic.add_lane(plan)
        self.partitions[plan.lane] = partition
        self.given[plan.lane] = given.astype(np.int64)
        self._handed[plan.lane] = plan.released_boundary
        self._arrivals[plan.lane] = np.full(partition.slots, -1, np.int32)

    def give_away(self, lane: int) -> LaneReplica:
        """Stop hosting a lane whose next owner has a replica of it.

        The rows that were handed over are written back. The rows in slots stay, and the result is a
        further replica of the lane. Call this between steps, when every boundary that was passed is
        committed or undone. Raises CacheError.
        """
        self.traffic.flush()
        released, _ = self.traffic.released(lane)
        batch = self.traffic.release_lane(lane)
        del self._arrivals[lane], self._handed[lane]
        return LaneReplica.of_owner(lane, self.partitions.pop(lane), self.given.pop(lane), (released, batch))

    def weights(self) -> dict[int, Tensor]:
        """Return the weights by lane, float32 [slots, W].

        They are the partitions' own tensors, not copies.
        """
        return {lane: partition.weights for lane, partition in self.partitions.items()}

    def pass_boundary(self, event: Event, moves: Sequence[LaneEvent], clock: Clock) -> None:
        """Pass the boundary before an event.

        Rows of ended residencies leave for write-back, and arrived rows take their slots. A
        boundary is passed once, and remains passed even if the step fails: the rows that left go to
        the traffic, and the rows that arrived equal those in the store until the step is applied.
        Only `undo_boundaries` takes a boundary back, if `keeps` is set. Evaluation ends no
        residency.
        """
        for lane, partition in self.partitions.items():
            own = moves[lane]
            if event.kind == "train":
                self._end(lane, event.step, own.ends, own.arrivals)
            clock.lap("compute")
            staged = self.traffic.take(lane, event.index)
            clock.lap("waiting")
            partition.admit(own.arrivals, staged)
        if event.kind == "train":
            self._boundary = event.step
        clock.lap("compute")

    def _end(
        self, lane: int, boundary: int, slots: np.ndarray, arrivals: Arrivals | None = None, at_stop: bool = False
    ) -> EndedRows:
        """End residencies at a boundary, and keep their rows or hand them to the traffic.

        Args:
            arrivals: the rows that arrive at the boundary. If None, none do.
        """
        ended = self.partitions[lane].end(slots)
        given = np.zeros_like(self.given[lane])
        if arrivals is not None:
            given += np.bincount(arrivals.table[arrivals.tag == 0], minlength=given.size)
            self.given[lane] += given
        if self.keeps:
            taken = np.empty(0, np.int32) if arrivals is None else arrivals.slot
            self._kept.setdefault(boundary, {})[lane] = KeptBoundary(slots, ended, taken, given, at_stop)
        else:
            self._given_last.setdefault(lane, deque(maxlen=2)).append((boundary, given))
            self._hand_over(lane, boundary, ended, at_stop)
        return ended

    def given_after(self, lane: int, step: int) -> np.ndarray:
        """Return how many ordinals were given up to a training step, int64 [tables].

        The boundary behind that step may have been passed, if it was not undone.
        """
        return self.given[lane] - sum(given for boundary, given in self._given_last.get(lane, ()) if boundary > step)

    def _hand_over(self, lane: int, boundary: int, ended: EndedRows, at_stop: bool) -> None:
        """Give the rows of a boundary to the traffic, unless the traffic has them.

        A boundary that was undone and is passed again has the same rows, bit for bit.
        """
        if boundary > self._handed[lane]:
            # The traffic has the rows from here on, even if the call fails.
            self._handed[lane] = boundary
            self._held_up += self.traffic.write_back(lane, boundary, ended, at_stop)

    def take_held_up(self) -> float:
        """Return for how many seconds the traffic had no room for rows since the last call."""
        held_up, self._held_up = self._held_up, 0.0
        return held_up

    def commit(self, step: int) -> None:
        """Note that training step `step` is committed.

        Rows that ended at the boundary after it are handed to the traffic. Older boundaries can no
        longer be undone.
        """
        for boundary in sorted(self._kept):
            if boundary <= step:
                del self._kept[boundary]
            elif boundary == step + 1:
                for lane, kept in self._kept[boundary].items():
                    self._hand_over(lane, boundary, kept.ended, kept.at_stop)

    def undo_boundaries(self, step: int) -> None:
        """Undo the boundaries that were passed after training step `step`.

        Rows that left sit in their slots again, and rows that arrived leave the slots.
        """
        for boundary in sorted((number for number in self._kept if number > step), reverse=True):
            for lane, kept in self._kept.pop(boundary).items():
                self.partitions[lane].put_back(kept.taken, kept.slots, kept.ended)
                self.given[lane] -= kept.given
        self._boundary = min(self._boundary, step)

    def hand_over_owed(self, lane: int, owed: Sequence[tuple[int, EndedRows]]) -> None:
        """Give the traffic the rows that an earlier owner of the lane did not write.

        Args:
            owed: the rows by boundary, ascending.
        """
        for boundary, rows in owed:
            self._hand_over(lane, boundary, rows, at_stop=False)

    def take_early(self, event: Event, lane: int, moves: LaneEvent, places: np.ndarray, out: Tensor, kernels: Kernels) -> None:
        """Read the weights of rows that a coming event uses, before its boundary is passed.

        They come from the rows' slots. Rows that have not taken their slots yet come from arrival
        staging, and this method waits for them.

        Args:
            moves: the lane's part of the coming event.
            places: int32 [n], places in the lane's list of rows.
            out: float32 [n, W], which receives the weights.
        """
        slots = moves.slots[places]
        arrival = np.empty(slots.size, np.int32)
        _arrival_of(slots, moves.arrivals.slot, self._arrivals[lane], arrival)
        kernels.take_rows(self.partitions[lane].weights, slots, out)
        arriving = np.flatnonzero(arrival >= 0)
        if arriving.size:
            wanted = np.zeros(len(moves.arrivals), bool)
            wanted[arrival[arriving]] = True
            values = self.traffic.rows_ready(lane, event.index, wanted).weights[arrival[arriving]]
            kernels.put_rows(out, arriving.astype(np.int32), upload(values, out.device))

    def write_everything_back(self, boundary: int, at_stop: bool) -> int:
        """End every residency, and wait until the store has all rows.

        Args:
            boundary: the boundary of the step after the last one trained.
            at_stop: whether this is a clean stop. Its write-backs are not in the schedule and are
                counted apart.

        Returns:
            How many rows sat in slots. On a clean stop, only those that changed since they were
            stored.
        """
        count = 0
        # The boundary of an aborted step has been passed already. Then the rows end at the next
        # one.
        boundary = max(boundary, self._boundary + 1)
        for lane, partition in self.partitions.items():
            ended = self._end(lane, boundary, partition.occupied(), at_stop=at_stop)
            self._hand_over(lane, boundary, ended, at_stop)
            count += int((ended.tag != ended.stored_tag).sum()) if at_stop else len(ended)
        self._boundary = boundary
        self.traffic.flush()
        return count

    def last_batches(self) -> dict[int, int]:
        """Return, by lane, the number of the last write-back batch that all shards acknowledged.

        The next owner of the lane continues from this number.
        """
        return {lane: self.traffic.last_batch(lane) for lane in self.partitions}
