"""Dense transforms and exact statistics for standardization (docs/definitions.md, Encoding)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from foreload.base.codec import JsonForm
from foreload.base.compiled import nb
from foreload.pipelines.samples.features import Dense

# Finite float64 values are integers times 2^-1074, and their squares times 2^-2148.
_SCALE_BITS = 1074
_DIGIT_BITS = 26
_BLOCK_ROWS = 1024

_Hexadecimal = Annotated[int, JsonForm(str, hex, lambda text: int(text, 16))]


def exact_sums(values: np.ndarray) -> tuple[int, int]:
    """Return the exact sum of float64 values, and the exact sum of their squares.

    Each mantissa is split into a high half of 27 bits and a low half of 26 bits. The halves and
    their products are summed per exponent in int64. This is exact for fewer than 2^36 values a
    call.

    Args:
        values: float64 [n], finite.

    Returns:
        The sum in units of 2^-1074, and the sum of squares in units of 2^-2148.
    """
    mantissas, exponents = np.frexp(values)
    whole = (mantissas * 2.0**53).astype(np.int64)
    exponents = exponents.astype(np.int64) - 53
    total = squares = 0
    for exponent in np.unique(exponents):
        chosen = whole[exponents == exponent]
        high, low = chosen >> _DIGIT_BITS, chosen & ((1 << _DIGIT_BITS) - 1)
        shift = int(exponent) + _SCALE_BITS
        total += _shifted((int(high.sum()) << _DIGIT_BITS) + int(low.sum()), shift)
        of_square = (
            (_long_sum(high * high) << 2 * _DIGIT_BITS) + (_long_sum(high * low) << _DIGIT_BITS + 1) + _long_sum(low * low)
        )
        squares += _shifted(of_square, 2 * shift)
    return total, squares


def _long_sum(values: np.ndarray) -> int:
    """Return the sum of int64 values of up to 54 bits."""
    return (int((values >> _DIGIT_BITS).sum()) << _DIGIT_BITS) + int((values & ((1 << _DIGIT_BITS) - 1)).sum())


def _shifted(value: int, bits: int) -> int:
    """Return value * 2^bits.

    `bits` is negative for subnormal values only, whose frexp exponents lie below the scale. The
    bits that are shifted out are then zeros.
    """
    return value << bits if bits >= 0 else value >> -bits


@dataclass(frozen=True, slots=True)
class Scale:
    """The mean and the population standard deviation of one dense column.

    Attributes:
        deviation: 1 if the standard deviation is 0.
    """

    mean: float
    deviation: float

    def standard(self, values: np.ndarray) -> np.ndarray:
        """Standardize values, float64 [n].

        Values of the data that the scale was computed from stay within float32.
        """
        return (values - self.mean) / self.deviation


@dataclass(frozen=True, slots=True)
class DenseStatistics:
    """Exact sums over the non-missing values of each dense column.

    Merging is associative and commutative, to the bit.

    Attributes:
        counts: the number of values.
        sums: the sums of x, in units of 2^-1074.
        squares: the sums of x*x, in units of 2^-2148.
    """

    counts: tuple[int, ...]
    sums: tuple[_Hexadecimal, ...]
    squares: tuple[_Hexadecimal, ...]

    @staticmethod
    def of(dense: np.ndarray) -> DenseStatistics:
        """Compute the statistics of dense values, float64 [n, width], NaN where missing."""
        counts, sums, squares = [], [], []
        for place in range(dense.shape[1]):
            values = dense[:, place]
            values = values[~np.isnan(values)]
            total, of_squares = exact_sums(values)
            counts.append(len(values))
            sums.append(total)
            squares.append(of_squares)
        return DenseStatistics(tuple(counts), tuple(sums), tuple(squares))

    @staticmethod
    def empty(width: int) -> DenseStatistics:
        """Return the statistics of no samples."""
        return DenseStatistics((0,) * width, (0,) * width, (0,) * width)

    def merge(self, other: DenseStatistics) -> DenseStatistics:
        """Return the statistics of both sets of samples together."""
        return DenseStatistics(
            *(
                tuple(a + b for a, b in zip(own, others, strict=True))
                for own, others in ((self.counts, other.counts), (self.sums, other.sums), (self.squares, other.squares))
            )
        )

    def moments(self) -> list[tuple[float, float, float]]:
        """Return the sum, mean and population standard deviation of each column.

        All three are 0 for a column without values.
        """
        result = []
        for count, total, squares in zip(self.counts, self.sums, self.squares, strict=True):
            known = max(count, 1)
            # Division of Python integers rounds correctly.
            rounded = total / (1 << _SCALE_BITS)
            variance = (known * squares - total * total) / (known * known << 2 * _SCALE_BITS)
            result.append((rounded, rounded / known, math.sqrt(variance)))
        return result

    def finish(self) -> tuple[Scale, ...]:
        """Return the scale of each column.

        A column without values has mean 0 and deviation 1.
        """
        return tuple(Scale(mean, deviation or 1.0) for _, mean, deviation in self.moments())


def transform(dense: np.ndarray, columns: Sequence[Dense], scales: Sequence[Scale] | None) -> np.ndarray:
    """Transform dense values into the model's input.

    Args:
        dense: float64 [n, width], NaN where missing.
        columns: the dense columns, in order.
        scales: for each column its scale. Needed if a column is standardized.

    Returns:
        float32 [n, width]. Missing values are 0.

    Raises:
        ValueError: a column is standardized, and there are no scales.
    """
    transformed = []
    for place, column in enumerate(columns):
        values = dense[:, place]
        if column.transform == "log":
            values = np.log1p(np.maximum(values, 0.0))
        elif column.transform == "standard":
            if scales is None:
                raise ValueError(f"dense {column.name}: standardisation needs the statistics of the training data")
            values = scales[place].standard(values)
        transformed.append(np.where(np.isnan(values), 0.0, values))
    return rows_of(transformed, len(dense), np.float32)


def rows_of(columns: Sequence[np.ndarray], rows: int, dtype: type) -> np.ndarray:
    """Put columns of `rows` values side by side, as an array [rows, columns] of dtype.

    The columns are first converted to [columns, rows], and then transposed in blocks that stay in
    cache.
    """
    staged: np.ndarray = np.empty((len(columns), rows), dtype)
    for place, column in enumerate(columns):
        staged[place] = column
    out: np.ndarray = np.empty((rows, len(columns)), dtype)
    # One call that releases Python's lock for all of the work. With many small calls, worker
    # threads would pass the lock back and forth.
    _transpose(staged, out)
    return out


@nb.njit(nogil=True, cache=True)
def _transpose(source: np.ndarray, out: np.ndarray) -> None:
    # In blocks of rows, so that the cache lines that all columns write into stay in cache.
    for first in range(0, len(out), _BLOCK_ROWS):
        for place in range(len(source)):
            for row in range(first, min(first + _BLOCK_ROWS, len(out))):
                out[row, place] = source[place, row]
