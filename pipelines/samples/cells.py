"""Columns of a source as Arrow arrays, whatever their types; and rule 2 of encoding, whole numbers that are written with a point."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import SupportsInt

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.compiled import nb
from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.features import whole_text
from foreload.pipelines.samples.vocabulary import text_buffers


def plain(column: pa.Array, missing: Sequence[str], path: str, name: str) -> pa.Array:
    """The column without dictionaries, views and bytes (text instead), lists as large lists; texts that mean missing as nulls."""
    kind = column.type
    if is_list(kind):
        values = plain(column.flatten(), missing, path, name)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        return pa.LargeListArray.from_arrays(pa.array(offsets), values)
    try:
        if pa.types.is_dictionary(kind):
            column = column.dictionary_decode()
            kind = column.type
        if pa.types.is_string_view(kind) or pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
            column = column.cast(pa.string())
        elif pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
            column = column.cast(pa.large_string())
    except pa.ArrowInvalid as error:
        raise SourceError(f"{path}: column {name} is of type {kind} and not valid text ({error})") from error
    if not is_text(column.type):
        return column
    if missing:
        is_missing = pc.is_in(column, pa.array(missing, column.type))
        column = pc.if_else(is_missing, pa.scalar(None, column.type), column)
    return column


def cast_text(column: pa.Array, kind: pa.DataType, report: Callable[[int, object], None]) -> pa.Array:
    """Texts as numbers of a kind (float64 or int64), null where missing. Malformed ones are reported by place and null too."""
    texts = pc.if_else(pa.array(present_in(column)), column, pa.scalar(None, column.type))
    # At once, where all are numbers. Arrow would read hexadecimal integers too, which no definition here knows.
    if kind != pa.int64() or not (
        pc.any(pc.match_substring(texts, "x")).as_py() or pc.any(pc.match_substring(texts, "X")).as_py()
    ):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            pass
    trimmed = pc.ascii_trim_whitespace(texts)
    distinct = pc.unique(trimmed).drop_null()
    bad = [text for text in distinct.to_pylist() if not parses(text, kind)]
    wrong = pc.is_in(trimmed, pa.array(bad, distinct.type))
    for place in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)):
        report(int(place), shown(column, place))
    return pc.if_else(wrong, pa.scalar(None, trimmed.type), trimmed).cast(kind)


def parses(text: str, kind: pa.DataType) -> bool:
    """Whether a text, without spaces around it, is a number of a kind: float64 or int64."""
    if kind == pa.int64() and "x" in text.lower():
        return False
    try:
        pa.array([text]).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def present_in(column: pa.Array) -> np.ndarray:
    """Bool [n]: neither null nor an empty text."""
    valid = np.asarray(column.is_valid())
    if is_text(column.type) and len(column):
        valid &= pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False) > 0
    return valid


def shown(column: pa.Array, place: SupportsInt) -> object:
    """A value as a message shows it."""
    return column[int(place)].as_py()


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type, as `plain` gives it, holds texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether it holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)([.][0-9]+)?")
_MINUS, _POINT, _ZERO, _NINE = (np.uint8(ord(c)) for c in "-.09")


def whole_texts(column: pa.Array) -> pa.Array:
    """`whole_text` of each: string or large_string [n], nulls stay. Where nothing changes, the column itself."""
    data, offsets = text_buffers(column)
    bounds = np.empty((len(column) if has_points(data, offsets) else 0, 2), np.int64)
    if not _whole_parts(data, offsets, bounds):
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
        numbers = {
            text for text in map(whole_text, missing) if _DECIMAL.fullmatch(text)
        }  # of others, all are known that mean them
        if not numbers:
            return column
        is_missing = pc.is_in(whole_texts(column), pa.array(sorted(numbers), column.type))
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


def has_points(data: np.ndarray, offsets: np.ndarray) -> bool:
    """Whether any text has a point; most columns have none, and a search shows that faster than looking at each."""
    return b"." in data[offsets[0] : offsets[-1]].tobytes()


@nb.njit(nogil=True, cache=True)
def whole_part(data: np.ndarray, start: int, end: int) -> tuple[int, int]:
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
        if not is_digit(data[i]):
            return start, end
    return start, point


@nb.njit(nogil=True, cache=True)
def _whole_parts(data: np.ndarray, offsets: np.ndarray, bounds: np.ndarray) -> bool:
    """Fill bounds, int64 [n, 2]; whether any text changes."""
    changed = False
    for i in range(len(bounds)):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        bounds[i, 0], bounds[i, 1] = whole_part(data, start, end)
        changed |= bounds[i, 0] != start or bounds[i, 1] != end
    return changed


@nb.njit(nogil=True, cache=True)
def _copy(data: np.ndarray, bounds: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(bounds)):
        to = offsets[i]
        for j in range(bounds[i, 1] - bounds[i, 0]):
            out[to + j] = data[bounds[i, 0] + j]


@nb.njit(nogil=True, cache=True)
def is_digit(character: np.uint8) -> bool:
    """Whether a byte is one of 0 to 9."""
    return bool(_ZERO <= character <= _NINE)
