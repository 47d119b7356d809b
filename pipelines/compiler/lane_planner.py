"""Plans one lane by the oracle, and writes its files.

This is the second half of both ways of compiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreload.pipelines.compiler import oracle
from foreload.pipelines.compiler.next_uses import LaneAccesses
from foreload.pipelines.errors import SlotsError
from foreload.pipelines.schedule.arrow_files import write_lists
from foreload.pipelines.schedule.format import MOVE_COLUMNS, FileEntry, Header, mask_dtype

# For each column of Moves, whether it has an entry for each row used, residency ended or arrival.
_KINDS = 3 * (oracle.ROWS_USED,) + (oracle.ENDS,) + 6 * (oracle.ARRIVALS,)

Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (offsets int32 [events + 1], values)


class MoveBuffer:
    """Collects one lane's moves in consecutive events, in arrays that are reused.

    Attributes:
        moves: The arrays.
        fill: int64 [3], the entries taken, by ROWS_USED, ENDS and ARRIVALS.
    """

    def __init__(self, mask: np.dtype) -> None:
        kinds = (np.int32, np.uint8, mask, np.int32, np.int32, np.int16, np.int64, np.int64, np.int32, np.int32)
        self.moves = oracle.Moves(*(np.empty(0, kind) for kind in kinds))
        self.fill = np.zeros(3, np.int64)
        self._counts: list[np.ndarray] = []  # int64 [events, 4] each: ROWS_USED, ENDS, ARRIVALS, INITIAL

    @property
    def events(self) -> int:
        """The number of events collected so far."""
        return sum(map(len, self._counts))

    def room(self, events: int, rows: int) -> np.ndarray:
        """Make room for more events.

        Args:
            events: The number of events.
            rows: The number of rows that all of them use together.

        Returns:
            int64 [events, 4], zeros, for the caller to fill with the events' counts. The columns
                are ROWS_USED, ENDS, ARRIVALS and INITIAL.
        """
        need = int(self.fill.max()) + rows
        if need > len(self.moves.slots):
            # The arrays grow to the size of a segment and then stay, so the process pays for each
            # of their pages only once.
            size = max(need, 2 * len(self.moves.slots))
            grown = [np.empty(size, array.dtype) for array in self.moves]
            for old, new in zip(self.moves, grown, strict=True):
                new[: len(old)] = old
            self.moves = oracle.Moves(*grown)
        counts = np.zeros((events, 4), np.int64)
        self._counts.append(counts)
        return counts

    def take(self) -> Columns:
        """Return the moves since the last call as list columns.

        The columns are views, valid until the next call of `room`.
        """
        counts = np.concatenate(self._counts)
        offsets = np.zeros((len(counts) + 1, 3), np.int32)
        np.cumsum(counts[:, :3], axis=0, out=offsets[1:])
        columns = {}
        for name, kind, values in zip(MOVE_COLUMNS, _KINDS, self.moves, strict=True):
            columns[name] = (np.ascontiguousarray(offsets[:, kind]), values[: offsets[-1, kind]])
        self._counts.clear()
        self.fill[:] = 0
        return columns


@dataclass(frozen=True, slots=True)
class LanePart:
    """One lane's part of a segment.

    Attributes:
        files: The manifest entries of the lane's files.
        ordinals: The numbers of ordinals given before the segment, by table. None if the lane has
            no entry state here.
        evaluation_slots: The slots that the segment's events need besides the lane's own.
        counts: As in a Segment.
    """

    files: dict[str, FileEntry]
    ordinals: list[int] | None
    evaluation_slots: int
    counts: dict[str, int]


class LanePlanner:
    """Plans one lane, segment by segment, and writes the lane's files of each segment.

    For each segment, call `begin`, then `plan` or `plan_evaluation` for all of its steps, then
    `end`.

    Attributes:
        first_step: The schedule's first training step.
        state: The oracle's lane.
        rows: LANE_ROW, the lane's rows by number.
        buffer: The moves of the segment so far.
    """

    def __init__(self, out: Path, header: Header, lane: int, ordinals: np.ndarray, rows: np.ndarray) -> None:
        """Start a lane with all slots free.

        Args:
            out: The schedule's folder.
            ordinals: int64 [tables], the numbers of ordinals given before the first step.
            rows: LANE_ROW, the lane's rows by number, as far as they are known.
        """
        self.number, self.slots, self.first_step = lane, header.slots[lane], header.first_step
        self.state = oracle.with_rows(oracle.empty_lane(self.slots, header.end_step - header.first_step, ordinals), rows["tag"])
        self.rows = rows
        self.buffer = MoveBuffer(mask_dtype(header.lanes))
        self._out = out
        self._segment = 0
        self._entry: dict[str, FileEntry] = {}
        self._ordinals: list[int] | None = None
        self._evaluation_slots = 0  # slots that the segment's evaluation steps need

    @property
    def occupied(self) -> int:
        """The number of slots that a row has ever taken; they are slots 0 .. occupied - 1."""
        return int(self.state.scalars[oracle.USED])

    def begin(self, entry: bool) -> None:
        """Begin a segment.

        Args:
            entry: Whether the segment has an entry state (schedule.Occupants). If so, the state of
                the lane is written now.
        """
        if entry:
            occupants = oracle.occupants(self.state, self.rows)
            state = {name: (np.array([0, len(values)], np.int32), values) for name, values in occupants.items()}
            self._entry = {"entry": self._write("entry", state)}
            self._ordinals = self.state.ordinals.tolist()

    def plan(self, first: int, accesses: oracle.Accesses, starts: np.ndarray, span: tuple[int, int]) -> np.ndarray:
        """Plan consecutive training steps; see `oracle.plan_steps`.

        Args:
            first: The first step, counted from the schedule's first.
            starts: int64 [steps + 1], where the accesses of each step begin.
            span: See `oracle.plan_steps`.

        Returns:
            int64 [steps, 4], the counts of each step.

        Raises:
            TooFewSlots: If a step needs more slots than the lane has.
        """
        counts = self.buffer.room(len(starts) - 1, int(starts[-1] - starts[0]))
        need = oracle.plan_steps(
            self.state, self.rows, first, self.first_step, accesses, starts, span, self.buffer.fill, self.buffer.moves, counts
        )
        if need:
            raise TooFewSlots(self.number, int(need))
        return counts

    def plan_evaluation(self, first: int, steps: int, accesses: LaneAccesses) -> None:
        """Plan consecutive evaluation steps; see `oracle.plan_evaluation`.

        Args:
            first: The first step, counted over all evaluation passes.
            steps: How many steps.
            accesses: The rows that the steps look up.
        """
        buffer = self.buffer
        for numbers in accesses.evaluated(first, steps):
            counts = buffer.room(1, len(numbers))
            oracle.plan_evaluation(
                self.state, self.rows, accesses.unknown, numbers, self.slots, buffer.fill, buffer.moves, counts[0]
            )
            self._evaluation_slots = max(self._evaluation_slots, int(counts[0, oracle.ARRIVALS]))

    def end(self) -> LanePart:
        """Write the moves of the segment, after all of its steps were planned."""
        columns = self.buffer.take()
        tags = columns["arrival_tag"][1]
        counts = {
            "rows_used": len(columns["slots"][1]),
            "arrivals": len(tags),
            "initial": int((tags == 0).sum()),
            "write_backs": len(columns["ends"][1]),
        }
        files = {"moves": self._write("moves", columns), **self._entry}
        part = LanePart(files, self._ordinals, self._evaluation_slots, counts)
        self._segment += 1
        self._entry, self._ordinals, self._evaluation_slots = {}, None, 0
        return part

    def _write(self, what: str, columns: Columns) -> FileEntry:
        return write_lists(self._out / f"{what}-{self._segment:06d}-{self.number:02d}.arrow", columns)


class TooFewSlots(Exception):
    """A step of a lane uses more rows than the lane has slots."""

    def __init__(self, lane: int, rows: int) -> None:
        self.lane, self.rows = lane, rows


def too_few_slots(header: Header, most: np.ndarray) -> SlotsError:
    """Return the error for a step that does not fit the slots.

    Args:
        most: int64 [V], the rows of each lane's largest step.
    """
    lane, rows = int(most.argmax()), int(most.max())
    return SlotsError(
        f"--slots: must hold every row of a step; got {header.slots[lane]}; the largest step of lane {lane} has {rows}: give --slots {rows} or more, "
        "or a smaller --batch-size"
    )
