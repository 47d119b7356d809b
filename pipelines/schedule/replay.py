"""Who sits in a lane's slots after a training step: the nearest entry state, and the moves since."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import Event, Occupants
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import walk


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
    # The last segment with an entry state that is not behind the step, and the last training step before it.
    trained = header.first_step - 1
    for segment in schedule.segments():
        if segment.ordinals is not None:
            first, before = segment, trained
        if segment.kind == "train":
            trained = segment.last
            if trained >= step:
                break
    assert first.ordinals is not None
    lanes = tuple(
        _lane_state(schedule, lane, step, first.index, before, np.array(first.ordinals[lane], np.int64))
        for lane in range(header.lanes)
    )
    events = schedule.events(first.index)
    if step >= header.first_step:
        for event in events:
            if event.kind == "train" and event.step == step:
                break
    following = next(events, None)
    return Position(lanes, first.index if following is None else following.segment, following)


def _lane_state(schedule: Schedule, lane: int, step: int, segment: int, before: int, ordinals: np.ndarray) -> LaneState:
    """A lane after a step. segment: one with an entry state; before: the training step before it; ordinals: given before it, int64 [tables]."""
    entry, size = schedule.entry(segment, lane), max(schedule.slots)
    assert entry is not None
    # Of a free slot these say nothing.
    occupants, occupied = Occupants.zeros(size), np.zeros(size, bool)
    occupied[: len(entry)] = True
    for column, values in zip((*occupants.columns(), occupants.stored_tag), (*entry.columns(), entry.stored_tag), strict=True):
        column[: len(entry)] = values
    for moves in walk(schedule, lane, before, [step]):
        places = np.full(size, -1)  # of each slot its last arrival
        moves.occupants("ends", places, np.arange(len(moves.values("arrival_slot"))))
        slots = np.flatnonzero(places >= 0)
        places = places[slots]
        occupied[slots] = True  # where a residency ends, another one begins
        # An arrival's tag is the stored version's; its own it gets, as all rows of the step, by the step: 1 + its number.
        columns = (occupants.table, occupants.ordinal, occupants.id, occupants.stored_tag)
        for column, name in zip(columns, ("table", "ordinal", "id", "tag"), strict=True):
            column[slots] = moves.values(f"arrival_{name}")[places]
        np.maximum.at(occupants.tag, moves.values("slots"), moves.steps("slots") + 1)
        ordinals += moves.given(ordinals.size)
    slots = np.flatnonzero(occupied).astype(np.int32)
    return LaneState(slots, Occupants(*occupants.columns(slots), occupants.stored_tag[slots]), ordinals)
