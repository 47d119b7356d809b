"""The serial pass over one row table: distinct rows, lanes, ordinals and local numbers of every step in turn."""

from __future__ import annotations

import numpy as np

from pipelines import numbering
from pipelines.errors import PipelineError
from pipelines.features import FeatureSpec
from pipelines.row_table import RowTable
from pipelines.samples import Samples


class SerialPass:
    """Distinct rows, lanes, ordinals and local numbers, step by step, over one row table."""

    def __init__(self, features: FeatureSpec, lanes: int, table: RowTable) -> None:
        self.table = table
        self.lanes = lanes
        self.counts = np.zeros((lanes, len(features.tables)), np.int64)
        self.owned = np.zeros(lanes, np.int64)  # rows that each lane owns of the step at hand
        self.most = np.zeros(lanes, np.int64)
        self._tables = np.array([f.table for f in features.features], np.int16)
        self._stamp = 0
        self.scratch = numbering.scratch(1024, lanes)

    def distinct(self, samples: Samples) -> tuple[int, np.ndarray, np.ndarray]:
        """The step's distinct rows, in scratch; returns (count, first sample of each lane [V + 1], first lookup of each lane [V + 1])."""
        if len(samples.ids) > self.scratch.inverse.size:
            self.scratch = numbering.scratch(2 * len(samples.ids), self.lanes)
            self._stamp = 0
        self._stamp += 1
        width = self._tables.size
        firsts = np.arange(self.lanes + 1, dtype=np.int64) * len(samples) // self.lanes
        if samples.offsets is None:
            tables, bounds = self._tables, firsts * width
        else:
            values = np.diff(samples.offsets)
            tables = np.repeat(np.tile(self._tables, len(samples)), values)
            bounds = samples.offsets[firsts * width] - samples.offsets[0]
        count = numbering.distinct_rows(samples.ids, tables, bounds, self._stamp, self.scratch)
        return count, firsts, bounds

    def train(self, samples: Samples) -> tuple[int, np.ndarray, np.ndarray]:
        """`distinct` for a training step; lanes and ordinals are given to rows that have none."""
        self.table.reserve(len(samples.ids))
        count, firsts, bounds = self.distinct(samples)
        if numbering.assign(self.table.rows, count, self.counts, self.scratch) < 0:
            raise PipelineError("rows: a table of one lane has more than 2^31 rows in use: use more lanes")
        self.owned = np.bincount(self.scratch.lane[:count], minlength=self.lanes)
        self.most = np.maximum(self.most, self.owned)
        return count, firsts, bounds

    def look_up(self, samples: Samples) -> tuple[int, np.ndarray, np.ndarray]:
        """`distinct` for an evaluation step; changes nothing."""
        count, firsts, bounds = self.distinct(samples)
        numbering.look_up(self.table.rows, count, self.scratch)
        self.owned = np.bincount(self.scratch.lane[:count], minlength=self.lanes)
        return count, firsts, bounds
