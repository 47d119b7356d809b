"""Dense transforms and the exact statistics that standardisation needs (docs/definitions.md, Encoding)."""

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
    """The sum of finite float64 values, in units of 2^-1074, and that of their squares, in units of 2^-2148; both exactly.

    Mantissas are cut into a high half of 27 bits and a low one of 26, and products of these again, each summed per exponent in int64: exact below
    2^36 values a call.
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
    """The sum of int64 values of up to 54 bits."""
    return (int((values >> _DIGIT_BITS).sum()) << _DIGIT_BITS) + int((values & ((1 << _DIGIT_BITS) - 1)).sum())


def _shifted(value: int, bits: int) -> int:
    """value * 2^bits; of subnormal values, whose frexp exponents lie below the scale, the bits that go are zeros."""
    return value << bits if bits >= 0 else value >> -bits


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and population standard deviation of one dense column; deviation 1 where it is 0."""

    mean: float
    deviation: float

    def standard(self, values: np.ndarray) -> np.ndarray:
        """Values, float64 [n], standardised: within float32 where they are of the data that the scale was taken from."""
        return (values - self.mean) / self.deviation


@dataclass(frozen=True, slots=True)
class DenseStatistics:
    """Exact sums over the non-missing values of each dense column. Merging is associative and commutative, to the bit.

    counts: values. sums: of x, in units of 2^-1074; squares: of x*x, in units of 2^-2148.
    """

    counts: tuple[int, ...]
    sums: tuple[_Hexadecimal, ...]
    squares: tuple[_Hexadecimal, ...]

    @staticmethod
    def of(dense: np.ndarray) -> DenseStatistics:
        """The statistics of float64 [n, width], NaN where missing."""
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
        """The statistics of no samples."""
        return DenseStatistics((0,) * width, (0,) * width, (0,) * width)

    def merge(self, other: DenseStatistics) -> DenseStatistics:
        """The statistics of both samples together."""
        return DenseStatistics(
            *(
                tuple(a + b for a, b in zip(own, others, strict=True))
                for own, others in ((self.counts, other.counts), (self.sums, other.sums), (self.squares, other.squares))
            )
        )

    def moments(self) -> list[tuple[float, float, float]]:
        """Sum, mean and population standard deviation of each column; 0 for a column without values."""
        result = []
        for count, total, squares in zip(self.counts, self.sums, self.squares, strict=True):
            known = max(count, 1)
            # Division of Python integers rounds correctly.
            rounded = total / (1 << _SCALE_BITS)
            variance = (known * squares - total * total) / (known * known << 2 * _SCALE_BITS)
            result.append((rounded, rounded / known, math.sqrt(variance)))
        return result

    def finish(self) -> tuple[Scale, ...]:
        """Mean and deviation of each column; 0 and 1 for a column without values."""
        return tuple(Scale(mean, deviation or 1.0) for _, mean, deviation in self.moments())


def transform(dense: np.ndarray, columns: Sequence[Dense], scales: Sequence[Scale] | None) -> np.ndarray:
    """Dense values as the model gets them: float64 [n, width], NaN where missing -> float32 [n, width].

    scales: per column, needed where one is standardised.
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
    """Columns [rows] side by side as [rows, columns], converted to dtype; by way of [columns, rows], in blocks that stay in cache."""
    staged: np.ndarray = np.empty((len(columns), rows), dtype)
    for place, column in enumerate(columns):
        staged[place] = column
    out: np.ndarray = np.empty((rows, len(columns)), dtype)
    # In one call that leaves Python alone: workers in threads would hand its lock to and fro at every small one.
    _transpose(staged, out)
    return out


@nb.njit(nogil=True, cache=True)
def _transpose(source: np.ndarray, out: np.ndarray) -> None:
    for first in range(0, len(out), _BLOCK_ROWS):  # so that what every column writes into stays in cache
        for place in range(len(source)):
            for row in range(first, min(first + _BLOCK_ROWS, len(out))):
                out[row, place] = source[place, row]
