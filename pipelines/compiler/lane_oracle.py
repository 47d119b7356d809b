"""The lanes' oracles as they follow the serial pass: their lookahead, and the moves of the segment being planned."""

from __future__ import annotations

from collections import deque

import numpy as np

from foreload.pipelines.compiler import oracle, window
from foreload.pipelines.compiler.row_table import ACCESS_BITS, Rows
from foreload.pipelines.compiler.serial_pass import SerialPass, Step
from foreload.pipelines.errors import SettingError
from foreload.pipelines.schedule.format import MOVE_COLUMNS

RATE_STEPS = 32  # steps over which a lane's arrivals are averaged
TARGET_RATIO = 4  # lookahead in units of slots / arrivals per step; from 3 on arrivals equal Belady's MIN
STEPS = 1 << 10  # steps that the window has room for at first

_KINDS = 3 * (window.ROWS_USED,) + (window.ENDS,) + 6 * (window.ARRIVALS,)  # what each of the columns of Moves has an entry for

Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (offsets int32 [events + 1], values)


class MoveBuffer:
    """The moves of one lane in consecutive events, in arrays that are used again."""

    def __init__(self, mask: np.dtype) -> None:
        kinds = (np.int32, np.uint8, mask, np.int32, np.int32, np.int16, np.int64, np.int64, np.int32, np.int32)
        self.moves = window.Moves(*(np.empty(0, kind) for kind in kinds))
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
            self.moves = window.Moves(*grown)
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
    """One lane's part of the oracle: what it knows of its arrivals, and the moves of the segment being planned.

    lookahead_ratio: the least lookahead that a decision to end a residency had, in units of slots / arrivals per step; infinite: none had less than
    all of the future.
    """

    def __init__(self, lane: int, slots: int, mask: np.dtype) -> None:
        self.lane, self.slots = lane, slots
        self.buffer = MoveBuffer(mask)
        # What the manifest counts, in the order of the columns of counts.
        self.totals = {"used": 0, "ends": 0, "arrivals": 0, "initial": 0}
        self.lookahead_ratio = float("inf")
        self.pending = 0  # accesses between the serial pass and the oracle
        self._recent: deque[int] = deque(maxlen=RATE_STEPS)  # arrivals of each of the last steps planned
        self._sum = 0  # of the recent steps' arrivals

    def lookahead(self, occupied: int, pending_steps: int) -> int:
        """Steps that the serial pass must be ahead for the next decisions to be Belady's.

        Two at least, since a step's plan says who uses a row in the step after. occupied: slots taken; pending_steps: steps between the serial
        pass and the oracle, in which `pending` accesses are.
        """
        if self.slots - occupied >= self.pending:  # even if all of them arrive, nobody has to leave
            return 2
        if not self._recent:
            # Nothing is known of arrivals yet; as a rule at least a quarter of the rows of the first steps arrive.
            return 2 + 4 * TARGET_RATIO * self.slots * pending_steps // max(self.pending, 1)
        return 2 + (TARGET_RATIO * self.slots * len(self._recent) // self._sum if self._sum else 1 << 30)

    def count(self, first: int, counts: np.ndarray, front: int, at_end: bool) -> None:
        """Take note of steps that were planned, from `first` on, while the serial pass stood at step `front`.

        counts: int64 [steps, 4], as `room` gives them; at_end: the serial pass has come to the end.
        """
        for step, (_, ends, arrivals, _) in enumerate(counts.tolist(), first):
            if len(self._recent) == RATE_STEPS:
                self._sum -= self._recent[0]
            self._recent.append(arrivals)
            self._sum += arrivals
            if ends and not at_end:  # a row had to leave, and what is to come was not all known
                self.lookahead_ratio = min(self.lookahead_ratio, (front - step) * self._sum / len(self._recent) / self.slots)
        sums = counts.sum(axis=0).tolist()
        for name, value in zip(self.totals, sums, strict=True):
            self.totals[name] += value
        self.pending -= sums[window.ROWS_USED]


class Oracle:
    """All lanes' oracles: the window of pending accesses, the partitions, and the moves of the segment being planned.

    ordinals int64 [V, tables]: given before the first step; ring: accesses that the window has room for at first.
    """

    def __init__(self, slots: list[int], ordinals: np.ndarray, ring: int, mask: np.dtype, first_step: int) -> None:
        self.window = window.empty_window(ring, STEPS, len(slots), mask)
        self.parts = window.empty_partitions(slots, STEPS, ordinals.shape[1])
        self.parts.ordinals[:] = ordinals
        self.lanes = [LaneOracle(lane, n, mask) for lane, n in enumerate(slots)]
        self.step = self.front = first_step  # the next to be planned; the next that the serial pass comes to

    def pending(self) -> int:
        """Accesses between the serial pass and the oracle."""
        return int(self.window.scalars[window.FRONT] - self.window.scalars[window.TAIL])

    def link(self, serial: SerialPass, step: Step) -> None:
        """Append a step of the serial pass."""
        need = self.pending() + step.count
        if need > len(self.window.tables):
            if need > 1 << ACCESS_BITS:
                raise SettingError(f"--batch-size: must leave three steps of at most 2^{ACCESS_BITS} rows: use a smaller one")
            self.window = window.with_ring(self.window, 1 << (need - 1).bit_length())
        if self.front - self.step + 4 > len(self.window.starts):
            self.window, self.parts = window.with_steps(
                self.window, self.parts, 2 * len(self.window.starts), self.step - 2, self.front
            )
        oracle.link(serial.table.rows, self.front, step.count, serial.owned, serial.scratch, self.window, self.parts)
        for planner, owned in zip(self.lanes, serial.owned.tolist(), strict=True):
            planner.pending += owned
        self.front += 1

    def occupied(self, lane: int) -> int:
        """Slots that a row has taken; they are 0 .. occupied - 1."""
        return int(self.parts.scalars[lane, window.USED])

    def lookahead(self) -> int:
        """Steps that the serial pass must be ahead for the next decisions of every lane to be Belady's."""
        ahead = self.front - self.step
        return max(planner.lookahead(self.occupied(lane), ahead) for lane, planner in enumerate(self.lanes))

    def plan(self, rows: Rows, lane: int, count: int, at_end: bool) -> None:
        """Plan `count` steps of one lane; at_end: the serial pass has come to the end. Raises TooFewSlots."""
        planner = self.lanes[lane]
        steps = np.arange(self.step, self.step + count) & (len(self.window.starts) - 1)
        used = int((self.window.starts[steps, lane + 1] - self.window.starts[steps, lane]).sum())
        counts = planner.buffer.room(count, used)
        need = oracle.plan_steps(
            rows, lane, self.step, self.window, self.parts, planner.buffer.fill, planner.buffer.moves, counts
        )
        if need:
            raise TooFewSlots(lane, int(need))
        planner.count(self.step, counts, self.front, at_end)

    def advance(self, count: int) -> None:
        """Leave `count` steps behind that every lane has planned."""
        self.step += count
        self.window.scalars[window.TAIL] = self.window.starts[(self.step - 1) & (len(self.window.starts) - 1), -1]

    def occupants(self, rows: Rows, lane: int) -> dict[str, np.ndarray]:
        """A partition's entry state (schedule.Occupants)."""
        n = self.occupied(lane)
        kinds = (("table", np.int16), ("ordinal", np.int64), ("id", np.int64), ("tag", np.int32), ("stored", np.int32))
        columns = {name: np.zeros(n, kind) for name, kind in kinds}
        window.occupants(rows, lane, self.parts, *columns.values())
        return columns


class TooFewSlots(Exception):
    """A step of a lane uses more rows than it has slots."""

    def __init__(self, lane: int, rows: int) -> None:
        self.lane, self.rows = lane, rows
