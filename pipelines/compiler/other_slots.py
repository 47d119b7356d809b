"""The counting pass: how many rows would arrive, and leave, at every step of a schedule if its lanes had another number of slots.

Who uses which rows when does not depend on slots, so it is read from a schedule with any number of them; Belady's choice over all of that gives the
counts which `prepare` would come to, wherever its lookahead suffices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np

from foreload.pipelines.errors import SlotsError
from foreload.pipelines.schedule.reader import Schedule


@dataclass(frozen=True, slots=True)
class LaneAccesses:
    """The distinct rows that the steps of a schedule use of one lane.

    rows: int32 [accesses], numbered from 0, step by step; starts: int64 [steps + 1], where each step's begin; new: bool [rows], whether a row was
    never trained before the schedule, so that its first arrival asks nothing of the store.
    """

    rows: np.ndarray
    starts: np.ndarray
    new: np.ndarray

    @property
    def least_slots(self) -> int:
        """Rows of the largest step: with fewer slots it cannot be trained."""
        return int(np.diff(self.starts).max(initial=0))


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """What would be moved with a number of slots: int64 [steps] each, of one lane. occupied: slots that are ever taken, all of which end at last."""

    arrived: np.ndarray
    fetched: np.ndarray
    ended: np.ndarray
    occupied: int


def lane_accesses(schedule: Schedule, lane: int) -> LaneAccesses:
    """Read them from a complete schedule: 4 bytes for each row used at a step. Raises ScheduleError."""
    occupants = np.full(schedule.header.slots[lane], -1, np.int32)
    numbers = [np.empty(0, np.int32) for _ in schedule.header.features.tables]  # ordinal -> number of the row, -1: not seen yet
    used: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    new: list[np.ndarray] = []
    known = 0
    for index, segment in enumerate(schedule.segments()):
        if segment.kind != "train":
            continue
        _, moves = schedule.columns(index, lane)
        (slot_starts, slots), (arrival_starts, arrival_slot) = moves.whole("slots"), moves.whole("arrival_slot")
        tables, ordinals, tags = (moves.whole(f"arrival_{name}")[1] for name in ("table", "ordinal", "tag"))
        arriving = np.empty(len(ordinals), np.int32)
        for table in np.unique(tables).tolist():
            of_table = np.flatnonzero(tables == table)
            numbers[table] = _with_room(numbers[table], int(ordinals[of_table].max()) + 1)
            # An ordinal is new once; which of its arrivals comes first, np.unique tells.
            distinct, first = np.unique(ordinals[of_table], return_index=True)
            unseen = numbers[table][distinct] < 0
            numbers[table][distinct[unseen]] = known + np.arange(int(unseen.sum()), dtype=np.int32)
            known += int(unseen.sum())
            new.append(tags[of_table[first[unseen]]] == 0)
            arriving[of_table] = numbers[table][ordinals[of_table]]
        rows = np.empty(len(slots), np.int32)
        _replay(occupants, slot_starts, slots, arrival_starts, arrival_slot, arriving, rows)
        used.append(rows)
        counts.append(np.diff(slot_starts))
    starts = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]))]).astype(np.int64)
    return LaneAccesses(np.concatenate([np.empty(0, np.int32), *used]), starts, np.concatenate([np.empty(0, bool), *new]))


def count_moves(accesses: LaneAccesses, slots: int) -> SlotCounts:
    """What a lane moves with so many slots. Raises SlotsError where a step has more rows."""
    if slots < accesses.least_slots:
        raise SlotsError(
            f"--slots: must be at least the rows of the largest step, {accesses.least_slots}; got {slots}; give more"
        )
    steps = len(accesses.starts) - 1
    counts = np.zeros((steps, 3), np.int64)
    occupied = _count(
        accesses.rows, accesses.starts, accesses.new, slots, _next_uses(accesses.rows, accesses.starts, len(accesses.new)), counts
    )
    return SlotCounts(counts[:, 0].copy(), counts[:, 1].copy(), counts[:, 2].copy(), int(occupied))


def _with_room(array: np.ndarray, size: int) -> np.ndarray:
    if size <= len(array):
        return array
    grown = np.full(max(size, 2 * len(array)), -1, np.int32)
    grown[: len(array)] = array
    return grown


@nb.njit(nogil=True, cache=True)
def _replay(
    occupants: np.ndarray,
    slot_starts: np.ndarray,
    slots: np.ndarray,
    arrival_starts: np.ndarray,
    arrival_slot: np.ndarray,
    arriving: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Fill rows int32 [accesses] of a segment with who sits in the slots used; occupants int32 [slots] become those after it."""
    for step in range(len(slot_starts) - 1):
        for k in range(arrival_starts[step], arrival_starts[step + 1]):
            occupants[arrival_slot[k]] = arriving[k]
        for k in range(slot_starts[step], slot_starts[step + 1]):
            rows[k] = occupants[slots[k]]


@nb.njit(nogil=True, cache=True)
def _next_uses(rows: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    """Of each access, the step in which its row is used next, int32; the number of steps where there is none."""
    steps = len(starts) - 1
    following = np.full(count, steps, np.int32)
    result = np.empty(len(rows), np.int32)
    for step in range(steps - 1, -1, -1):
        for k in range(starts[step], starts[step + 1]):
            result[k] = following[rows[k]]
            following[rows[k]] = step
    return result


@nb.njit(nogil=True, cache=True)
def _count(rows: np.ndarray, starts: np.ndarray, new: np.ndarray, slots: int, next_uses: np.ndarray, counts: np.ndarray) -> int:
    """Fill counts int64 [steps, 3] with arrivals, fetched ones and ended residencies; returns the slots that were taken.

    Rows in slots stand in lists, one for each step of next use. A step's list has exactly its rows that sit in a slot, so a row leaves its list when
    it is used, with all others there, or when it has to go: from the head of the furthest list. No list is searched.
    """
    steps = len(starts) - 1
    heads = np.full(steps + 1, -1, np.int32)
    links = np.full(len(new), -1, np.int32)
    held = np.zeros(len(new), np.bool_)
    seen = np.zeros(len(new), np.bool_)
    taken, furthest = 0, 0
    for step in range(steps):
        heads[step] = -1  # all of them are used now, and cannot leave
        missing = 0
        for k in range(starts[step], starts[step + 1]):
            row = rows[k]
            if not held[row]:
                missing += 1
                if seen[row] or not new[row]:
                    counts[step, 1] += 1
                seen[row] = True
                held[row] = True
        leaving = max(0, taken + missing - slots)
        counts[step, 0], counts[step, 2] = missing, leaving
        taken += missing - leaving
        for _ in range(leaving):
            place = steps
            if heads[steps] < 0:
                while heads[furthest] < 0:
                    furthest -= 1
                place = furthest
            row = heads[place]
            heads[place] = links[row]
            held[row] = False
        for k in range(starts[step], starts[step + 1]):
            row, place = rows[k], next_uses[k]
            links[row] = heads[place]
            heads[place] = row
            if place < steps:
                furthest = max(furthest, place)
    return taken
