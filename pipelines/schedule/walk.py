"""Go through a lane's training steps, a segment at a time: the rows that are used, arrive, leave, and sit in the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from foreload.base.compiled import nb
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.arrow_files import MappedLists
from foreload.pipelines.schedule.format import Event, LaneEvent, Occupants
from foreload.pipelines.schedule.reader import Schedule

Column = tuple[np.ndarray, np.ndarray]
"""A list column: offsets [steps + 1], and the values between them."""


@dataclass(frozen=True, slots=True)
class LaneMoves:
    """What a lane does in consecutive training steps, `first` to `last`, of one segment: views of the schedule, not to be written to.

    lists: the moves of the segment (docs/schedule.md, Moves); row: where the first step stands in it.
    """

    first: int
    last: int
    lists: MappedLists
    row: int = 0

    def part(self, first: int, last: int) -> LaneMoves:
        """Of some of the steps."""
        return replace(self, first=first, last=last, row=self.row + first - self.first)

    def column(self, name: str) -> Column:
        """A list column: offsets int32 [steps + 1], which begin at 0, and values."""
        offsets, values = self.lists.whole(name)
        offsets = offsets[self.row : self.row + self.last - self.first + 2]
        return offsets - offsets[0], values[offsets[0] : offsets[-1]]

    def values(self, name: str) -> np.ndarray:
        """The values of a list column, of all steps together."""
        return self.column(name)[1]

    def steps(self, name: str) -> np.ndarray:
        """The step of each value of a list column: int32."""
        return np.repeat(np.arange(self.first, self.last + 1, dtype=np.int32), np.diff(self.column(name)[0]))

    def counts(self) -> np.ndarray:
        """Of each step how many rows are used, arrive, are fetched from the store, and are written back: int64 [4, steps]."""
        (used, _), (arrived, tags), (ended, _) = map(self.column, ("slots", "arrival_tag", "ends"))
        fetched = np.concatenate([[0], np.cumsum(tags != 0)])[arrived]
        return np.stack([np.diff(offsets) for offsets in (used, arrived, fetched, ended)]).astype(np.int64)

    def given(self, tables: int) -> np.ndarray:
        """How many rows of each table are given their ordinals: int64 [tables]."""
        return np.bincount(self.values("arrival_table")[self.values("arrival_tag") == 0], minlength=tables)

    def occupants(self, name: Literal["slots", "ends"], held: np.ndarray, arriving: np.ndarray) -> np.ndarray:
        """Return, for each slot that is used, or whose residency ends, what `arriving` has of the row that sits there.

        Args:
            name: "slots" or "ends".
            held: [slots], of the row in each slot before these steps; made what it is after them.
            arriving: [arrivals], of each row that arrives, of the same type.
        """
        wanted = self.column(name)
        out = np.empty(len(wanted[1]), held.dtype)
        # A residency ends before other rows arrive in the same step; a row is used after it has arrived.
        _occupants(held, self.column("arrival_slot"), arriving, wanted, name == "ends", out)
        return out


def walk(schedule: Schedule, lane: int, after: int = -1, until: Sequence[int] | None = None) -> Iterator[LaneMoves]:
    """Go through a lane's training steps.

    A schedule that grows is waited for until it has the steps. Raises ScheduleError.

    Args:
        schedule: The schedule.
        lane: Which lane.
        after: The step that comes before the first one wanted; by default all are.
        until: Steps that are each the last of what is given together, as the last one of a segment is; the greatest ends the walk. By default it goes
            to the schedule's end.
    """
    header = schedule.header
    after = max(after, header.first_step - 1)
    bounds = deque(sorted({bound for bound in until or [header.end_step - 1] if bound > after}))
    segments = schedule.segments()
    while bounds:  # no further segment is waited for than they need
        segment = next(segments)
        if segment.kind == "evaluate" or segment.last <= after:
            continue
        moves = LaneMoves(segment.first, segment.last, schedule.moves(segment.index, lane))
        while bounds and after < segment.last:
            part = moves.part(after + 1, min(bounds[0], segment.last))
            yield part
            after = part.last
            if after == bounds[0]:
                bounds.popleft()


@nb.njit(nogil=True, cache=True)
def _occupants(held: np.ndarray, arrivals: Column, arriving: np.ndarray, wanted: Column, before: bool, out: np.ndarray) -> None:
    """See LaneMoves.occupants. before: whether slots are looked at before the rows of their step arrive."""
    for step in range(len(arrivals[0]) - 1):
        begin, end = wanted[0][step], wanted[0][step + 1]
        if before:
            for k in range(begin, end):
                out[k] = held[wanted[1][k]]
        for k in range(arrivals[0][step], arrivals[0][step + 1]):
            held[arrivals[1][k]] = arriving[k]
        if not before:
            for k in range(begin, end):
                out[k] = held[wanted[1][k]]


ROW = np.dtype([("table", np.int16), ("id", np.int64)])


def empty_slots(schedule: Schedule) -> list[np.ndarray]:
    """Of each lane of a complete schedule its slots, ROW [slots and evaluation slots], as it begins: nobody's."""
    further = schedule.manifest["evaluation_slots"]
    return [np.zeros(slots + more, ROW) for slots, more in zip(schedule.slots, further, strict=True)]


def rows_used(
    schedule: Schedule, event: Event, occupants: list[np.ndarray]
) -> tuple[tuple[LaneEvent, ...], tuple[np.ndarray, ...]]:
    """The lanes' parts of an event, and per lane the row in each slot of its list, ROW [U].

    occupants: as it is before the event; made what it is then.
    """
    lanes = tuple(schedule.lane(event, lane) for lane in range(schedule.header.lanes))
    for moves, rows in zip(lanes, occupants, strict=True):
        rows["table"][moves.arrivals.slot] = moves.arrivals.table
        rows["id"][moves.arrivals.slot] = moves.arrivals.id
    return lanes, tuple(rows[moves.slots] for moves, rows in zip(lanes, occupants, strict=True))


def local_rows(lanes: tuple[LaneEvent, ...], rows: tuple[np.ndarray, ...], lane: int) -> np.ndarray:
    """A lane's local rows in an event (docs/schedule.md): what its `index` points into. lanes, rows: as `rows_used` gives them, or anything else of
    each row in place of ROW.
    """
    bit = np.uint64(lane)
    return np.concatenate([owned[(owner.users >> bit) & np.uint64(1) == 1] for owned, owner in zip(rows, lanes, strict=True)])


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
