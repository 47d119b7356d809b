"""All that a page shows of a schedule, counted from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreload.base.memory import available_bytes
from foreload.pipelines.compiler.other_slots import BYTES_OF_USE, LaneUses, count_moves, lane_uses, lru_arrivals, lru_depths
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import walk
from foreload.trainer.pages.step_figures import MOST_POINTS

_SLOT_CHOICES = 9  # of which arrivals are counted
_NEAR = 0.15  # of which logarithms of two numbers of slots differ that are as good as one
_MOST_USES = 60_000_000  # rows used, over lanes, that are counted for other slots: some 0.1 us for each of these, and each choice


@dataclass(slots=True)
class OverSteps:
    """Of each point of as many consecutive training steps: its middle; means of a step's rows used and of arrivals, and rows alive, most of them.

    A row is alive from its first use to its last: with slots for all of these, no row is ever fetched again.
    """

    middle: np.ndarray
    used: np.ndarray
    arrived: np.ndarray
    alive: np.ndarray


@dataclass(slots=True)
class ByFrequency:
    """Rows by how many steps use them: from (1, 2, 4, ..), how many rows, and how often these are used in all."""

    least: np.ndarray
    rows: np.ndarray
    uses: np.ndarray


@dataclass(slots=True)
class BySlots:
    """Arrivals with other slots, of so many lanes together: slots a lane, int64 [n], the fewest arrivals, and those of an LRU cache."""

    lanes: int
    slots: np.ndarray
    fewest: np.ndarray
    lru: np.ndarray


@dataclass(frozen=True, slots=True)
class TableShare:
    """What a table has: rows ever used in training, how often these are used in all, and arrivals."""

    name: str
    rows: int
    uses: int
    arrivals: int


@dataclass(slots=True)
class ScheduleFigures:
    """A complete schedule. why: why it is not counted, where tables, over_steps, by_frequency and by_slots are None."""

    name: str
    header: Any
    manifest: Mapping[str, Any]
    bytes: int
    tables: Sequence[TableShare] | None
    over_steps: OverSteps | None
    by_frequency: ByFrequency | None
    by_slots: BySlots | None
    why: str = ""


def read_schedule(path: Path | str) -> ScheduleFigures:
    """Count what a page shows; lane after lane, 16 bytes for each row used in one. Raises ScheduleError."""
    schedule = Schedule(path)
    header, counts = schedule.header, schedule.manifest["counts"]
    files = sum(item.stat().st_size for item in schedule.path.iterdir() if item.is_file())
    figures = ScheduleFigures(schedule.path.absolute().name, header, schedule.manifest, files, None, None, None, None)
    if 2 * BYTES_OF_USE * counts["rows_used"] / header.lanes > available_bytes():
        figures.why = f"{counts['rows_used']:,} rows used are too many to be counted in this machine's memory"
        return figures
    if not counts["training_steps"]:
        figures.why = "it has no training steps"
        return figures
    lanes = _Lanes(schedule)
    for lane in range(header.lanes):
        lanes.add(lane)
    figures.tables, figures.over_steps, figures.by_frequency, figures.by_slots = (
        lanes.tables(),
        lanes.over_steps(),
        lanes.by_frequency(),
        lanes.by_slots(),
    )
    return figures


class _Lanes:
    """Adds up the counts of lanes."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, header = schedule, schedule.header
        self._steps = header.end_step - header.first_step
        self._used, self._arrived = np.zeros(self._steps, np.int64), np.zeros(self._steps, np.int64)
        self._alive = np.zeros(self._steps + 1, np.int64)
        self._frequency = np.zeros((2, 64), np.int64)
        self._of_tables = np.zeros((3, len(header.features.tables)), np.int64)
        self._slots: np.ndarray | None = None
        self._counted = np.zeros((2, 0), np.int64)
        self._counted_lanes = 0

    def add(self, lane: int) -> None:
        """One more. Raises ScheduleError."""
        uses = lane_uses(self._schedule, lane)
        self._used += np.diff(uses.starts)
        self._add_arrivals(lane)
        step_of = np.repeat(np.arange(self._steps), np.diff(uses.starts))
        first, last = np.full(len(uses.new), self._steps, np.int64), np.zeros(len(uses.new), np.int64)
        np.minimum.at(first, uses.rows, step_of)
        np.maximum.at(last, uses.rows, step_of)
        self._alive += np.bincount(first, minlength=self._steps + 1)[: self._steps + 1]
        self._alive -= np.bincount(last + 1, minlength=self._steps + 1)[: self._steps + 1]
        often = np.bincount(uses.rows, minlength=len(uses.new))
        group = np.floor(np.log2(np.maximum(often, 1))).astype(np.int64)
        self._frequency[0] += np.bincount(group, minlength=64)
        self._frequency[1] += np.bincount(group, often, 64).astype(np.int64)
        kinds = self._of_tables.shape[1]
        self._of_tables[0] += np.bincount(uses.tables, minlength=kinds)
        self._of_tables[1] += np.bincount(uses.tables, often, kinds).astype(np.int64)
        self._count_slots(lane, uses)

    def _add_arrivals(self, lane: int) -> None:
        """Arrivals as they are planned, by step and by table."""
        for moves in walk(self._schedule, lane):
            first, (_, arrived, _, _) = moves.first - self._schedule.header.first_step, moves.counts()
            self._arrived[first : first + len(arrived)] += arrived
            self._of_tables[2] += np.bincount(moves.values("arrival_table"), minlength=self._of_tables.shape[1])

    def _count_slots(self, lane: int, uses: LaneUses) -> None:
        """Arrivals with other slots, of as many lanes as may be; slots are the same in each, of those that the largest steps of all need."""
        manifest = self._schedule.manifest
        of_lanes = manifest["counts"]["rows_used"] // self._schedule.header.lanes
        if lane and (lane + 1) * of_lanes > _MOST_USES:
            return
        if self._slots is None:
            self._slots = self._choices(max(manifest["minimum_slots"]), max(manifest["occupied"]))
            self._counted = np.zeros((2, len(self._slots)), np.int64)
        depths = lru_depths(uses)
        for place, slots in enumerate(self._slots.tolist()):
            self._counted[0, place] += count_moves(uses, slots).arrived.sum()
            self._counted[1, place] += lru_arrivals(uses, depths, slots).sum()
        self._counted_lanes += 1

    def _choices(self, least: int, given: int) -> np.ndarray:
        """Numbers of slots from the fewest to as many as any lane has rows, and those of the schedule, which stand for ones near them: int64 [n]."""
        of_lanes = np.zeros(self._schedule.header.lanes, np.int64)
        for batch in self._schedule.rows():
            of_lanes += np.bincount(batch["lane"], minlength=len(of_lanes))
        least = max(least, 1)
        spread = np.geomspace(least, max(int(of_lanes.max()), least), _SLOT_CHOICES).round().astype(np.int64)
        inner = spread[1:-1][np.abs(np.log(spread[1:-1] / max(given, 1))) > _NEAR]
        return np.unique([spread[0], *inner, max(given, least), spread[-1]])

    def tables(self) -> list[TableShare]:
        """In the order of the schedule."""
        names = [table.name for table in self._schedule.header.features.tables]
        return [TableShare(name, *map(int, values)) for name, values in zip(names, self._of_tables.T, strict=True)]

    def over_steps(self) -> OverSteps:
        """In at most MOST_POINTS points."""
        stride = -(-self._steps // MOST_POINTS)
        starts = np.arange(0, self._steps, stride)
        sizes = np.diff(starts, append=self._steps)
        first = self._schedule.header.first_step
        alive = np.maximum.reduceat(np.cumsum(self._alive)[: self._steps], starts)
        means = [np.add.reduceat(values, starts) / sizes for values in (self._used, self._arrived)]
        return OverSteps(first + starts + (sizes - 1) / 2, means[0], means[1], alive.astype(np.float64))

    def by_frequency(self) -> ByFrequency:
        """Up to the most frequent rows."""
        last = int(np.flatnonzero(self._frequency[0])[-1]) + 1
        return ByFrequency(2 ** np.arange(last), *self._frequency[:, :last])

    def by_slots(self) -> BySlots:
        """Of the lanes that were counted."""
        assert self._slots is not None
        return BySlots(self._counted_lanes, self._slots, *self._counted)
