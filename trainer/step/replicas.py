"""A copy of a lane that another trainer hosts: what is needed to go on as its owner (docs/internals/trainer.md, Copies)."""

from __future__ import annotations

import numpy as np

from foreload.cache.rows.partition import Partition
from foreload.cache.rows.staging import EndedRows
from foreload.pipelines.schedule.format import Arrivals, LaneEvent


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
