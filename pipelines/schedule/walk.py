"""Goes through a lane's training steps, a segment at a time.

The results are the rows that are used, that arrive, that leave, and that sit in the slots.
"""

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
"""A list column: offsets [steps + 1] and values. Step k has values[offsets[k] : offsets[k + 1]]."""


@dataclass(frozen=True, slots=True)
class LaneMoves:
    """A lane's moves in consecutive training steps of one segment.

    The arrays are read-only views of the schedule.

    Attributes:
        lists: The moves of the segment (docs/schedule.md, "Moves").
        row: The place of the first step within the segment.
    """

    first: int
    last: int
    lists: MappedLists
    row: int = 0

    def part(self, first: int, last: int) -> LaneMoves:
        """Return the moves of steps `first` to `last`, which lie within these steps."""
        return replace(self, first=first, last=last, row=self.row + first - self.first)

    def column(self, name: str) -> Column:
        """Return a list column: offsets int32 [steps + 1], which begin at 0, and values."""
        offsets, values = self.lists.whole(name)
        offsets = offsets[self.row : self.row + self.last - self.first + 2]
        return offsets - offsets[0], values[offsets[0] : offsets[-1]]

    def values(self, name: str) -> np.ndarray:
        """Return the values of a list column, of all steps together."""
        return self.column(name)[1]

    def steps(self, name: str) -> np.ndarray:
        """Return the step of each value of a list column: int32 [values]."""
        return np.repeat(np.arange(self.first, self.last + 1, dtype=np.int32), np.diff(self.column(name)[0]))

    def counts(self) -> np.ndarray:
        """Count the rows of each step: int64 [4, steps].

        The lines are the rows used, arriving, fetched from the store, and written back.
        """
        (used, _), (arrived, tags), (ended, _) = map(self.column, ("slots", "arrival_tag", "ends"))
        fetched = np.concatenate([[0], np.cumsum(tags != 0)])[arrived]
        return np.stack([np.diff(offsets) for offsets in (used, arrived, fetched, ended)]).astype(np.int64)

    def given(self, tables: int) -> np.ndarray:
        """Count the rows of each table that get their ordinals in these steps: int64 [tables]."""
        return np.bincount(self.values("arrival_table")[self.values("arrival_tag") == 0], minlength=tables)

    def occupants(self, name: Literal["slots", "ends"], held: np.ndarray, arriving: np.ndarray) -> np.ndarray:
        """Return a value of the row in each slot that is used, or whose residency ends.

        Args:
            name: "slots" or "ends".
            held: [slots], the value of the row in each slot before these steps. Updated to the
                state after these steps.
            arriving: [arrivals], the value of each row that arrives, of the same dtype.

        Returns:
            The values, one for each entry of the column `name`.
        """
        wanted = self.column(name)
        out = np.empty(len(wanted[1]), held.dtype)
        # Within a step, residencies end before other rows arrive, and rows are used after they have
        # arrived.
        _occupants(held, self.column("arrival_slot"), arriving, wanted, name == "ends", out)
        return out


def walk(schedule: Schedule, lane: int, after: int = -1, until: Sequence[int] | None = None) -> Iterator[LaneMoves]:
    """Go through a lane's training steps.

    If the schedule is still growing, the walk waits until it has the steps.

    Args:
        after: The step before the first one wanted. By default, the walk starts at the first step.
        until: Steps at which a part ends, in addition to the last step of each segment. The
            greatest of them ends the walk. By default, the walk goes to the schedule's end.

    Raises:
        ScheduleError: If the schedule cannot be read.
    """
    header = schedule.header
    after = max(after, header.first_step - 1)
    bounds = deque(sorted({bound for bound in until or [header.end_step - 1] if bound > after}))
    segments = schedule.segments()
    # Ask for no segment beyond the last bound: a growing schedule might not have it for a long
    # time.
    while bounds:
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
    """See `LaneMoves.occupants`.

    Args:
        held: [slots], updated.
        arrivals: The slot of each arrival.
        arriving: [arrivals].
        wanted: The slots to look at.
        before: Whether to look at the slots before the rows of their step arrive.
        out: Filled, one value for each wanted slot.
    """
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
    """Return the slots of each lane of a complete schedule at its beginning.

    The arrays are ROW [slots + evaluation slots], filled with zeros.
    """
    further = schedule.manifest["evaluation_slots"]
    return [np.zeros(slots + more, ROW) for slots, more in zip(schedule.slots, further, strict=True)]


