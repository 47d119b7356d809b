"""The columns of a source as Arrow arrays of few types, and rule 2 of encoding.

Rule 2 is about whole numbers that a source writes with a decimal point (docs/definitions.md,
Encoding).
"""

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
from foreload.pipelines.samples.features import FeatureSpec, whole_text
from foreload.pipelines.samples.vocabulary import text_buffers


def plain(column: pa.Array, missing: Sequence[str], path: str, name: str) -> pa.Array:
    """Return a column in one of the few types that the conversion knows.

    Dictionaries are decoded, string views and bytes become text, and lists become large lists.
    Texts that mean a missing value become null.

    Args:
        missing: the texts that mean a missing value.
        path: the file, for error messages.
        name: the column, for error messages.

    Raises:
        SourceError: bytes are not valid text.
    """
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
    """Parse texts as numbers. Missing values become null.

    Malformed values become null too, and are reported.

    Args:
        kind: float64 or int64.
        report: called with the place and the value of each malformed text.
    """
    texts = pc.if_else(pa.array(present_in(column)), column, pa.scalar(None, column.type))
    # Try to cast the whole column in one call, which succeeds if all texts are numbers. Arrow would
    # also accept hexadecimal integers, which docs/definitions.md does not allow, so texts with an x
    # take the slow path.
    if kind != pa.int64() or not (
        pc.any(pc.match_substring(texts, "x")).as_py() or pc.any(pc.match_substring(texts, "X")).as_py()
    ):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            pass
    # Some texts may be malformed or have spaces around them. Values repeat, so parse each distinct
    # text once.
    trimmed = pc.ascii_trim_whitespace(texts)
    distinct = pc.unique(trimmed).drop_null()
    bad = [text for text in distinct.to_pylist() if not parses(text, kind)]
    wrong = pc.is_in(trimmed, pa.array(bad, distinct.type))
    for place in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)):
        report(int(place), shown(column, place))
    return pc.if_else(wrong, pa.scalar(None, trimmed.type), trimmed).cast(kind)


def parses(text: str, kind: pa.DataType) -> bool:
    """Return whether a text without spaces around it is a number of a type.

    Args:
        kind: float64 or int64.
    """
    if kind == pa.int64() and "x" in text.lower():
        return False
    try:
        pa.array([text]).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def present_in(column: pa.Array) -> np.ndarray:
    """Return which values are neither null nor an empty text, as bool [n]."""
    valid = np.asarray(column.is_valid())
    if is_text(column.type) and len(column):
        valid &= pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False) > 0
    return valid


def shown(column: pa.Array, place: SupportsInt) -> object:
    """Return a value in the form that messages show."""
    return column[int(place)].as_py()


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type, as returned by `plain`, holds texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)([.][0-9]+)?")
_MINUS, _POINT, _ZERO, _NINE = (np.uint8(ord(c)) for c in "-.09")


def whole_texts(column: pa.Array) -> pa.Array:
    """Apply `whole_text` to each value.

    Args:
        column: string or large_string [n].

    Returns:
        The new column, with the same nulls. If no text changes, the column itself.
    """
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


def null_where_missing(column: pa.Array, spec: FeatureSpec) -> pa.Array:
    """Replace by null the values of a column that rule 2 says are missing.

    Args:
        column: a column as returned by `plain`. A column of lists, or any column by rule 1, is
            returned unchanged.
    """
    if spec.rule == 1 or not spec.text.missing or is_list(column.type):
        return column
    return without_missing(column, spec.text.missing)


def without_missing(column: pa.Array, missing: Sequence[str]) -> pa.Array:
    """Replace by null the values whose text by rule 2 is one of the missing ones.

    `cells.plain` already handles values that are written exactly as listed. A number is missing if
    a listed text in decimal notation means the same number. For a fraction, that is the nearest
    value of the column's type.

    Args:
        column: a column as returned by `plain`, not of lists.
        missing: the texts that mean a missing value.
    """
    if is_text(column.type):
        # A listed text that is no decimal number has one spelling, which `plain` has replaced.
        numbers = {text for text in map(whole_text, missing) if _DECIMAL.fullmatch(text)}
        if not numbers:
            return column
        is_missing = pc.is_in(whole_texts(column), pa.array(sorted(numbers), column.type))
    else:
        wanted, values = numbers_in(missing, column.type), column
        if not len(wanted):
            return column
        if pa.types.is_floating(column.type):
            # Adding 0.0 turns -0.0 into 0.0.
            wanted, values = wanted.cast(pa.float64()), pc.add(column.cast(pa.float64()), 0.0)
        is_missing = pc.is_in(values, wanted)
    return pc.if_else(is_missing, pa.scalar(None, column.type), column)


def numbers_in(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    """Return the numbers that texts in decimal notation mean, as values of a type.

    Numbers that the type cannot hold are left out. In a float type, a fraction becomes the nearest
    value.
    """
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
        except (pa.ArrowInvalid, OverflowError):  # The type cannot hold the number.
            continue
        wanted.append(value)
    return pa.concat_arrays(wanted)


def has_points(data: np.ndarray, offsets: np.ndarray) -> bool:
    """Return whether any text has a decimal point.

    Most columns have none, and one search over all bytes is faster than a look at each text.

    Args:
        data: uint8 [bytes].
        offsets: int32 or int64 [n + 1] into data.
    """
    return b"." in data[offsets[0] : offsets[-1]].tobytes()


@nb.njit(nogil=True, cache=True)
def whole_part(data: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """Return the start and end of the `whole_text` of the text data[start:end].

    Args:
        data: uint8 [bytes].
    """
    # Skip the zeros at the end. The text changes only if a point comes before them.
    point = end - 1
    while point > start and data[point] == _ZERO:
        point -= 1
    first = start + 1 if end > start and data[start] == _MINUS else start
    if point == end - 1 or point <= first or data[point] != _POINT:
        return start, end
    # A leading zero is a whole number only on its own: "0.0" and "-0.0" become "0", "007.0" stays.
    if data[first] == _ZERO:
        return (first, point) if point == first + 1 else (start, end)
    for i in range(first, point):
        if not is_digit(data[i]):
            return start, end
    return start, point


@nb.njit(nogil=True, cache=True)
def _whole_parts(data: np.ndarray, offsets: np.ndarray, bounds: np.ndarray) -> bool:
    """Fill bounds with the `whole_part` of each text, and return whether any text changes.

    Args:
        data: uint8 [bytes].
        offsets: int32 or int64 [n + 1] into data.
        bounds: int64 [n, 2]. If it is empty, no text is looked at.
    """
    changed = False
    for i in range(len(bounds)):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        bounds[i, 0], bounds[i, 1] = whole_part(data, start, end)
        changed |= bounds[i, 0] != start or bounds[i, 1] != end
    return changed


@nb.njit(nogil=True, cache=True)
def _copy(data: np.ndarray, bounds: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    """Copy the texts within bounds, int64 [n, 2], to out, each to its place in offsets."""
    for i in range(len(bounds)):
        to = offsets[i]
        for j in range(bounds[i, 1] - bounds[i, 0]):
            out[to + j] = data[bounds[i, 0] + j]


@nb.njit(nogil=True, cache=True)
def is_digit(character: np.uint8) -> bool:
    """Return whether a byte is one of the characters 0 to 9."""
    return bool(_ZERO <= character <= _NINE)
