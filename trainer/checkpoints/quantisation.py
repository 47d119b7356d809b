"""Weights in 8, 4, 3 or 2 bits each: per row and part uniform between two ends, which for 4 bits and fewer are moved inwards to the least L2 error.

Check-N-Run's widths (Eisenman et al., NSDI 2022). Where that moves one end after the other, all pairs of ends on its grid are tried here, 136 of
them at once in the lanes of the processor, and the best is then fitted to its codes by least squares. Packing is this module's own: torch's
operators write float16 scales, which overflow, know no 3 bits and want even widths, and packing is a small part of the time.

The scale and the bias are float32. As many of their last bits as cost no accuracy to speak of are zero, so that they compress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb
from foreload.trainer.checkpoints.files import WIDTHS

"""Bits a weight can have, besides the 32 that are exact."""

BINS, MOST_CUT = 25, 15
"""The grid of the search: ends move inwards in steps of a 25th of the range, and both together by 15 of these at most."""

_REFINEMENTS = 3  # times that ends are fitted to the codes, at most; each after the first gains less than a thousandth
_ALLOWANCE = 1.004  # by which the squared error may grow for shorter scales
_DROPPED = (
    20,
    18,
    16,
    14,
    12,
    10,
    8,
)  # of a scale's and a bias's last bits, that are made zero; a bfloat16 lacks 16 of a float32
_LEAST = np.finfo(np.float32).tiny  # below it a float32 is denormal

_CUTS = np.array([(low, high) for low in range(MOST_CUT + 1) for high in range(MOST_CUT + 1 - low)], np.int64)


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows of weights in few bits. bits: of each; codes: uint8 [n, ceil(W * bits / 8)], weight j in bits j * bits and on of its row, the lowest
    first; scale, bias: float32 [n, parts], weight = bias + scale * code. exact: int64 [m] ascending, the rows that this cannot hold, whose codes
    mean nothing, and their weights: float32 [m, W].
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
    """How many bytes the codes of a row of `width` weights take."""
    return -(-width * bits // 8)


def encode(weights: np.ndarray, parts: Sequence[int], bits: int) -> QuantisedRows:
    """Quantise rows: float32 [n, W], W being the sum of parts, the columns of each part of a row. Raises ValueError for other bits or columns.

    Rows with a NaN or an infinity, and those whose range overflows a float32 or leaves a denormal scale or bias, are kept exactly. A part of
    which all weights are the same is exact, whatever the width.
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
    # An array that cannot be written to would be compiled for anew.
    _encode(weights.view(), bounds, bits, *_grid(bits), codes, scale, bias, escaped)
    exact = np.flatnonzero(escaped)
    return QuantisedRows(bits, codes, scale, bias, exact, weights[exact])


def decode(rows: QuantisedRows, parts: Sequence[int]) -> np.ndarray:
    """The weights that quantised rows stand for: float32 [n, W]."""
    weights = np.empty((len(rows), sum(parts)), np.float32)
    bounds = np.cumsum([0, *parts]).astype(np.int64)
    _decode(rows.codes, rows.scale, rows.bias, bounds, rows.bits, weights)
    weights[rows.exact] = rows.weights
    return weights


