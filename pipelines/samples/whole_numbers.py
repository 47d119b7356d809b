"""Rule 2 of encoding (docs/definitions.md): a whole number that is written as a float, as "26.0", is the text of that number, "26"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.pipelines.samples.cells import is_text
from foreload.pipelines.samples.features import whole_text
from foreload.pipelines.samples.vocabulary import text_buffers

EXPONENTS, LARGE = range(2)
"""What is counted of a feature's values: numbers with an exponent in texts, which stay as they are written; and floats from 2^53 on (of float32,
2^24), from where on several whole numbers are the same float."""

_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)([.][0-9]+)?")
_MINUS, _PLUS, _POINT, _ZERO, _NINE = (np.uint8(ord(c)) for c in "-+.09")
_E, _CAPITAL_E = np.uint8(ord("e")), np.uint8(ord("E"))
_MOST_EXPONENT_DIGITS = 3
_FIRST_LARGE = np.frombuffer(b"%d" % 2**53, np.uint8)
_WHOLE_BITS = {
    16: 11,
    32: 24,
    64: 53,
}  # by a float type's bits: from two to the power of these on, not every whole number is one of its values


def whole_texts(column: pa.Array) -> pa.Array:
    """`whole_text` of each: string or large_string [n], nulls stay. Where nothing changes, the column itself."""
    data, offsets = text_buffers(column)
    bounds = np.empty((len(column), 2), np.int64)
    if not len(column) or not _whole_parts(data, offsets, bounds):
        return column
    lengths = bounds[:, 1] - bounds[:, 0]
    ends = np.zeros(len(column) + 1, offsets.dtype)
    np.cumsum(lengths, out=ends[1:])
    kept = np.empty(ends[-1], np.uint8)
    _copy(data, bounds, ends, kept)
    valid = None if not column.null_count else pa.py_buffer(np.packbits(np.asarray(column.is_valid()), bitorder="little"))
    return pa.Array.from_buffers(column.type, len(column), [valid, pa.py_buffer(ends), pa.py_buffer(kept)])


def without_missing(column: pa.Array, missing: Sequence[str]) -> pa.Array:
    """A column, not of lists, with nulls also where the text of a value means a missing one; `cells.plain` knows those that are written so.

    A number means what a text does that says it in decimal, of a fraction to the nearest value of the column's type.
    """
    if is_text(column.type):
        wanted = pa.array(sorted({whole_text(text) for text in missing}), column.type)
        is_missing = pc.is_in(whole_texts(column), wanted)
    else:
        wanted, values = _numbers(missing, column.type), column
        if not len(wanted):
            return column
        if pa.types.is_floating(column.type):
            wanted, values = wanted.cast(pa.float64()), pc.add(column.cast(pa.float64()), 0.0)  # -0.0 becomes 0.0
        is_missing = pc.is_in(values, wanted)
    return pc.if_else(is_missing, pa.scalar(None, column.type), column)


def _numbers(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    """The numbers that texts say in decimal, as values of a type: those that it has, and of fractions the nearest."""
    wanted: list[pa.Array] = [pa.array([], kind)]
    for number in (Decimal(text) for text in texts if _DECIMAL.fullmatch(text)):
        is_whole = number == number.to_integral_value()
        try:
            if pa.types.is_floating(kind):
                value = pa.array([float(number) + 0.0]).cast(kind, safe=False)
                if is_whole and Decimal(value[0].cast(pa.float64()).as_py()) != number:
                    continue
            elif pa.types.is_integer(kind) and is_whole:
                value = pa.array([int(number)], kind)
            elif pa.types.is_decimal(kind):
                value = pa.array([number], kind)
            else:
                continue
        except (pa.ArrowInvalid, OverflowError):  # beyond the type
            continue
        wanted.append(value)
    return pa.concat_arrays(wanted)


def odd_texts(column: pa.Array) -> np.ndarray:
    """Of texts, how many are EXPONENTS and how many LARGE: int64 [2]."""
    counts = np.zeros(2, np.int64)
    _count_odd(*text_buffers(column), counts)
    return counts


def odd_floats(column: pa.Array) -> np.ndarray:
    """Of floats, the same."""
    bits = _WHOLE_BITS[column.type.bit_width]
    values = np.abs(pc.fill_null(column.cast(pa.float64()), 0).to_numpy())
    return np.array([0, np.count_nonzero(values >= 2.0**bits)], np.int64)


@nb.njit(nogil=True, cache=True)
def _whole_part(data: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """Where the text at start .. end - 1 has its `whole_text`."""
    point = end - 1
    while point > start and data[point] == _ZERO:
        point -= 1
    first = start + 1 if end > start and data[start] == _MINUS else start
    if point == end - 1 or point <= first or data[point] != _POINT:
        return start, end
    if data[first] == _ZERO:
        return (first, point) if point == first + 1 else (start, end)
    for i in range(first, point):
        if not _ZERO <= data[i] <= _NINE:
            return start, end
    return start, point


@nb.njit(nogil=True, cache=True)
def _whole_parts(data: np.ndarray, offsets: np.ndarray, bounds: np.ndarray) -> bool:
    """Fill bounds, int64 [n, 2]; whether any text changes."""
    changed = False
    for i in range(len(bounds)):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        bounds[i, 0], bounds[i, 1] = _whole_part(data, start, end)
        changed |= bounds[i, 0] != start or bounds[i, 1] != end
    return changed


@nb.njit(nogil=True, cache=True)
def _copy(data: np.ndarray, bounds: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(bounds)):
        to = offsets[i]
        for j in range(bounds[i, 1] - bounds[i, 0]):
            out[to + j] = data[bounds[i, 0] + j]


@nb.njit(nogil=True, cache=True)
def _has_exponent(data: np.ndarray, start: int, end: int) -> bool:
    """Whether a text is a number as programs write one with an exponent: 1e5, 1.5e17, 2E+05. An id such as 12e34567 is none."""
    at = end - 1
    while at > start and _ZERO <= data[at] <= _NINE:
        at -= 1
    digits = end - 1 - at
    signed = data[at] == _MINUS or data[at] == _PLUS
    if signed:
        at -= 1
    if digits == 0 or digits > _MOST_EXPONENT_DIGITS or at <= start or (data[at] != _E and data[at] != _CAPITAL_E):
        return False
    first = start + 1 if data[start] == _MINUS or data[start] == _PLUS else start
    points = 0
    for i in range(first, at):
        if data[i] == _POINT:
            points += 1
        elif not _ZERO <= data[i] <= _NINE:
            return False
    return at > first + points and (points == 1 or (points == 0 and (signed or at == first + 1)))


@nb.njit(nogil=True, cache=True)
def _count_odd(data: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> None:
    """Add to counts, int64 [2], as `odd_texts` says."""
    for i in range(len(offsets) - 1):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        if start == end:
            continue
        if _has_exponent(data, start, end):
            counts[EXPONENTS] += 1
            continue
        first, point = _whole_part(data, start, end)
        if point == end:
            continue
        if data[first] == _MINUS:
            first += 1
        large = point - first > len(_FIRST_LARGE)
        if point - first == len(_FIRST_LARGE):
            large = True
            for j in range(len(_FIRST_LARGE)):
                if data[first + j] != _FIRST_LARGE[j]:
                    large = data[first + j] > _FIRST_LARGE[j]
                    break
        counts[LARGE] += large
