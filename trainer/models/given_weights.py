"""By what a table's values are known, so that rows and columns that were given can be distinguished from those that were drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class Drawn:
    """Hashes of a table's rows, uint64 [rows], and of its columns, uint64 [D]: 0 of one that has zeros alone."""

    rows: np.ndarray
    columns: np.ndarray

    @staticmethod
    def of(weights: Tensor) -> Drawn:
        """Those of a table, [rows, D]: sums of the values' bits, each times an odd number of its place, modulo 2^64."""
        count, width = weights.shape
        numbers = np.random.default_rng(0).integers(0, 2**64, max(width, _BLOCK_ROWS), np.uint64) | np.uint64(1)
        rows, columns = np.empty(count, np.uint64), np.zeros(width, np.uint64)
        for first in range(0, count, _BLOCK_ROWS):
            # Added to 0, so that the sign of zero is lost.
            block = weights[first : first + _BLOCK_ROWS].to("cpu", torch.float32) + 0.0
            bits = block.contiguous().numpy().view(np.uint32).astype(np.uint64)
            rows[first : first + len(bits)] = bits @ numbers[:width]
            columns = columns * numbers[0] + numbers[: len(bits)] @ bits
        return Drawn(rows, columns)

    def is_same(self, other: Drawn | None) -> bool:
        """Whether another table has the same values."""
        return other is not None and np.array_equal(self.rows, other.rows) and np.array_equal(self.columns, other.columns)

    def same_in(self, other: Drawn | None) -> Drawn:
        """The hashes of the rows and columns that are the same in another table, and 0 for all others."""
        if other is None or self.rows.shape != other.rows.shape or self.columns.shape != other.columns.shape:
            return Drawn(np.zeros_like(self.rows), np.zeros_like(self.columns))
        rows = np.where(self.rows == other.rows, self.rows, np.uint64(0))
        return Drawn(rows, np.where(self.columns == other.columns, self.columns, np.uint64(0)))

    @property
    def any(self) -> bool:
        """Whether a row or a column has a hash."""
        return bool(self.rows.any() or self.columns.any())

    @property
    def where(self) -> str:
        """Which part of the table has hashes, as " in 40 of 50 rows"; empty where it is all of it."""
        rows, columns = np.count_nonzero(self.rows), np.count_nonzero(self.columns)
        if rows == len(self.rows) or columns == len(self.columns):
            return ""
        return f" in {rows:,} of {len(self.rows):,} rows" if rows else f" in {columns:,} of {len(self.columns):,} columns"
