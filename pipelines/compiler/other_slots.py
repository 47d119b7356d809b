"""Count the arrivals that other numbers of slots would cause, by the oracle and by an LRU cache.

An LRU cache with more slots holds everything that one with fewer slots holds. So one pass over the
uses shows, for each use, the number of slots from which on it is a hit (Mattson et al. 1970,
"Evaluation techniques for storage hierarchies").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foreload.base.compiled import nb
from foreload.base.memory import available_bytes
from foreload.pipelines.compiler import oracle
from foreload.pipelines.compiler.lane_planner import MoveBuffer
from foreload.pipelines.compiler.next_uses import ALL_ACCESSES, next_uses
from foreload.pipelines.compiler.numbering import LANE_ROW
from foreload.pipelines.errors import SlotsError
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import walk

BYTES_OF_USE = 16  # memory for each row used at a step, while moves are counted
_CHUNK = 1 << 20  # rows used that are planned together, unless one step has more


@dataclass(frozen=True)
class LaneUses:
    """The distinct rows of one lane that the steps of a schedule use.

    Attributes:
        rows: int32 [accesses], the rows, numbered from 0, step by step.
        starts: int64 [steps + 1], where the rows of each step begin.
        new: bool [rows], whether a row was never trained before the schedule, so that its first
            arrival reads nothing from the store.
        tables: int16 [rows], each row's table.
    """

    rows: np.ndarray
    starts: np.ndarray
    new: np.ndarray
    tables: np.ndarray

    @property
    def least_slots(self) -> int:
        """The number of rows of the largest step, which cannot be trained with fewer slots."""
        return int(np.diff(self.starts).max(initial=0))

    @cached_property
    def nexts(self) -> np.ndarray:
        """The step of each use's next use, int32 [accesses]; NEVER if there is none."""
        # Only the steps matter here, not which lanes use the rows.
        alone, following = np.zeros(len(self.rows), np.uint8), np.empty(len(self.rows), np.int32)
        lasts = np.full((len(self.new), 2), oracle.NEVER, np.int32)
        next_uses(self.rows, self.starts, alone, alone[:0], 0, lasts, following, alone)
        return following


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """The moves of one lane with some number of slots.

    Attributes:
        arrived: int64 [steps], the arrivals.
        fetched: int64 [steps], the arrivals from the store.
        ended: int64 [steps], the residencies that end.
        occupied: The slots that are ever taken. The end of the schedule ends a residency in each.
    """

    arrived: np.ndarray
    fetched: np.ndarray
    ended: np.ndarray
    occupied: int


def lane_uses(schedule: Schedule, lane: int) -> LaneUses:
    """Read a lane's uses from a complete schedule. Raises ScheduleError.

    The result takes 4 bytes for each row used at a step.
    """
    held = np.full(schedule.header.slots[lane], -1, np.int32)
    # For each table, the number of the row with each ordinal, -1 if it was not seen yet.
    numbers = [np.empty(0, np.int32) for _ in schedule.header.features.tables]
    used: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    new: list[np.ndarray] = []
    of_tables: list[np.ndarray] = []
    known = 0
    for moves in walk(schedule, lane):
        tables, ordinals, tags = (moves.values(f"arrival_{name}") for name in ("table", "ordinal", "tag"))
        arriving = np.empty(len(ordinals), np.int32)
        for table in np.unique(tables).tolist():
            of_table = np.flatnonzero(tables == table)
            numbers[table] = _with_room(numbers[table], int(ordinals[of_table].max()) + 1)
            # A row may arrive several times here, but is new only once. np.unique finds its first
            # arrival.
            distinct, first = np.unique(ordinals[of_table], return_index=True)
            unseen = numbers[table][distinct] < 0
            numbers[table][distinct[unseen]] = known + np.arange(int(unseen.sum()), dtype=np.int32)
            known += int(unseen.sum())
            new.append(tags[of_table[first[unseen]]] == 0)
            of_tables.append(np.full(int(unseen.sum()), table, np.int16))
            arriving[of_table] = numbers[table][ordinals[of_table]]
        used.append(moves.occupants("slots", held, arriving))
        counts.append(moves.counts()[0])
    starts = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]))]).astype(np.int64)
    return LaneUses(
        np.concatenate([np.empty(0, np.int32), *used]),
        starts,
        np.concatenate([np.empty(0, bool), *new]),
        np.concatenate([np.empty(0, np.int16), *of_tables]),
    )


