"""Who sits in a lane's slots after a training step: the nearest entry state, and the moves since."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import Event, Occupants
from foreload.pipelines.schedule.reader import Schedule


@dataclass(frozen=True, slots=True)
class LaneState:
    """A lane after a step: slots int32 [n] ascending, who sits in them, and the ordinals given so far int64 [tables]."""

    slots: np.ndarray
    occupants: Occupants
    ordinals: np.ndarray


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the program: where each lane stands, the segment to go on from, and the next event (None at the end)."""

    lanes: tuple[LaneState, ...]
    segment: int
    next_event: Event | None


def state_after(schedule: Schedule, step: int) -> Position:
    """Replay a schedule up to and including training step `step`; header.first_step - 1 is its beginning. Raises ScheduleError.

    The tags and stored tags are those of an undisturbed run; after a clean stop the stored tags are the tags.
    """
    header = schedule.header
    if not header.first_step - 1 <= step < header.end_step:
        raise ScheduleError(
            f"step: must be one of {header.first_step} .. {header.end_step - 1}, is {step}: the run and the schedule do not fit"
        )
    begin = 0  # the last segment with an entry state that is not behind the step
    for segment in schedule.segments():
        if segment.kind == "train" and segment.first > step + 1:
            break
        if segment.ordinals is not None:
            begin = segment.index
        if segment.kind == "train" and segment.first + len(segment.samples) > step:
            break
    entries = [schedule.entry(begin, lane) for lane in range(header.lanes)]
    first = schedule.segment(begin)
    assert first is not None
    assert first.ordinals is not None
    size = max(schedule.slots)
    # Per lane: who sits in each slot, as arrays that the moves are applied to (of a free slot they say nothing); which are occupied; ordinals given.
    tracked = []
    for lane, entry in enumerate(entries):
        assert entry is not None
        count = len(entry)
        sitting, occupied = Occupants.zeros(size), np.zeros(size, bool)
        sitting.table[:count], sitting.ordinal[:count], sitting.id[:count], sitting.tag[:count] = entry.columns()
        sitting.stored_tag[:count] = entry.stored_tag
        occupied[:count] = True
        tracked.append((sitting, occupied, np.array(first.ordinals[lane], np.int64)))
    following = None
    trained = header.first_step - 1  # behind a segment that begins later, `step` is yet to come
    for event in schedule.events(begin):
        if event.kind == "train":
            if event.step > step:
                following = event
                break
            trained = event.step
            for lane, (sitting, occupied, ordinals) in enumerate(tracked):
                moves = schedule.lane(event, lane)
                arrivals = moves.arrivals
                occupied[moves.ends] = False
                occupied[arrivals.slot] = True
                slot = arrivals.slot
                # An arrival's tag is the stored version's; its own it gets, as all rows of the step, by the step: 1 + its number.
                sitting.table[slot], sitting.ordinal[slot], sitting.id[slot], sitting.stored_tag[slot] = arrivals.columns()
                sitting.tag[moves.slots] = event.step + 1
                ordinals += np.bincount(arrivals.table[arrivals.tag == 0], minlength=ordinals.size)
        elif trained == step:
            following = event
            break
    lanes = []
    for sitting, occupied, ordinals in tracked:
        slots = np.flatnonzero(occupied).astype(np.int32)
        lanes.append(LaneState(slots, Occupants(*sitting.columns(slots), sitting.stored_tag[slots]), ordinals))
    return Position(tuple(lanes), begin if following is None else following.segment, following)
