"""One lane's oracle: its slots, and the moves of the segment being planned."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from foreload.pipelines.compiler import oracle
from foreload.pipelines.errors import SlotsError
from foreload.pipelines.schedule.format import MOVE_COLUMNS, Header, mask_dtype

_KINDS = 3 * (oracle.ROWS_USED,) + (oracle.ENDS,) + 6 * (oracle.ARRIVALS,)  # what each of the columns of Moves has an entry for

Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (offsets int32 [events + 1], values)


class MoveBuffer:
    """The moves of one lane in consecutive events, in arrays that are used again."""

    def __init__(self, mask: np.dtype) -> None:
        kinds = (np.int32, np.uint8, mask, np.int32, np.int32, np.int16, np.int64, np.int64, np.int32, np.int32)
        self.moves = oracle.Moves(*(np.empty(0, kind) for kind in kinds))
        self.fill = np.zeros(3, np.int64)  # entries taken: ROWS_USED, ENDS, ARRIVALS
        self._counts: list[np.ndarray] = []  # int64 [events, 4] each: ROWS_USED, ENDS, ARRIVALS, INITIAL

    @property
    def events(self) -> int:
        """Events gathered so far."""
        return sum(map(len, self._counts))

    def room(self, events: int, rows: int) -> np.ndarray:
        """Make room for as many events that use so many rows in all; returns int64 [events, 4] to be filled with their counts.

        Columns of the counts: ROWS_USED, ENDS, ARRIVALS, INITIAL.
        """
        need = int(self.fill.max()) + rows
        if need > len(self.moves.slots):
            # Once grown to a segment, it stays: a page of it is paid for once.
            size = max(need, 2 * len(self.moves.slots))
            grown = [np.empty(size, array.dtype) for array in self.moves]
            for old, new in zip(self.moves, grown, strict=True):
                new[: len(old)] = old
            self.moves = oracle.Moves(*grown)
        counts = np.zeros((events, 4), np.int64)
        self._counts.append(counts)
        return counts

    def take(self) -> Columns:
        """The moves since the last call as list columns; they are views, valid until the next `room`."""
        counts = np.concatenate(self._counts)
        offsets = np.zeros((len(counts) + 1, 3), np.int32)
        np.cumsum(counts[:, :3], axis=0, out=offsets[1:])
        columns = {}
        for name, kind, values in zip(MOVE_COLUMNS, _KINDS, self.moves, strict=True):
            columns[name] = (np.ascontiguousarray(offsets[:, kind]), values[: offsets[-1, kind]])
        self._counts.clear()
        self.fill[:] = 0
        return columns


class LaneOracle:
    """One lane's part of the oracle, and the moves of the segment being planned.

    ordinals int64 [tables]: given before the first step; rows LANE_ROW: the lane's rows by number, as far as they are known.
    """

    def __init__(self, header: Header, lane: int, ordinals: np.ndarray, rows: np.ndarray) -> None:
        self.number, self.slots, self.first_step = lane, header.slots[lane], header.first_step
        mask = mask_dtype(header.lanes)
        self.state = oracle.with_rows(oracle.empty_lane(self.slots, header.end_step - header.first_step, ordinals), rows["tag"])
        self.rows = rows
        self.buffer, self._evaluation = MoveBuffer(mask), MoveBuffer(mask)
        self._evaluation_slots = 0  # that the evaluation steps since the last `take_evaluation` need

    @property
    def occupied(self) -> int:
        """Slots that a row has taken; they are 0 .. occupied - 1."""
        return int(self.state.scalars[oracle.USED])

    def occupants(self) -> dict[str, np.ndarray]:
        """The partition's entry state (schedule.Occupants)."""
        return oracle.occupants(self.state, self.rows)

    def plan(self, first: int, accesses: oracle.Accesses, starts: np.ndarray, span: tuple[int, int]) -> np.ndarray:
        """Plan steps from `first` on, counted from the schedule's first (oracle.plan_steps): their counts int64 [steps, 4]. Raises TooFewSlots."""
        counts = self.buffer.room(len(starts) - 1, int(starts[-1] - starts[0]))
        need = oracle.plan_steps(
            self.state, self.rows, first, self.first_step, accesses, starts, span, self.buffer.fill, self.buffer.moves, counts
        )
        if need:
            raise TooFewSlots(self.number, int(need))
        return counts

    def plan_evaluation(self, steps: Iterable[np.ndarray], unknown: np.ndarray) -> None:
        """Plan evaluation steps; steps: the numbers of the rows that each looks up, unknown: those that were never trained
        (oracle.plan_evaluation).
        """
        buffer = self._evaluation
        for numbers in steps:
            counts = buffer.room(1, len(numbers))
            oracle.plan_evaluation(self.state, self.rows, unknown, numbers, self.slots, buffer.fill, buffer.moves, counts[0])
            self._evaluation_slots = max(self._evaluation_slots, int(counts[0, oracle.ARRIVALS]))

    def take_evaluation(self) -> tuple[Columns, int]:
        """The moves of the evaluation steps since the last call, and the slots that they need besides the lane's own."""
        slots, self._evaluation_slots = self._evaluation_slots, 0
        return self._evaluation.take(), slots


class TooFewSlots(Exception):
    """A step of a lane uses more rows than it has slots."""

    def __init__(self, lane: int, rows: int) -> None:
        self.lane, self.rows = lane, rows


def too_few_slots(header: Header, most: np.ndarray) -> SlotsError:
    """The error where a step does not fit; most int64 [V]: rows of each lane's largest step."""
    lane, rows = int(most.argmax()), int(most.max())
    return SlotsError(
        f"--slots: must hold every row of a step, is {header.slots[lane]}: the largest step of lane {lane} has {rows}: give --slots {rows} or more, "
        "or a smaller --batch-size"
    )
