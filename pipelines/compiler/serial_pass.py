"""The serial pass: distinct rows, lanes, ordinals and local numbers of every step in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from foreload.pipelines.compiler import numbering
from foreload.pipelines.compiler.row_table import RowTable
from foreload.pipelines.errors import PipelineError
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.format import mask_dtype

AssignSamples = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""Decides which samples of a batch each lane takes, as `locality.assign_samples` does.

Args:
    inverse: int32 [lookups], the distinct row of each lookup.
    starts: int64 [samples + 1], the first lookup of each sample.
    lane: int32 [distinct], the lane of each row, -1 if it has none yet.
    lookups: int32 [distinct], the number of lookups of each row.
    lanes: The number of lanes.

Returns:
    int64 [samples], the batch's samples, slice by slice, ascending within each.
"""


@dataclass(frozen=True, slots=True)
class LaneStep:
    """The rows of one lane in a step, by first lookup.

    The arrays are views, valid until the next step.

    Attributes:
        numbers: int32 [rows], the number of each row. A lane's rows are numbered from 0 in the
            order in which the schedule first uses them. In evaluation, a row that was never trained
            has -1 - its place in `unknown`.
        users: unsigned [rows], bit v is set if the slice of lane v uses the row.
        newcomers: LANE_ROW, the rows that get their number in this step, in that order.
        unknown: LANE_ROW, likewise the rows that were never trained.
    """

    numbers: np.ndarray
    users: np.ndarray
    newcomers: np.ndarray
    unknown: np.ndarray


@dataclass(frozen=True, slots=True)
class Step:
    """What the serial pass found in a step.

    The distinct rows of the step are in the scratch space until the next step.

    Attributes:
        count: The number of distinct rows.
        firsts: int64 [V + 1], the first sample of each slice.
        bounds: int64 [V + 1], the first lookup of each slice.
        inverse: int32 [lookups], the distinct row of each lookup, slice by slice.
        order: int64 [samples], the batch's samples, slice by slice. None if slices are consecutive
            samples.
        lanes: The rows of each lane.
    """

    count: int
    firsts: np.ndarray
    bounds: np.ndarray
    inverse: np.ndarray
    order: np.ndarray | None
    lanes: tuple[LaneStep, ...] = ()


