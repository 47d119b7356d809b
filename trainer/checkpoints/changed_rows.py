"""Find the rows that training changes between two steps, from the schedule alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import LaneMoves, LaneState, state_after, walk
from foreload.trainer.checkpoints.files import baseline_is_planned


class _LaneChanges:
    """The rows that a lane has changed since the last `taken`, and the rows in its slots."""

    def __init__(self, begun: LaneState, slots: int) -> None:
        self._ordinals = begun.ordinals.copy()
        # Both arrays number a row ordinal * tables + table. `_held` has the row in each slot,
        # `_changed` the changed rows, with repetitions, in pieces.
        self._held = np.zeros(slots, np.int64)
        self._held[begun.slots] = self._rows(begun.occupants.table, begun.occupants.ordinal)
        self._changed = [self._held[:0]]

    def _rows(self, table: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
        return ordinal * len(self._ordinals) + table

    def add(self, moves: LaneMoves) -> None:
        """Record the rows that these moves change.

        An arriving row changes in the step of its arrival. A row that sat in a slot before the
        moves changes if a step uses the slot before another row arrives there.
        """
        arriving = self._rows(moves.values("arrival_table"), moves.values("arrival_ordinal"))
        # Number each initial occupant by its slot, and every arriving row -1. The numbers found in
        # the used slots that are not -1 are then the initial occupants that a step uses.
        sat = np.zeros(len(self._held), bool)
        used = moves.occupants("slots", np.arange(len(sat)), np.full(len(arriving), -1))
        sat[used[used >= 0]] = True
        self._changed += [self._held[sat], arriving]
        # Called only to bring `_held` to the state after these moves.
        moves.occupants("ends", self._held, arriving)
        self._ordinals += moves.given(self._ordinals.size)

    def taken(self) -> list[np.ndarray]:
        """Return which rows changed since the last call: per table, bool over the ordinals."""
        # Lay the tables out one after the other, so that one assignment marks the rows of all of
        # them.
        ends = np.cumsum(self._ordinals)
        changed = np.zeros(int(ends[-1]), bool)
        ordinal, table = np.divmod(np.concatenate(self._changed), len(ends))
        changed[ends[table] - self._ordinals[table] + ordinal] = True
        # Keep the first piece, which is empty: the next `concatenate` needs at least one.
        del self._changed[1:]
        return np.split(changed, ends[:-1])


def changed_rows(schedule: Schedule, since: int, until: int) -> list[list[np.ndarray]]:
    """Return which rows training changes in the steps after `since`, up to and including `until`.

    A row counts as changed if its tag after `until` is greater than since + 1. Steps before the
    schedule's first step belong to another schedule and are ignored. If the schedule is still
    growing, the call waits until it has the steps.

    The call makes one pass over the moves of these steps. It holds 1 byte per row, 8 bytes per
    arrival, and 8 bytes for each row that a segment uses.

    Returns:
        Per lane and table, a bool array over the ordinals given up to `until`.

    Raises:
        ScheduleError: The schedule cannot be read.
    """
    return next(changed_between(schedule, [since, until]))


def changed_between(schedule: Schedule, steps: Sequence[int]) -> Iterator[list[list[np.ndarray]]]:
    """Yield what `changed_rows` returns for each pair of consecutive steps.

    Args:
        steps: Ascending. Nothing is yielded for the first one.
    """
    since = max(steps[0], schedule.header.first_step - 1)
    position = state_after(schedule, since)
    lanes = [_LaneChanges(lane, max(schedule.slots)) for lane in position.lanes]
    walks = [walk(schedule, lane, since, steps[1:]) for lane in range(len(lanes))]
    for until in steps[1:]:
        while since < until:
            # All walks cut the steps at the same places: ends of segments, and `steps`.
            parts = [next(of_lane) for of_lane in walks]
            since = parts[0].last
            for changes, moves in zip(lanes, parts, strict=True):
                changes.add(moves)
        yield [changes.taken() for changes in lanes]


@dataclass(frozen=True, slots=True)
class Plan:
    """The coming checkpoints of a complete schedule, for policy planned.

    Attributes:
        steps: The steps after which checkpoints are saved, ascending. The first is the next
            checkpoint's.
        row_bytes: Bytes of a row of each table.
    """

    schedule: Schedule
    steps: Sequence[int]
    row_bytes: Sequence[int]

    @classmethod
    def of(cls, schedule: Schedule, step: int, every: int, layouts: Sequence[RowLayout], at_end: bool = False) -> Plan:
        """Plan a checkpoint after `step`, and one every `every` steps up to the schedule's end.

        Args:
            schedule: A complete schedule.
            step: The step of the next checkpoint.
            every: The interval in steps, counted from `step`.
            layouts: The tables' layouts, in order.
            at_end: If True, plan another checkpoint after the schedule's last step.
        """
        end = schedule.header.end_step
        steps = {step, *range(step, end, every), *([end - 1] if at_end else [])}
        return cls(schedule, sorted(steps), [layout.row_bytes for layout in layouts])

    def baseline_is_due(self, last: int) -> bool:
        """Return whether the next checkpoint should be a baseline, that is, have all rows.

        The call makes a pass over the moves of all steps from `last` on.

        Args:
            last: The step of the last baseline. If it lies before the schedule, only the changes
                within the schedule count.

        Raises:
            ScheduleError: The schedule cannot be read.
        """
        steps = [max(last, self.schedule.header.first_step - 1), *self.steps]
        return baseline_is_planned(*increment_sizes(self.schedule, steps, self.row_bytes))


def increment_sizes(schedule: Schedule, steps: Sequence[int], row_bytes: Sequence[int]) -> tuple[list[float], np.ndarray]:
    """Return the sizes in bytes of checkpoints after `steps`, as `baseline_is_planned` takes them.

    Args:
        steps: Ascending, all within the schedule.
        row_bytes: Bytes of a row of each table.

    Returns:
        The sizes with all rows, [n], and the sizes as increments of one another, float64 [n, n];
        entry [b, c] is the size of checkpoint c as an increment of checkpoint b.
    """
    count = len(steps)
    # Interval k lies between checkpoints k - 1 and k, interval 0 before the first checkpoint.
    # `last` has, per lane and table, 1 + the last interval in which each row changed, 0 for no
    # change so far.
    last: list[list[np.ndarray]] = []
    full: list[float] = []
    # new[k, p]: bytes of the rows that change in interval k and whose last change before was in
    # interval p - 1 (p = 0: never). Interval k adds such rows to the increments of the bases from
    # p - 1 to k - 1.
    new = np.zeros((count, count + 1))
    for number, changed in enumerate(changed_between(schedule, [schedule.header.first_step - 1, *steps])):
        full.append(0.0)
        for lane, tables in enumerate(changed):
            if not number:
                last.append([np.zeros(0, np.int64) for _ in tables])
            for table, rows in enumerate(tables):
                seen = np.zeros(len(rows), np.int64)
                seen[: len(last[lane][table])] = last[lane][table]
                new[number] += row_bytes[table] * np.bincount(seen[rows], minlength=count + 1)
                seen[rows] = number + 1
                last[lane][table] = seen
                full[-1] += row_bytes[table] * len(rows)
    increments, before = np.zeros((count, count)), np.cumsum(new, axis=1)
    for base in range(count):
        # Interval k adds to an increment the rows that had not changed since its base: those whose
        # last change before was in interval `base` (p = base + 1) or earlier.
        increments[base, base + 1 :] = np.cumsum(before[base + 1 :, base + 1])
    return full, increments
