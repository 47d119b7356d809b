"""Quantise weights to 8, 4, 3 or 2 bits each, uniformly between two ends per row and part.

For 4 bits and fewer, the ends move inwards to the least L2 error. These are the widths of
Check-N-Run (Eisenman et al., NSDI 2022). Check-N-Run moves one end after the other; this module
tries all pairs of ends on Check-N-Run's grid, 136 of them at once in the lanes of the processor,
and then fits the best pair to its codes by least squares. Packing is this module's own: torch's
operators write float16 scales, which overflow, do not know 3 bits and want even widths, and packing
is a small part of the time.

The scale and the bias are float32. As many of their last bits are zero as cost no accuracy to speak
of, so that they compress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb
from foreload.trainer.checkpoints.files import WIDTHS

BINS, MOST_CUT = 25, 15
"""The grid of the search: an end moves inwards in steps of a 25th of the range.

Both ends together move by 15 steps at most.
"""

# How often the ends are fitted to the codes, at most. Each time after the first gains less than a
# thousandth.
_REFINEMENTS = 3
# The factor by which the squared error may grow for shorter scales.
_ALLOWANCE = 1.004
# How many of the last bits of a scale and a bias to set to zero, in the order in which that is
# tried. A bfloat16 lacks 16 of a float32's bits.
_DROPPED = (
    20,
    18,
    16,
    14,
    12,
    10,
    8,
)
_LEAST = np.finfo(np.float32).tiny  # a smaller float32 is denormal

# All pairs of ends, as the number of steps by which the low and the high end move inwards.
_CUTS = np.array([(low, high) for low in range(MOST_CUT + 1) for high in range(MOST_CUT + 1 - low)], np.int64)


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows of weights in few bits: weight = bias + scale * code.

    Attributes:
        bits: Bits per weight.
        codes: uint8 [n, ceil(W * bits / 8)]. Weight j has the bits of its row from j * bits on, the
            lowest first.
        scale: float32 [n, parts].
        bias: float32 [n, parts].
        exact: int64 [m], ascending: the rows that codes cannot represent. Their codes mean nothing.
        weights: float32 [m, W], the weights of the exact rows.
    """

    bits: int
    codes: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    exact: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)