def _grid(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each pair of ends, for weights between 0 and 1: the lower end and the scale, float64, and what a code is reckoned with, float32 [2, c]."""
    cuts = _CUTS if bits <= 4 else _CUTS[:1]
    low = cuts[:, 0] / BINS
    scale = (1 - cuts.sum(axis=1) / BINS) / ((1 << bits) - 1)
    return low, scale, np.stack([1 / scale, low / scale]).astype(np.float32)


@nb.njit(nogil=True, cache=True)
def _encode(weights, bounds, bits, low, scale_of, reckoned, codes, scale, bias, escaped):  # type: ignore[no-untyped-def]
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
                # -0.0 + -0.0 * 0 is -0.0, which -0.0 + 0.0 is not.
                bias[i, p], scale[i, p] = row[0], np.copysign(np.float32(0), row[0])
                continue
            if spread / np.float32(255) < _LEAST:
                escaped[i] = True
                break
            ends = _ends(row, least, spread, bits, low, scale_of, reckoned, unit, errors, best, other)
            scale[i, p], bias[i, p] = ends[:2]
            if _denormal(ends[1]) or not np.isfinite(ends[2]):
                escaped[i] = True
                break
            _pack(best, row.size, bounds[p], bits, codes[i])
        if escaped[i]:
            scale[i], bias[i], codes[i] = 0, 0, 0


@nb.njit(nogil=True, cache=True)
def _denormal(value):  # type: ignore[no-untyped-def]
    return value != 0 and abs(value) < _LEAST


@nb.njit(nogil=True, cache=True)
def _ends(row, least, spread, bits, low, scale_of, reckoned, unit, errors, best, other):  # type: ignore[no-untyped-def]
    """The scale, the bias and the squared error of a part of a row, and its codes in `best`.

    For 4 bits and fewer the error is never more than that of the ends of the range; an infinite one is that of a weight which would overflow.
    """
    levels = np.float32((1 << bits) - 1)
    plain_scale, plain_bias = np.float32(spread / levels), least
    plain = _code(row, plain_scale, plain_bias, levels, best)
    scale, bias, least_error = plain_scale, plain_bias, plain
    if low.size > 1:
        # In units of the range, so that no square overflows, whatever the weights.
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
        for _ in range(_REFINEMENTS + 1):
            if not new_scale >= _LEAST:
                break
            error = _code(row, new_scale, new_bias, levels, other)
            if not error < least_error:
                break
            scale, bias, least_error = new_scale, new_bias, error
            best[: row.size] = other[: row.size]
            new_scale, new_bias = _fitted(row, best)
    # Shorter ones, where the error allows it, the shortest first.
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
    """The squared error of every pair of ends, in units of its scale squared. The inner loop goes over the pairs: they do not depend on each other,
    so it runs in vector lanes, with the sums in the order of the columns on any processor.
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
    """Put the codes of a part of a row into `codes`; returns the squared error of what they will be decoded to, in float64."""
    total = 0.0
    inverse = 1 / np.float64(scale)
    for j in range(row.size):
        at = (np.float64(row[j]) - np.float64(bias)) * inverse
        code = np.float32(np.int32(min(max(at, 0.0), np.float64(levels)) + 0.5))
        away = np.float64(row[j]) - np.float64(np.float32(bias + np.float32(scale * code)))
        total += away * away
        codes[j] = np.uint8(code)
    return total


@nb.njit(nogil=True, cache=True)
def _fitted(row, codes):  # type: ignore[no-untyped-def]
    """The scale and bias of least squares for a part of a row with these codes; a scale of 0 where they do not determine it."""
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
    """A float32 whose last bits are zero, the nearest such one."""
    word = np.empty(1, np.float32)
    word[0] = value
    bits = word.view(np.uint32)
    half, mask = np.uint32(1 << (dropped - 1)), np.uint32((1 << dropped) - 1)
    bits[0] = (bits[0] + half) & ~mask
    return word[0]


@nb.njit(nogil=True, cache=True)
def _pack(codes, count, first, bits, packed):  # type: ignore[no-untyped-def]
    """Put codes into a row's bytes, from weight `first` on."""
    at = first * bits
    for j in range(count):
        byte, shift = at >> 3, at & 7
        word = np.uint32(codes[j]) << np.uint32(shift)
        packed[byte] |= np.uint8(word & np.uint32(255))
        if shift + bits > 8:
            packed[byte + 1] |= np.uint8(word >> np.uint32(8))
        at += bits


@nb.njit(nogil=True, cache=True)
def _decode(codes, scale, bias, bounds, bits, weights):  # type: ignore[no-untyped-def]
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
