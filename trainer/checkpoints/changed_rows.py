"""Which rows training changes between two steps, known from the schedule alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.pipelines.schedule.format import LaneEvent
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.replay import LaneState, state_after
from foreload.trainer.checkpoints.policies import baseline_is_planned


class _LaneChanges:
    """Who sits in the slots of a lane, who of them was changed, and who was and sits there no more."""

    def __init__(self, begun: LaneState, slots: int) -> None:
        self._table, self._ordinal = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._table[begun.slots], self._ordinal[begun.slots] = begun.occupants.table, begun.occupants.ordinal
        self._changed = np.zeros(slots, bool)  # the row that sits, or sat, in a slot
        self._gone: list[tuple[np.ndarray, np.ndarray]] = []
        self._ordinals = begun.ordinals.copy()

    def step(self, moves: LaneEvent) -> None:
        """Rows arrive, where they take the place of others, and those of the step are changed."""
        arrivals = moves.arrivals
        self._leave(arrivals.slot)
        self._table[arrivals.slot], self._ordinal[arrivals.slot] = arrivals.table, arrivals.ordinal
        self._changed[moves.slots] = True
        self._ordinals += np.bincount(arrivals.table[arrivals.tag == 0], minlength=self._ordinals.size)

    def _leave(self, slots: np.ndarray) -> None:
        left = slots[self._changed[slots]]
        self._gone.append((self._table[left], self._ordinal[left]))
        self._changed[slots] = False

    def taken(self) -> list[np.ndarray]:
        """Per table, whether a row was changed since the last call: bool, over its ordinals."""
        self._leave(np.arange(len(self._changed)))
        # Tables one after the other, so that all rows are marked at once.
        ends = np.cumsum(self._ordinals)
        changed = np.zeros(int(ends[-1]), bool)
        table, ordinal = (np.concatenate(column) for column in zip(*self._gone, strict=True))
        changed[ends[table] - self._ordinals[table] + ordinal] = True
        self._gone.clear()
        return np.split(changed, ends[:-1])


def changed_rows(schedule: Schedule, since: int, until: int) -> list[list[np.ndarray]]:
    """Per lane and table, whether each row is changed in the steps after `since` up to and including `until`: bool, over the ordinals given by then.

    A row is, where its tag after `until` is greater than since + 1. Of steps before the schedule's first, which are another one's, nothing is said.
    A schedule that grows is waited for until it has the steps. Costs a pass over their moves; a byte a row, and 16 an arrival, are held. Raises
    ScheduleError.
    """
    return next(changed_between(schedule, [since, until]))


def changed_between(schedule: Schedule, steps: Sequence[int]) -> Iterator[list[list[np.ndarray]]]:
    """What `changed_rows` gives, for each step of these but the first and the one before it. steps: ascending."""
    since = max(steps[0], schedule.header.first_step - 1)
    position = state_after(schedule, since)
    lanes = [_LaneChanges(lane, max(schedule.slots)) for lane in position.lanes]
    begun = (event for event in schedule.events(position.segment) if event.kind == "train" and event.step > since)
    for until in steps[1:]:
        while since < until:  # before a further one is waited for
            event = next(begun)
            since = event.step
            for lane, changes in enumerate(lanes):
                changes.step(schedule.lane(event, lane))
        yield [changes.taken() for changes in lanes]


@dataclass(frozen=True, slots=True)
class Plan:
    """For policy planned: the checkpoints of a complete schedule that are to come. steps: after which, ascending, the next one's first; row_bytes: of
    a row of each table.
    """

    schedule: Schedule
    steps: Sequence[int]
    row_bytes: Sequence[int]

    def baseline_is_due(self, last: int) -> bool:
        """Whether the next one is to have all rows, `last` being the step of the last one that has. Raises ScheduleError.

        Of a step before the schedule, only what changes in the schedule is counted. Costs a pass over the moves of all steps from `last` on.
        """
        steps = [max(last, self.schedule.header.first_step - 1), *self.steps]
        return baseline_is_planned(*increment_sizes(self.schedule, steps, self.row_bytes))


def increment_sizes(schedule: Schedule, steps: Sequence[int], row_bytes: Sequence[int]) -> tuple[list[float], np.ndarray]:
    """How large checkpoints after these steps are, ascending and all of the schedule, as `policies.bases` has it: with all rows [n], and as
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
