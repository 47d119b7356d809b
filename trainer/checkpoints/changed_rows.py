"""Which rows training changes between two steps, known from the schedule alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import LaneMoves, LaneState, state_after, walk
from foreload.trainer.checkpoints.files import baseline_is_planned


class _LaneChanges:
    """Which rows of a lane were changed, and which sit in its slots."""

    def __init__(self, begun: LaneState, slots: int) -> None:
        self._ordinals = begun.ordinals.copy()
        # Rows as ordinal * tables + table: of each slot, and those that were changed.
        self._held = np.zeros(slots, np.int64)
        self._held[begun.slots] = self._rows(begun.occupants.table, begun.occupants.ordinal)
        self._changed = [self._held[:0]]

    def _rows(self, table: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
        return ordinal * len(self._ordinals) + table

    def add(self, moves: LaneMoves) -> None:
        """Rows that arrive are changed in the same step; those that sat in slots before are, where they are used before others arrive there."""
        arriving = self._rows(moves.values("arrival_table"), moves.values("arrival_ordinal"))
        sat = np.zeros(len(self._held), bool)
        used = moves.occupants("slots", np.arange(len(sat)), np.full(len(arriving), -1))
        sat[used[used >= 0]] = True
        self._changed += [self._held[sat], arriving]
        moves.occupants("ends", self._held, arriving)
        self._ordinals += moves.given(self._ordinals.size)

    def taken(self) -> list[np.ndarray]:
        """Per table, whether a row was changed since the last call: bool, over its ordinals."""
        # Tables one after the other, so that all rows are marked at once.
        ends = np.cumsum(self._ordinals)
        changed = np.zeros(int(ends[-1]), bool)
        ordinal, table = np.divmod(np.concatenate(self._changed), len(ends))
        changed[ends[table] - self._ordinals[table] + ordinal] = True
        del self._changed[1:]
        return np.split(changed, ends[:-1])


def changed_rows(schedule: Schedule, since: int, until: int) -> list[list[np.ndarray]]:
    """Per lane and table, whether each row is changed in the steps after `since` up to and including `until`: bool, over the ordinals given by then.

    A row is, where its tag after `until` is greater than since + 1. Of steps before the schedule's first, which are another one's, nothing is said.
    A schedule that grows is waited for until it has the steps. Costs a pass over their moves; a byte a row, 8 an arrival, and 8 for each row that a
    segment uses are held. Raises ScheduleError.
    """
    return next(changed_between(schedule, [since, until]))


def changed_between(schedule: Schedule, steps: Sequence[int]) -> Iterator[list[list[np.ndarray]]]:
    """What `changed_rows` gives, for each step of these but the first and the one before it. steps: ascending."""
    since = max(steps[0], schedule.header.first_step - 1)
    position = state_after(schedule, since)
    lanes = [_LaneChanges(lane, max(schedule.slots)) for lane in position.lanes]
    walks = [walk(schedule, lane, since, steps[1:]) for lane in range(len(lanes))]
    for until in steps[1:]:
        while since < until:
            parts = [next(of_lane) for of_lane in walks]
            since = parts[0].last
            for changes, moves in zip(lanes, parts, strict=True):
                changes.add(moves)
        yield [changes.taken() for changes in lanes]


@dataclass(frozen=True, slots=True)
class Plan:
    """For policy planned: the checkpoints of a complete schedule that are to come. steps: after which, ascending, the next one's first; row_bytes: of
    a row of each table.
    """

    schedule: Schedule
    steps: Sequence[int]
    row_bytes: Sequence[int]

    @classmethod
    def of(cls, schedule: Schedule, step: int, every: int, layouts: Sequence[RowLayout], at_end: bool = False) -> Plan:
        """A checkpoint after `step`, and one every so many steps after that up to the end of the schedule; at_end: and one after its last step."""
        end = schedule.header.end_step
        steps = {step, *range(step, end, every), *([end - 1] if at_end else [])}
        return cls(schedule, sorted(steps), [layout.row_bytes for layout in layouts])

    def baseline_is_due(self, last: int) -> bool:
        """Whether the next one is to have all rows, `last` being the step of the last one that has. Raises ScheduleError.

        Of a step before the schedule, only what changes in the schedule is counted. Costs a pass over the moves of all steps from `last` on.
        """
        steps = [max(last, self.schedule.header.first_step - 1), *self.steps]
        return baseline_is_planned(*increment_sizes(self.schedule, steps, self.row_bytes))


def increment_sizes(schedule: Schedule, steps: Sequence[int], row_bytes: Sequence[int]) -> tuple[list[float], np.ndarray]:
    """How large checkpoints after these steps are, ascending and all of the schedule, as `baseline_is_planned` has it: with all rows [n], and as
    increments of one another [n, n]. row_bytes: of a row of each table.
    """
    count = len(steps)
    # Of each row the last interval in which it was changed; interval k lies between checkpoints k - 1 and k, 0 before the first of them.
    last: list[list[np.ndarray]] = []
    full: list[float] = []
    # Rows changed in interval k whose last change before is in interval p, or none (place 0): they are new in an increment of an earlier base.
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
        # Not changed between the base and interval k: last changed in interval `base` (place base + 1) or before.
        increments[base, base + 1 :] = np.cumsum(before[base + 1 :, base + 1])
    return full, increments