def count_moves(uses: LaneUses, slots: int) -> SlotCounts:
    """Count the moves of a lane with `slots` slots.

    Raises:
        SlotsError: If a step has more rows.
    """
    if slots < uses.least_slots:
        raise SlotsError(f"--slots: must be at least the rows of the largest step, {uses.least_slots}; got {slots}; give more")
    steps, starts = len(uses.starts) - 1, uses.starts
    what = oracle.Accesses(uses.rows, uses.nexts, np.zeros(len(uses.rows), np.uint8), ALL_ACCESSES)
    state = oracle.with_rows(oracle.empty_lane(slots, steps, np.zeros(1, np.int64)), (~uses.new).astype(np.int32))
    rows, buffer, counts = np.zeros(len(uses.new), LANE_ROW), MoveBuffer(np.dtype(np.uint8)), [np.zeros((0, 4), np.int64)]
    first = 0
    while first < steps:
        end = max(int(np.searchsorted(starts, starts[first] + _CHUNK, side="right")) - 1, first + 1)
        of_part = starts[first : end + 1]
        counts.append(buffer.room(end - first, int(of_part[-1] - of_part[0])))
        oracle.plan_steps(state, rows, first, 0, what, of_part, (0, int(oracle.NEVER)), buffer.fill, buffer.moves, counts[-1])
        buffer.take()
        first = end
    arrived, ended, initial = np.concatenate(counts)[:, [oracle.ARRIVALS, oracle.ENDS, oracle.INITIAL]].T
    return SlotCounts(arrived, arrived - initial, ended, int(state.scalars[oracle.USED]))


def fewest_arrivals(schedule: Schedule) -> int | None:
    """Return Belady's minimum of arrivals for a complete schedule's slots.

    Returns None if the count needs more than half of the memory available.
    """
    if 2 * BYTES_OF_USE * schedule.manifest["counts"]["rows_used"] > available_bytes():
        return None
    lanes = range(schedule.header.lanes)
    return sum(int(count_moves(lane_uses(schedule, lane), schedule.header.slots[lane]).arrived.sum()) for lane in lanes)


def _with_room(array: np.ndarray, size: int) -> np.ndarray:
    if size <= len(array):
        return array
    grown = np.full(max(size, 2 * len(array)), -1, np.int32)
    grown[: len(array)] = array
    return grown


NEVER = int(np.iinfo(np.int32).max)
"""The depth of a row's first use, which is an arrival with any number of slots."""


def lru_depths(uses: LaneUses) -> np.ndarray:
    """Count, for each use, the rows used later than its row before its step began.

    With more slots than that, the use is a hit in an LRU cache. Rows of one step count as used in
    the order in which the schedule lists them; all rows of a step are in slots at once. The
    computation takes 12 bytes for each use.

    Returns:
        int32 [accesses].
    """
    depths = np.empty(len(uses.rows), np.int32)
    _depths(uses.rows, uses.starts, np.full(len(uses.new), -1, np.int32), np.zeros(len(uses.rows) + 1, np.int32), depths)
    return depths


def lru_arrivals(uses: LaneUses, depths: np.ndarray, slots: int) -> np.ndarray:
    """Count the arrivals of each step in an LRU cache that starts empty.

    Args:
        depths: The result of `lru_depths`.
        slots: At least the rows of the largest step.

    Returns:
        int64 [steps].
    """
    before = np.concatenate([[0], np.cumsum(depths >= slots)])
    return np.asarray(before[uses.starts[1:]] - before[uses.starts[:-1]], np.int64)


@nb.njit(nogil=True, cache=True)
def _depths(rows: np.ndarray, starts: np.ndarray, last: np.ndarray, tree: np.ndarray, depths: np.ndarray) -> None:
    """Fill in the depth of each use.

    Args:
        rows: See `LaneUses`.
        starts: See `LaneUses`.
        last: int32 [rows], -1, the place of each row's last use.
        tree: int32 [accesses + 1], zeros, a Fenwick tree over places, which counts the places that
            are a row's last use.
        depths: int32 [accesses], filled.
    """
    size, distinct = len(rows), 0
    for step in range(len(starts) - 1):
        for k in range(starts[step], starts[step + 1]):
            before = last[rows[k]]
            if before < 0:
                depths[k] = NEVER
                continue
            # Count the rows whose last use is at this place or before. All other rows were used
            # later.
            place, earlier = before + 1, 0
            while place > 0:
                earlier += tree[place]
                place -= place & -place
            depths[k] = distinct - earlier
        # The tree changes only after all depths of the step are known, because they count uses
        # before the step began.
        for k in range(starts[step], starts[step + 1]):
            before = last[rows[k]]
            if before < 0:
                distinct += 1
            else:
                place = before + 1
                while place <= size:
                    tree[place] -= 1
                    place += place & -place
            last[rows[k]] = k
            place = k + 1
            while place <= size:
                tree[place] += 1
                place += place & -place