def rows_used(
    schedule: Schedule, event: Event, occupants: list[np.ndarray]
) -> tuple[tuple[LaneEvent, ...], tuple[np.ndarray, ...]]:
    """Return the lanes' parts of an event, and for each lane the rows that its slots hold.

    Args:
        occupants: The row in each slot of each lane before the event. Updated to the state at the
            event.

    Returns:
        The part of each lane, and for each lane ROW [U], the row in each slot of its list.
    """
    lanes = tuple(schedule.lane(event, lane) for lane in range(schedule.header.lanes))
    for moves, rows in zip(lanes, occupants, strict=True):
        rows["table"][moves.arrivals.slot] = moves.arrivals.table
        rows["id"][moves.arrivals.slot] = moves.arrivals.id
    return lanes, tuple(rows[moves.slots] for moves, rows in zip(lanes, occupants, strict=True))


def local_rows(lanes: tuple[LaneEvent, ...], rows: tuple[np.ndarray, ...], lane: int) -> np.ndarray:
    """Return a lane's local rows in an event, which its `index` points into (docs/schedule.md).

    Args:
        lanes: The lanes' parts, as `rows_used` returns them.
        rows: The lanes' rows, as `rows_used` returns them, or any other value for each row.
    """
    bit = np.uint64(lane)
    return np.concatenate([owned[(owner.users >> bit) & np.uint64(1) == 1] for owned, owner in zip(rows, lanes, strict=True)])


@dataclass(frozen=True, slots=True)
class LaneState:
    """A lane after a step.

    Attributes:
        slots: int32 [n], the slots that hold a row, ascending.
        occupants: The rows in them.
        ordinals: int64 [tables], the numbers of ordinals given so far.
    """

    slots: np.ndarray
    occupants: Occupants
    ordinals: np.ndarray


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the program.

    Attributes:
        lanes: The state of each lane.
        segment: The segment to go on from.
        next_event: The next event, None at the end.
    """

    lanes: tuple[LaneState, ...]
    segment: int
    next_event: Event | None


def state_after(schedule: Schedule, step: int) -> Position:
    """Replay a schedule up to and including a training step.

    The tags and stored tags are those of an undisturbed run. After a clean stop, the stored tags
    equal the tags.

    Args:
        step: The step. header.first_step - 1 is the schedule's beginning.

    Raises:
        ScheduleError: If the schedule has no such step, or cannot be read.
    """
    header = schedule.header
    if not header.first_step - 1 <= step < header.end_step:
        raise ScheduleError(
            f"step: must be one of {header.first_step} .. {header.end_step - 1}; got {step}; the run and the schedule do not match"
        )
    # Find the last segment with an entry state from which the step can be reached, and the last
    # training step before that segment.
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
    """Return a lane's state after a step.

    Args:
        segment: A segment with an entry state, at or before the step.
        before: The training step before that segment.
        ordinals: int64 [tables], the numbers of ordinals given before that segment.
    """
    entry, size = schedule.entry(segment, lane), max(schedule.slots)
    assert entry is not None
    # The entries of a free slot have no meaning.
    occupants, occupied = Occupants.zeros(size), np.zeros(size, bool)
    occupied[: len(entry)] = True
    for column, values in zip((*occupants.columns(), occupants.stored_tag), (*entry.columns(), entry.stored_tag), strict=True):
        column[: len(entry)] = values
    for moves in walk(schedule, lane, before, [step]):
        # For each slot, the last row that arrives in it during these steps.
        places = np.full(size, -1)
        moves.occupants("ends", places, np.arange(len(moves.values("arrival_slot"))))
        slots = np.flatnonzero(places >= 0)
        places = places[slots]
        # Slots never become free again: where a residency ends, another row arrives in the same
        # step.
        occupied[slots] = True
        # `arrival_tag` is the tag of the stored version. The row's own tag is 1 + the step that
        # used it last, as for all rows that a step uses.
        columns = (occupants.table, occupants.ordinal, occupants.id, occupants.stored_tag)
        for column, name in zip(columns, ("table", "ordinal", "id", "tag"), strict=True):
            column[slots] = moves.values(f"arrival_{name}")[places]
        np.maximum.at(occupants.tag, moves.values("slots"), moves.steps("slots") + 1)
        ordinals += moves.given(ordinals.size)
    slots = np.flatnonzero(occupied).astype(np.int32)
    return LaneState(slots, Occupants(*occupants.columns(slots), occupants.stored_tag[slots]), ordinals)
