"""Dense transforms, and exact statistics for those that need them (docs/definitions.md, Encoding)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Annotated

import numpy as np

from foreload.base.codec import JsonForm
from foreload.base.compiled import nb
from foreload.pipelines.samples.features import Dense
from foreload.pipelines.samples.transforms import transformed

# Finite float64 values are integers times 2^-1074, and their squares times 2^-2148.
_SCALE_BITS = 1074
_DIGIT_BITS = 26
_BLOCK_ROWS = 1024

_Hexadecimal = Annotated[int, JsonForm(str, hex, lambda text: int(text, 16))]
_HexadecimalFloat = Annotated[float, JsonForm(str, float.hex, float.fromhex)]


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
    """What a scaled column is taken relative to: x becomes (x - origin) / unit.

    Values of the data that the scale was computed from stay within float32.

    Attributes:
        origin: the mean or, with min_max, the least value.
        unit: the population standard deviation or, with min_max, the largest value less the least.
            1 if that is 0.
    """

    origin: float
    unit: float


@dataclass(frozen=True, slots=True)
class DenseStatistics:
    """Exact sums over the non-missing values of each dense column.

    Merging is associative and commutative, to the bit.

    Attributes:
        counts: the number of values.
        sums: the sums of x, in units of 2^-1074.
        squares: the sums of x*x, in units of 2^-2148.
        least: the least values. Infinite without values.
        largest: the largest values. Negative and infinite without values.
    """

    counts: tuple[int, ...]
    sums: tuple[_Hexadecimal, ...]
    squares: tuple[_Hexadecimal, ...]
    least: tuple[_HexadecimalFloat, ...]
    largest: tuple[_HexadecimalFloat, ...]

    @staticmethod
    def of(dense: np.ndarray) -> DenseStatistics:
        """Compute the statistics of dense values, float64 [n, width], NaN where missing."""
        counts, sums, squares, least, largest = [], [], [], [], []
        for place in range(dense.shape[1]):
            values = dense[:, place]
            values = values[~np.isnan(values)]
            total, of_squares = exact_sums(values)
            counts.append(len(values))
            sums.append(total)
            squares.append(of_squares)
            # Adding 0.0 turns -0.0 into 0.0, so that the result does not depend on the order.
            least.append(float(values.min(initial=np.inf)) + 0.0)
            largest.append(float(values.max(initial=-np.inf)) + 0.0)
        return DenseStatistics(tuple(counts), tuple(sums), tuple(squares), tuple(least), tuple(largest))

    @staticmethod
    def empty(width: int) -> DenseStatistics:
        """Return the statistics of no samples."""
        return DenseStatistics((0,) * width, (0,) * width, (0,) * width, (math.inf,) * width, (-math.inf,) * width)

    def merge(self, other: DenseStatistics) -> DenseStatistics:
        """Return the statistics of both sets of samples together."""
        return DenseStatistics(
            tuple(map(add, self.counts, other.counts)),
            tuple(map(add, self.sums, other.sums)),
            tuple(map(add, self.squares, other.squares)),
            tuple(map(min, self.least, other.least)),
            tuple(map(max, self.largest, other.largest)),
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

    def scales(self, columns: Sequence[Dense]) -> tuple[Scale, ...]:
        """Return the scale of each column, by its transform.

        A column without values has origin 0 and unit 1.
        """
        ranges = [
            (least, largest - least) if count else (0.0, 0.0)
            for count, least, largest in zip(self.counts, self.least, self.largest, strict=True)
        ]
        moments = [(mean, deviation) for _, mean, deviation in self.moments()]
        return tuple(
            Scale(of_range[0], of_range[1] or 1.0) if column.transform == "min_max" else Scale(of_mean[0], of_mean[1] or 1.0)
            for column, of_range, of_mean in zip(columns, ranges, moments, strict=True)
        )


def transform(dense: np.ndarray, columns: Sequence[Dense], scales: Sequence[Scale] | None) -> np.ndarray:
    """Transform dense values into the model's input.

    Args:
        dense: float64 [n, width], NaN where missing.
        columns: the dense columns, in order.
        scales: for each column its scale. Needed if a column is scaled.

    Returns:
        float32 [n, width]. Missing values are 0.

    Raises:
        ValueError: a column is scaled, and there are no scales.
    """
    inputs = []
    for place, column in enumerate(columns):
        scale = Scale(0.0, 1.0)
        if column.scaled:
            if scales is None:
                raise ValueError(f"dense {column.name}: {column.transform} needs the statistics of the training data")
            scale = scales[place]
        inputs.append(transformed(dense[:, place], column.transform, scale.origin, scale.unit))
    return rows_of(inputs, len(dense), np.float32)


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
