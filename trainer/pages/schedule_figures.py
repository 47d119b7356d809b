"""All figures that a page shows of a schedule, counted from its files."""

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

_SLOT_CHOICES = 9  # numbers of slots for which arrivals are counted
# Two numbers of slots whose logarithms differ by less than this count as one.
_NEAR = 0.15
# The most rows used, over lanes, for which arrivals with other slots are counted. Each takes about
# 0.1 us for each number of slots.
_MOST_USES = 60_000_000


@dataclass(slots=True)
class OverSteps:
    """Figures over the training steps, in points of equally many consecutive steps.

    A row is alive from its first use to its last. With slots for all rows that are alive, no row is
    ever fetched again.

    Attributes:
        middle: the middle step of each point.
        used: the mean number of rows that a step uses.
        arrived: the mean number of arrivals of a step.
        alive: the most rows alive in a step.
    """

    middle: np.ndarray
    used: np.ndarray
    arrived: np.ndarray
    alive: np.ndarray


@dataclass(slots=True)
class ByFrequency:
    """Rows in groups by how many steps use them.

    Attributes:
        least: the fewest uses of a row in each group: 1, 2, 4 and so on.
        rows: the number of rows in each group.
        uses: the number of uses of these rows.
    """

    least: np.ndarray
    rows: np.ndarray
    uses: np.ndarray


@dataclass(slots=True)
class BySlots:
    """Arrivals with other numbers of slots.

    Attributes:
        lanes: how many lanes the arrivals are counted in.
        slots: slots a lane, int64 [n].
        fewest: the fewest possible arrivals, int64 [n].
        lru: the arrivals of an LRU cache, int64 [n].
    """

    lanes: int
    slots: np.ndarray
    fewest: np.ndarray
    lru: np.ndarray


@dataclass(frozen=True, slots=True)
class TableShare:
    """The figures of a table.

    Attributes:
        rows: the rows that are ever used in training.
        uses: the uses of these rows, over all steps.
        arrivals: the arrivals of these rows.
    """

    name: str
    rows: int
    uses: int
    arrivals: int


@dataclass(slots=True)
class ScheduleFigures:
    """The figures of a complete schedule.

    Attributes:
        bytes: the size of the schedule's files.
        why: the reason if no rows are counted; `tables`, `over_steps`, `by_frequency` and
            `by_slots` are then None.
    """

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
    """Count the figures of a page, one lane after the other.

    Counting takes 16 bytes for each row used in a lane.

    Raises:
        ScheduleError: the schedule is damaged.
    """
    schedule = Schedule(path)
    header, counts = schedule.header, schedule.manifest["counts"]
    files = sum(item.stat().st_size for item in schedule.path.iterdir() if item.is_file())
    figures = ScheduleFigures(schedule.path.absolute().name, header, schedule.manifest, files, None, None, None, None)
    if 2 * BYTES_OF_USE * counts["rows_used"] / header.lanes > available_bytes():
        figures.why = f"{counts['rows_used']:,} rows used are too many to be counted in this machine's memory"
        return figures
    if not counts["training_steps"] or not counts["rows_used"]:
        figures.why = "its steps use no rows" if counts["training_steps"] else "it has no training steps"
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
    """Adds up the figures of all lanes."""

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
        """Add a lane.

        Raises:
            ScheduleError: the schedule is damaged.
        """
        uses = lane_uses(self._schedule, lane)
        self._used += np.diff(uses.starts)
        self._add_arrivals(lane)
        step_of = np.repeat(np.arange(self._steps), np.diff(uses.starts))
        first, last = np.full(len(uses.new), self._steps, np.int64), np.zeros(len(uses.new), np.int64)
        np.minimum.at(first, uses.rows, step_of)
        np.maximum.at(last, uses.rows, step_of)
        # A row adds 1 at the step of its first use, and takes it away behind the step of its last.
        # The running sum is the number of rows alive.
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
        """Add a lane's planned arrivals, by step and by table."""
        for moves in walk(self._schedule, lane):
            first, (_, arrived, _, _) = moves.first - self._schedule.header.first_step, moves.counts()
            self._arrived[first : first + len(arrived)] += arrived
            self._of_tables[2] += np.bincount(moves.values("arrival_table"), minlength=self._of_tables.shape[1])

    def _count_slots(self, lane: int, uses: LaneUses) -> None:
        """Count a lane's arrivals with other numbers of slots, as long as _MOST_USES allows.

        The numbers are the same for all lanes. The smallest is what the largest step of any lane
        needs.
        """
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
        """Return the numbers of slots to count for, int64 [n].

        They range from the fewest to as many as any lane has rows. The schedule's own number
        replaces those near it.
        """
        of_lanes = np.zeros(self._schedule.header.lanes, np.int64)
        for batch in self._schedule.rows():
            of_lanes += np.bincount(batch["lane"], minlength=len(of_lanes))
        least = max(least, 1)
        spread = np.geomspace(least, max(int(of_lanes.max()), least), _SLOT_CHOICES).round().astype(np.int64)
        inner = spread[1:-1][np.abs(np.log(spread[1:-1] / max(given, 1))) > _NEAR]
        return np.unique([spread[0], *inner, max(given, least), spread[-1]])

    def tables(self) -> list[TableShare]:
        """Return the figures of the tables, in the schedule's order."""
        names = [table.name for table in self._schedule.header.features.tables]
        return [TableShare(name, *map(int, values)) for name, values in zip(names, self._of_tables.T, strict=True)]

    def over_steps(self) -> OverSteps:
        """Return the figures over the steps, in at most MOST_POINTS points."""
        stride = -(-self._steps // MOST_POINTS)
        starts = np.arange(0, self._steps, stride)
        sizes = np.diff(starts, append=self._steps)
        first = self._schedule.header.first_step
        alive = np.maximum.reduceat(np.cumsum(self._alive)[: self._steps], starts)
        means = [np.add.reduceat(values, starts) / sizes for values in (self._used, self._arrived)]
        return OverSteps(first + starts + (sizes - 1) / 2, means[0], means[1], alive.astype(np.float64))

    def by_frequency(self) -> ByFrequency:
        """Return the groups, up to that of the most frequent rows."""
        last = int(np.flatnonzero(self._frequency[0])[-1]) + 1
        return ByFrequency(2 ** np.arange(last), *self._frequency[:, :last])

    def by_slots(self) -> BySlots:
        """Return the arrivals of the lanes that were counted."""
        assert self._slots is not None
        return BySlots(self._counted_lanes, self._slots, *self._counted)
