"""Columns of a source as Arrow arrays, whatever their types: text and numbers in few forms, missing values as nulls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import SupportsInt

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.pipelines.errors import SourceError


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
