"""One lane's oracle as it follows the serial pass: its state, its lookahead, and the moves of the segment being planned."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from pipelines import oracle
from pipelines.serial_pass import SerialPass

RATE_STEPS = 32  # steps over which a lane's arrivals are averaged
COVER = 4  # lookahead in units of slots / arrivals per step; from 3 on arrivals equal Belady's MIN


class LaneOracle:
    """One lane's oracle: its state, and the moves of the segment being planned."""

    def __init__(self, slots: int, lane: int, tables: int, ring: int, mask: np.dtype) -> None:
        self.state = oracle.lane_state(slots, ring, 1 << 10, mask)
        self._mask = mask
        self.lane = lane
        self.recent: deque[int] = deque(maxlen=RATE_STEPS)
        self.trained = np.zeros(tables, np.int64)  # ordinals given so far, per table
        self.moves: list[oracle.Moves] = []
        self.totals = {"used": 0, "arrivals": 0, "initial": 0, "ends": 0}
        self.cover = float("inf")
        self._pending_steps = 0

    def pending(self) -> int:
        """Accesses between the serial pass and the oracle."""
        return int(self.state.scalars[oracle.FRONT] - self.state.scalars[oracle.TAIL])

    def link(self, serial: SerialPass, step: int, oldest: int, count: int) -> None:
        """Append a step of the serial pass."""
        need = self.pending() + int(serial.owned[self.lane])
        if need > self.state.row.size:
            self.state = oracle.with_ring(self.state, 1 << (need - 1).bit_length())
        if step - oldest + 4 > self.state.step_ends.size:
            self._grow_steps(step, oldest)
        self._pending_steps += 1
        oracle.link(serial.table.rows, self.lane, step, count, serial.scratch, self.state)

    def _grow_steps(self, step: int, oldest: int) -> None:
        old = self.state.step_ends.size
        numbers = np.arange(max(oldest - 2, 0), step)
        ends, heads = np.zeros(2 * old, np.int64), np.full(2 * old, -1, np.int32)
        ends[numbers & (2 * old - 1)] = self.state.step_ends[numbers & (old - 1)]
        heads[numbers & (2 * old - 1)] = self.state.heads[numbers & (old - 1)]
        self.state = self.state._replace(step_ends=ends, heads=heads)

    def occupied(self) -> int:
        """Slots that a row has taken; they are 0 .. occupied - 1."""
        return int(self.state.scalars[oracle.USED])

    def lookahead(self) -> int:
        """Steps that the serial pass must be ahead for the next decisions to be Belady's."""
        if self.state.slot_row.size - self.occupied() >= self.pending():
            return 2
        slots = self.state.slot_row.size
        if not self.recent:
            # Nothing is known of arrivals yet; as a rule at least a quarter of the rows of the first steps arrive.
            return 2 + 4 * COVER * slots * self._pending_steps // max(self.pending(), 1)
        arrivals = sum(self.recent)
        return 2 + (COVER * slots * len(self.recent) // arrivals if arrivals else 1 << 30)

    def plan(self, rows: Any, first: int, count: int, front: int, at_end: bool) -> None:
        """Plan `count` steps from `first`; the serial pass stands at step `front`."""
        for step in range(first, first + count):
            moves = room_for_moves(self._pending_in(step), self._mask)
            used, ends, arrivals = oracle.plan_step(rows, step, self.state, moves)
            if used < 0:
                raise TooFewSlots(self.lane, -used)
            moves = cut_moves(moves, used, ends, arrivals)
            self.moves.append(moves)
            self._pending_steps -= 1
            fresh = moves.table[moves.tag == 0]
            self.trained += np.bincount(fresh, minlength=self.trained.size)
            self.recent.append(int(arrivals))
            for name, value in (("used", used), ("arrivals", arrivals), ("initial", fresh.size), ("ends", ends)):
                self.totals[name] += int(value)
            if ends and not at_end:
                self.cover = min(self.cover, (front - step) * sum(self.recent) / len(self.recent) / self.state.slot_row.size)

    def _pending_in(self, step: int) -> int:
        """Rows of the step at the ring's tail."""
        steps = self.state.step_ends.size - 1
        return int(self.state.step_ends[step & steps] - self.state.scalars[oracle.TAIL])

    def occupants(self, rows: Any) -> dict[str, np.ndarray]:
        """The partition's entry state (schedule.Occupants)."""
        n = self.occupied()
        found = {
            name: np.zeros(n, kind)
            for name, kind in (
                ("table", np.int16),
                ("ordinal", np.int64),
                ("id", np.int64),
                ("tag", np.int32),
                ("stored", np.int32),
            )
        }
        oracle.occupants(rows, self.state, *found.values())
        return found

    def take_moves(self) -> list[oracle.Moves]:
        """Hand over the moves planned since the last call."""
        moves, self.moves = self.moves, []
        return moves


class TooFewSlots(Exception):
    def __init__(self, lane: int, rows: int) -> None:
        self.lane, self.rows = lane, rows


def room_for_moves(room: int, mask: np.dtype) -> oracle.Moves:
    return oracle.Moves(
        np.empty(room, np.int32),
        np.empty(room, np.uint8),
        np.empty(room, mask),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int16),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
    )


def cut_moves(moves: oracle.Moves, used: int, ends: int, arrivals: int) -> oracle.Moves:
    lengths = [used] * 3 + [ends] + [arrivals] * 6
    return oracle.Moves(*(array[:n].copy() for array, n in zip(moves, lengths, strict=True)))
