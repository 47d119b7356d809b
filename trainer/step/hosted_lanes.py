"""The lanes that a trainer hosts: who sits in their slots, and the traffic with the store; and the copies that it has of other lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreload.base.compiled import nb
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.staging import EndedRows
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.format import Arrivals, Event, LaneEvent
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.step.term_session import Clock


class LaneReplica:
    """Rows, states and occupants of a lane's slots after a committed step, and the rows that its owner still owes the store.

    It is moved by the schedule, as the owner's partition is; a row's values come from its owner once it was changed (`replication`). One that is
    seeded while training goes on holds the slots below `cursor` alone.

    partition: without base. given: int64 [tables], the lane's ordinals given so far. owed: boundary -> the rows that ended there, for each
    boundary that is not known to be released. released, batch: the last boundary up to which all are released, and the last write-back batch that
    is, as the owner last reported. seeded_at: the step after which the last slots came; rows that ended up to there may be missing from `owed`.
    scratch: uint8 [slots], zeros between uses.
    """

    def __init__(self, lane: int, partition: Partition, tables: int, empty: bool) -> None:
        """empty: nothing sits in the lane's slots and nothing is owed, so the copy lacks nothing; else it must be seeded."""
        self.lane, self.partition = lane, partition
        self.given = np.zeros(tables, np.int64)
        self.owed: dict[int, EndedRows] = {}
        self.released, self.batch = -1, 0
        self.cursor = partition.slots if empty else 0
        self.seeded_at = -1
        self.scratch = np.zeros(partition.slots, np.uint8)

    @classmethod
    def of_owner(cls, lane: int, partition: Partition, given: np.ndarray, released: tuple[int, int]) -> LaneReplica:
        """What a trainer keeps that was the lane's owner, and owes the store nothing. given, released: as the traffic of the lane had them."""
        partition.forget_base()
        copy = cls(lane, partition, given.size, empty=True)
        copy.given[:] = given
        copy.note_released(*released)
        return copy

    @property
    def seeded(self) -> bool:
        """Whether it holds every slot."""
        return self.cursor == self.partition.slots

    @property
    def complete(self) -> bool:
        """Whether the lane can be taken over from it: it holds every slot and every row that is owed."""
        return self.seeded and self.released >= self.seeded_at

    def move(self, step: int, moves: LaneEvent) -> None:
        """The boundary before a training step, and the tags that the step gives; the values of its rows are put in by the caller."""
        ends, arrivals, slots = moves.ends, moves.arrivals, moves.slots
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
        """What the owner reports: rows that ended up to the boundary are in the store, of the batches up to this one."""
        # Who has just taken the lane over may know less than was reported before.
        self.released, self.batch = max(self.released, boundary), max(self.batch, batch)
        for past in [number for number in self.owed if number <= boundary]:
            del self.owed[past]


def initial_by_table(arrivals: Arrivals, tables: int) -> np.ndarray:
    """How many rows get their ordinals by arriving, int64 [tables]: those that were never written."""
    return np.bincount(arrivals.table[arrivals.tag == 0], minlength=tables).astype(np.int64)