class SerialPass:
    """Finds distinct rows, lanes, ordinals and local numbers, step by step, over one row table.

    Attributes:
        counts: int64 [lanes, tables], the numbers of ordinals given so far.
        owned: int64 [lanes], the rows of the current step that each lane owns.
        most: int64 [lanes], the most rows of one step that each lane has owned so far.
        accesses: The distinct rows of all training steps so far.
        scratch: The working space of the kernels, which grows as steps need it.
    """

    def __init__(
        self, features: FeatureSpec, lanes: int, table: RowTable, assign: AssignSamples | None = None, first_step: int = 0
    ) -> None:
        """Start a pass; `table` holds the rows of earlier schedules, if any.

        Args:
            assign: Decides which samples of a training batch each lane takes. If None, each lane
                takes consecutive samples.
            first_step: The number of the first training step.
        """
        self.table = table
        self.lanes = lanes
        self.counts = np.zeros((lanes, len(features.tables)), np.int64)
        self.owned = np.zeros(lanes, np.int64)
        self.most = np.zeros(lanes, np.int64)
        # For each lane, the rows numbered so far, and the current step's rows that were never
        # trained.
        self._numbers = np.zeros((2, lanes), np.int64)
        self.accesses = 0
        self._step_number = first_step
        self._mask = mask_dtype(lanes)
        self.scratch = numbering.scratch(1024, lanes)
        self._assign = assign if lanes > 1 else None
        self._tables = np.array([f.table for f in features.features], np.int16)

    def train(self, samples: Samples, order: np.ndarray | None = None) -> Step:
        """Go over a training step. Rows without a lane and an ordinal get them.

        Args:
            samples: The batch.
            order: int64 [samples], the batch's samples, slice by slice, if known. If None, `assign`
                decides.
        """
        # Every lookup may be of a new row. The kernels cannot grow the row table, so it grows
        # beforehand.
        self.table.reserve(len(samples.ids))
        step = self._step(samples, True, order)
        np.maximum(self.most, self.owned, out=self.most)
        return step

    def look_up(self, samples: Samples) -> Step:
        """Go over an evaluation step, with its samples in order.

        A row that was never trained gets no lane; the step shows it at the lane that it would
        belong to.
        """
        return self._step(samples, False, None)

    def local_index(self, step: Step, out: np.ndarray) -> None:
        """Write each lookup's place among its lane's local rows, slice by slice.

        Args:
            step: The step that the pass has just processed.
            out: int32 [lookups], filled.
        """
        numbering.local_index(step.inverse, step.bounds, step.count, self.scratch, out)

    def _step(self, samples: Samples, train: bool, order: np.ndarray | None) -> Step:
        count = self._distinct(samples, train)
        step = self._sliced(samples, count, train, order)
        # A new row belongs to a lane that uses it. So the slices must be known before the users,
        # and the users before the owners.
        numbering.find_users(step.inverse, step.bounds, count, self.scratch.users)
        if numbering.assign_owners(count, self.counts, train, self.owned, self.scratch) < 0:
            raise PipelineError("rows: a table of one lane uses more than 2^31 rows; give more --lanes")
        newcomers = np.zeros(self.lanes, np.int64)
        self._numbers[1] = 0
        numbering.number_rows(self.table.rows, count, self.accesses if train else -1, self._numbers, newcomers, self.scratch)
        if self._numbers.max() >= 2**31 - 2:
            raise PipelineError("rows: a lane uses more than 2^31 rows; give more --lanes")
        if train:
            self.accesses += count
            self._step_number += 1
        return replace(step, lanes=self._of_lanes(count, newcomers))

    def _of_lanes(self, count: int, newcomers: np.ndarray) -> tuple[LaneStep, ...]:
        scratch = self.scratch
        users = scratch.users[scratch.order[:count]].astype(self._mask)
        ends, new_ends = [0, *np.cumsum(self.owned).tolist()], [0, *np.cumsum(newcomers).tolist()]
        steps = []
        for (start, end), (first, last) in zip(pairwise(ends), pairwise(new_ends), strict=True):
            new = scratch.newcomers[first:last]
            trained = new["ordinal"] >= 0
            unknown = new[:0] if trained.all() else new[~trained]
            steps.append(LaneStep(scratch.numbers[start:end], users[start:end], new[trained] if len(unknown) else new, unknown))
        return tuple(steps)

    def _distinct(self, samples: Samples, train: bool) -> int:
        lookups = len(samples.ids)
        if lookups > self.scratch.inverse.size:
            self.scratch = numbering.scratch(max(lookups, 3 * self.scratch.inverse.size // 2), self.lanes)
        tables = self._tables
        # With several values for a feature, the kernels need the table of every lookup and not of
        # every feature.
        if samples.offsets is not None:
            tables = np.repeat(np.tile(tables, len(samples)), np.diff(samples.offsets))
        if train and lookups:
            tag = self._step_number + 1
            return int(numbering.number_training_rows(self.table.rows, samples.ids, tables, self.accesses, tag, self.scratch))
        return int(numbering.number_evaluation_rows(self.table.rows, samples.ids, tables, self.scratch))

    def _sliced(self, samples: Samples, count: int, train: bool, order: np.ndarray | None) -> Step:
        """Return the slices of a step.

        They are consecutive samples, those of `order`, or those that `assign` chooses.
        """
        width = self._tables.size
        firsts = np.arange(self.lanes + 1, dtype=np.int64) * len(samples) // self.lanes
        inverse = self.scratch.inverse[: len(samples.ids)]
        if samples.offsets is None:
            starts = np.arange(len(samples) + 1, dtype=np.int64) * width
        else:
            starts = samples.offsets[::width]
        if self._assign is None or not train:
            return Step(count, firsts, starts[firsts], inverse, None)
        if order is None:
            lookups = np.zeros(count, np.int32)
            numbering.lookups_of_rows(inverse, lookups)
            order = self._assign(inverse, starts, self.scratch.lane[:count], lookups, self.lanes)
        placed, bounds = np.empty_like(inverse), np.empty(len(samples) + 1, np.int64)
        numbering.placed_lookups(order, inverse, starts, placed, bounds)
        return Step(count, firsts, bounds[firsts], placed, order)
