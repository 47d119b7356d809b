"""Which rows training changes between two steps, known from the schedule alone."""

from __future__ import annotations

import numpy as np

from foreload.pipelines.schedule.format import LaneEvent
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.replay import LaneState, state_after


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

    def end(self) -> list[np.ndarray]:
        """Per table, whether a row was changed: bool, over its ordinals."""
        self._leave(np.arange(len(self._changed)))
        # Tables one after the other, so that all rows are marked at once.
        ends = np.cumsum(self._ordinals)
        changed = np.zeros(int(ends[-1]), bool)
        table, ordinal = (np.concatenate(column) for column in zip(*self._gone, strict=True))
        changed[ends[table] - self._ordinals[table] + ordinal] = True
        return np.split(changed, ends[:-1])


def changed_rows(schedule: Schedule, since: int, until: int) -> list[list[np.ndarray]]:
    """Per lane and table, whether each row is changed in the steps after `since` up to and including `until`: bool, over the ordinals given by then.

    A row is, where its tag after `until` is greater than since + 1. Of steps before the schedule's first, which are another one's, nothing is said.
    A schedule that grows is waited for until it has the steps. Costs a pass over their moves; a byte a row, and 16 an arrival, are held. Raises
    ScheduleError.
    """
    begin = max(since, schedule.header.first_step - 1)
    position = state_after(schedule, min(begin, until))
    lanes = [_LaneChanges(lane, max(schedule.slots)) for lane in position.lanes]
    if until > begin:
        for event in schedule.events(position.segment):
            if event.kind != "train" or event.step <= begin:
                continue
            for lane, changes in enumerate(lanes):
                changes.step(schedule.lane(event, lane))
            if event.step == until:  # before the next one is waited for
                break
    return [changes.end() for changes in lanes]