@nb.njit(nogil=True, cache=True)
def _arrival_of(slots: np.ndarray, arriving: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """out[i]: which arrival takes slots[i], or -1. scratch int32 [slots]: all -1, before and after."""
    for a in range(arriving.size):
        scratch[arriving[a]] = a
    for i in range(slots.size):
        out[i] = scratch[slots[i]]
    for a in range(arriving.size):
        scratch[arriving[a]] = -1


@dataclass(frozen=True, slots=True)
class KeptBoundary:
    """What undoes a boundary of a lane: slots int32 [E] and the rows that left them, slots taken int32 [A], ordinals given int64 [tables]."""

    slots: np.ndarray
    ended: EndedRows
    taken: np.ndarray
    given: np.ndarray
    at_stop: bool = False


class HostedLanes:
    """Partitions by lane, and the one traffic that serves them. Lanes come and go between steps.

    stored: access to the rows in the store, which belongs to the traffic's thread. All methods are for the trainer's own thread.

    keeps: whether boundaries can be undone. Then rows that ended at one are handed to the traffic only when the step before it is committed
    (`commit`). given: lane -> int64 [tables], the ordinals given so far.
    """

    def __init__(self, stored: StoredRows, traffic: Traffic) -> None:
        self.stored, self.traffic = stored, traffic
        self.partitions: dict[int, Partition] = {}
        self.given: dict[int, np.ndarray] = {}
        self.keeps = False
        self._arrivals: dict[int, np.ndarray] = {}  # scratch of `_arrival_of` by lane, int32 [slots], all -1 between calls
        self._held_up = 0.0  # seconds for which the traffic had no room
        self._boundary = -1  # the last one that was passed
        self._handed: dict[int, int] = {}  # by lane, the last boundary whose rows the traffic has
        self._kept: dict[int, dict[int, KeptBoundary]] = {}  # by boundary and lane
        self._given_last: dict[
            int, deque[tuple[int, np.ndarray]]
        ] = {}  # by lane, at the last two boundaries, where these cannot be undone

    @property
    def numbers(self) -> list[int]:
        """Which lanes they are."""
        return list(self.partitions)

    def add(self, partition: Partition, plan: LanePlan, given: np.ndarray) -> None:
        """Host one more lane, which was taken over: partition, with its rows in their slots; plan, of its traffic; given, as the lane's in `given`.

        Raises CacheError.
        """
        self.traffic.add_lane(plan)
        self.partitions[plan.lane] = partition
        self.given[plan.lane] = given.astype(np.int64)
        self._handed[plan.lane] = plan.released_boundary
        self._arrivals[plan.lane] = np.full(partition.slots, -1, np.int32)

    def give_away(self, lane: int) -> LaneReplica:
        """Host a lane no more, whose next owner has a copy of it: what was handed over is written back, what sits in slots stays, as another copy.

        To be called between steps, where every boundary that was passed is committed or undone. Raises CacheError.
        """
        self.traffic.flush()
        released, _ = self.traffic.released(lane)
        batch = self.traffic.release_lane(lane)
        del self._arrivals[lane], self._handed[lane]
        return LaneReplica.of_owner(lane, self.partitions.pop(lane), self.given.pop(lane), (released, batch))

    def weights(self) -> dict[int, Tensor]:
        """Lane -> float32 [slots, W]: the partitions themselves, no copies."""
        return {lane: partition.weights for lane, partition in self.partitions.items()}

    def pass_boundary(self, event: Event, moves: Sequence[LaneEvent], clock: Clock) -> None:
        """The boundary before an event: rows of ended residencies leave for write-back, arrived rows take their slots.

        A boundary is passed once, and stays behind whatever becomes of the step: what left is with the traffic, and rows that arrived are as the
        store has them until the step is applied. Evaluation ends no residency.
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
        """Residencies end at a boundary, at which `arrivals` come: keep the rows, or hand them over."""
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
        """The ordinals given up to a training step, int64 [tables], where the boundary behind it may have been passed, and was not undone."""
        return self.given[lane] - sum(given for boundary, given in self._given_last.get(lane, ()) if boundary > step)

    def _hand_over(self, lane: int, boundary: int, ended: EndedRows, at_stop: bool) -> None:
        """Give the rows of a boundary to the traffic, unless it has them: those of one that was undone are the same bits when it is passed again."""
        if boundary > self._handed[lane]:
            # Whatever becomes of the call, the traffic has them then.
            self._handed[lane] = boundary
            self._held_up += self.traffic.write_back(lane, boundary, ended, at_stop)

    def take_held_up(self) -> float:
        """Seconds for which the traffic had no room for rows that leave, since this was asked last."""
        held_up, self._held_up = self._held_up, 0.0
        return held_up

    def commit(self, step: int) -> None:
        """Training step `step` is committed: the rows that ended at the boundary after it leave for write-back, and older boundaries stay passed."""
        for boundary in sorted(self._kept):
            if boundary <= step:
                del self._kept[boundary]
            elif boundary == step + 1:
                for lane, kept in self._kept[boundary].items():
                    self._hand_over(lane, boundary, kept.ended, kept.at_stop)

    def undo_boundaries(self, step: int) -> None:
        """Undo the boundaries after training step `step` that were passed: rows that left sit in their slots again, those that came are gone."""
        for boundary in sorted((number for number in self._kept if number > step), reverse=True):
            for lane, kept in self._kept.pop(boundary).items():
                self.partitions[lane].put_back(kept.taken, kept.slots, kept.ended)
                self.given[lane] -= kept.given
        self._boundary = min(self._boundary, step)

    def hand_over_owed(self, lane: int, owed: Sequence[tuple[int, EndedRows]]) -> None:
        """Give the traffic what an earlier owner of the lane has left to write, by boundary, ascending."""
        for boundary, rows in owed:
            self._hand_over(lane, boundary, rows, at_stop=False)

    def take_early(self, event: Event, lane: int, moves: LaneEvent, places: np.ndarray, out: Tensor, kernels: Kernels) -> None:
        """The weights of rows that a coming event uses, before its boundary: from their slots or, of those yet to be admitted, from staging.

        moves: the lane's part of that event; places: int32 [n] in its list of rows; out: float32 [n, W]. Waits for the arrivals among them.
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
            kernels.put_rows(out, arriving.astype(np.int32), torch.from_numpy(values).to(out.device))

    def write_everything_back(self, boundary: int, at_stop: bool) -> int:
        """End every residency and wait until the store has all rows. Returns how many sat in slots, beyond the schedule only changed ones.

        boundary: of the step after the last one trained. at_stop: on a clean stop; these write-backs are none of the schedule's and are counted
        apart.
        """
        count = 0
        # The boundary of a step that was aborted has been passed already.
        boundary = max(boundary, self._boundary + 1)
        for lane, partition in self.partitions.items():
            ended = self._end(lane, boundary, partition.occupied(), at_stop=at_stop)
            self._hand_over(lane, boundary, ended, at_stop)
            count += int((ended.tag != ended.stored_tag).sum()) if at_stop else len(ended)
        self._boundary = boundary
        self.traffic.flush()
        return count

    def last_batches(self) -> dict[int, int]:
        """Of each lane the number of its last write-back batch that all shards acknowledged: who opens the lane next begins there."""
        return {lane: self.traffic.last_batch(lane) for lane in self.partitions}