def packed_bytes(width: int, bits: int) -> int:
    """Return how many bytes the codes of a row of `width` weights take."""
    return -(-width * bits // 8)


def encode(weights: np.ndarray, parts: Sequence[int], bits: int) -> QuantisedRows:
    """Quantise rows.

    Rows with a NaN or an infinity are kept exactly, and so are rows whose range overflows a float32
    or leads to a denormal scale or bias. A part whose weights are all equal loses nothing at any
    number of bits.

    Args:
        weights: float32 [n, W].
        parts: The columns of each part of a row; they add up to W.
        bits: Bits per weight: 8, 4, 3 or 2.

    Raises:
        ValueError: Other bits, or weights with another number of columns.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits must be one of {WIDTHS}; got {bits}")
    if weights.shape[1] != sum(parts):
        raise ValueError(f"weights must have {sum(parts)} columns; got {weights.shape[1]}")
    count = len(weights)
    weights = np.ascontiguousarray(weights, np.float32)
    bounds = np.cumsum([0, *parts]).astype(np.int64)
    codes = np.zeros((count, packed_bytes(weights.shape[1], bits)), np.uint8)
    scale, bias = np.zeros((count, len(parts)), np.float32), np.zeros((count, len(parts)), np.float32)
    escaped = np.zeros(count, bool)
    # numba compiles a kernel once more for a read-only array.
    _encode(weights.view(), bounds, bits, *_grid(bits), codes, scale, bias, escaped)
    exact = np.flatnonzero(escaped)
    return QuantisedRows(bits, codes, scale, bias, exact, weights[exact])


def decode(rows: QuantisedRows, parts: Sequence[int]) -> np.ndarray:
    """Return the weights that quantised rows stand for: float32 [n, W]."""
    weights = np.empty((len(rows), sum(parts)), np.float32)
    bounds = np.cumsum([0, *parts]).astype(np.int64)
    _decode(rows.codes, rows.scale, rows.bias, bounds, rows.bits, weights)
    weights[rows.exact] = rows.weights
    return weights


def _grid(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the search's pairs of ends, for weights between 0 and 1.

    Returns:
        The lower end and the scale of each pair, float64 [c], and what `_try_all` computes codes
        with, float32 [2, c]: 1 / scale, and lower end / scale.
    """
    # With 8 bits the ends stay where they are: the first pair does not move them.
    cuts = _CUTS if bits <= 4 else _CUTS[:1]
    low = cuts[:, 0] / BINS
    scale = (1 - cuts.sum(axis=1) / BINS) / ((1 << bits) - 1)
    return low, scale, np.stack([1 / scale, low / scale]).astype(np.float32)


@nb.njit(nogil=True, cache=True)
def _encode(weights, bounds, bits, low, scale_of, reckoned, codes, scale, bias, escaped):  # type: ignore[no-untyped-def]
    """Quantise all rows into the zeroed arrays `codes`, `scale`, `bias` and `escaped`.

    `escaped` marks the rows to keep exactly; codes, scale and bias of such rows are 0.
    """
    most = bounds[1:] - bounds[:-1]
    unit = np.empty(most.max(), np.float32)
    best, other = np.empty(most.max(), np.uint8), np.empty(most.max(), np.uint8)
    errors = np.empty(low.size, np.float32)
    for i in range(weights.shape[0]):
        for p in range(most.size):
            row = weights[i, bounds[p] : bounds[p + 1]]
            least, greatest = row[0], row[0]
            finite = True
            for value in row:
                finite &= np.isfinite(value)
                least, greatest = min(least, value), max(greatest, value)
            spread = np.float32(greatest - least)
            if not finite or not np.isfinite(spread) or _denormal(least):
                escaped[i] = True
                break
            if spread == 0:
                # The codes stay 0. The scale takes the sign of the weight: -0.0 + -0.0 * 0 is -0.0,
                # but -0.0 + 0.0 * 0 is not.
                bias[i, p], scale[i, p] = row[0], np.copysign(np.float32(0), row[0])
                continue
            # The scale with 8 bits would be denormal; the limit is the same for fewer bits.
            if spread / np.float32(255) < _LEAST:
                escaped[i] = True
                break
            ends = _ends(row, least, spread, bits, low, scale_of, reckoned, unit, errors, best, other)
            scale[i, p], bias[i, p] = ends[:2]
            if _denormal(ends[1]) or not np.isfinite(ends[2]):
                escaped[i] = True
                break
            _pack(best, row.size, bounds[p], bits, codes[i])
        # Earlier parts of the row may have codes by now. They mean nothing, as the row is kept
        # exactly.
        if escaped[i]:
            scale[i], bias[i], codes[i] = 0, 0, 0


@nb.njit(nogil=True, cache=True)
def _denormal(value):  # type: ignore[no-untyped-def]
    return value != 0 and abs(value) < _LEAST


@nb.njit(nogil=True, cache=True)
def _ends(row, least, spread, bits, low, scale_of, reckoned, unit, errors, best, other):  # type: ignore[no-untyped-def]
    """Return scale, bias and squared error of a part of a row, and put its codes into `best`.

    For 4 bits and fewer, the error is never more than with the ends of the range. An infinite error
    means that a weight would overflow when it is decoded.
    """
    levels = np.float32((1 << bits) - 1)
    plain_scale, plain_bias = np.float32(spread / levels), least
    # Start from the ends of the range, so that a search that finds nothing better changes nothing.
    plain = _code(row, plain_scale, plain_bias, levels, best)
    scale, bias, least_error = plain_scale, plain_bias, plain
    if low.size > 1:
        # The search works in units of the range, so that no square overflows, whatever the weights.
        for j in range(row.size):
            unit[j] = (row[j] - least) / spread
        _try_all(unit[: row.size], reckoned, levels, errors)
        place, found_error = 0, np.inf
        for c in range(low.size):
            error = errors[c] * scale_of[c] * scale_of[c]
            if error < found_error:
                place, found_error = c, error
        new_scale = np.float32(scale_of[place] * np.float64(spread))
        new_bias = np.float32(least + low[place] * np.float64(spread))
        # `best` always has the codes of `scale` and `bias`. Each turn accepts the candidate only if
        # it lowers the error, and then fits the next one to its codes.
        for _ in range(_REFINEMENTS + 1):
            if not new_scale >= _LEAST:
                break
            error = _code(row, new_scale, new_bias, levels, other)
            if not error < least_error:
                break
            scale, bias, least_error = new_scale, new_bias, error
            best[: row.size] = other[: row.size]
            new_scale, new_bias = _fitted(row, best)
    # Take the shortest scale and bias whose error is within the allowance and, for 4 bits and
    # fewer, within the error of the ends of the range.
    allowed = least_error * _ALLOWANCE
    if low.size > 1:
        allowed = min(plain, allowed)
    for dropped in _DROPPED:
        new_scale, new_bias = _rounded(scale, dropped), _rounded(bias, dropped)
        if new_scale >= _LEAST and np.isfinite(new_scale) and np.isfinite(new_bias):
            error = _code(row, new_scale, new_bias, levels, other)
            if error <= allowed:
                best[: row.size] = other[: row.size]
                return new_scale, new_bias, error
    return scale, bias, least_error


@nb.njit(nogil=True, cache=True)
def _try_all(unit, reckoned, levels, errors):  # type: ignore[no-untyped-def]
    """Put the squared error of every pair of ends, in units of its scale squared, into `errors`.

    The inner loop runs over the pairs. They do not depend on each other, so it runs in vector
    lanes, and the sums have the order of the columns on any processor.
    """
    inverse, offset = reckoned[0], reckoned[1]
    zero, half = np.float32(0), np.float32(0.5)
    for c in range(errors.size):
        errors[c] = zero
    for j in range(unit.size):
        value = unit[j]
        for c in range(errors.size):
            at = value * inverse[c] - offset[c]
            inside = at if at > zero else zero
            inside = inside if inside < levels else levels
            away = at - np.float32(np.int32(inside + half))
            errors[c] += away * away


@nb.njit(nogil=True, cache=True)
def _code(row, scale, bias, levels, codes):  # type: ignore[no-untyped-def]
    """Put the codes of a part of a row into `codes`, and return the squared error after decoding.

    The error is float64.
    """
    total = 0.0
    inverse = 1 / np.float64(scale)
    for j in range(row.size):
        at = (np.float64(row[j]) - np.float64(bias)) * inverse
        code = np.float32(np.int32(min(max(at, 0.0), np.float64(levels)) + 0.5))
        # The same roundings to float32 as in `_decode`.
        away = np.float64(row[j]) - np.float64(np.float32(bias + np.float32(scale * code)))
        total += away * away
        codes[j] = np.uint8(code)
    return total


@nb.njit(nogil=True, cache=True)
def _fitted(row, codes):  # type: ignore[no-untyped-def]
    """Return the least-squares scale and bias of a part of a row for given codes.

    The scale is 0 if the codes do not determine it.
    """
    n, of_codes, of_squares, of_row, of_products = row.size, 0.0, 0.0, 0.0, 0.0
    for j in range(n):
        code, value = np.float64(codes[j]), np.float64(row[j])
        of_codes += code
        of_squares += code * code
        of_row += value
        of_products += code * value
    determinant = n * of_squares - of_codes * of_codes
    if determinant <= 0:
        return np.float32(0), np.float32(0)
    scale = (n * of_products - of_codes * of_row) / determinant
    return np.float32(scale), np.float32((of_row - scale * of_codes) / n)


@nb.njit(nogil=True, cache=True)
def _rounded(value, dropped):  # type: ignore[no-untyped-def]
    """Return the nearest float32 whose last `dropped` bits are zero."""
    word = np.empty(1, np.float32)
    word[0] = value
    bits = word.view(np.uint32)
    half, mask = np.uint32(1 << (dropped - 1)), np.uint32((1 << dropped) - 1)
    bits[0] = (bits[0] + half) & ~mask
    return word[0]


@nb.njit(nogil=True, cache=True)
def _pack(codes, count, first, bits, packed):  # type: ignore[no-untyped-def]
    """Put the codes of weights `first` and on into a row's bytes, which are zero there."""
    at = first * bits
    for j in range(count):
        byte, shift = at >> 3, at & 7
        # A code has at most 8 bits, so it lies in one byte or in two.
        word = np.uint32(codes[j]) << np.uint32(shift)
        packed[byte] |= np.uint8(word & np.uint32(255))
        if shift + bits > 8:
            packed[byte + 1] |= np.uint8(word >> np.uint32(8))
        at += bits


@nb.njit(nogil=True, cache=True)
def _decode(codes, scale, bias, bounds, bits, weights):  # type: ignore[no-untyped-def]
    """Write the weights of all rows into `weights`, each operation rounded to float32."""
    mask = np.uint32((1 << bits) - 1)
    for i in range(codes.shape[0]):
        for p in range(bounds.size - 1):
            for j in range(bounds[p], bounds[p + 1]):
                at = j * bits
                byte, shift = at >> 3, at & 7
                word = np.uint32(codes[i, byte])
                if shift + bits > 8:
                    word |= np.uint32(codes[i, byte + 1]) << np.uint32(8)
                code = np.float32((word >> np.uint32(shift)) & mask)
                weights[i, j] = bias[i, p] + np.float32(scale[i, p] * code)
