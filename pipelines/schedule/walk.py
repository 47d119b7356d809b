"""Going through a lane's training steps, a segment at a time: which rows are used, arrive and leave, and which of them sit in the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from foreload.base.compiled import nb
from foreload.pipelines.schedule.arrow_files import MappedLists
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
