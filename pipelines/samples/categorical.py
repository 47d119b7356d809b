"""Converting columns of categorical features to typed values (docs/definitions.md, Categorical values)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.cells import (
    cast_text,
    is_list,
    is_text,
    null_where_missing,
    numbers_in,
    plain,
    present_in,
    shown,
    whole_texts,
)
from foreload.pipelines.samples.column_counts import notice_fields, notice_values
from foreload.pipelines.samples.features import Feature, FeatureSpec
from foreload.pipelines.samples.records import Faults
from foreload.pipelines.samples.times import parts_of_times

_RULE = "a categorical value must be a text or a whole number"


def categorical_values(
    column: pa.Array, feature: Feature, spec: FeatureSpec, path: str, faults: Faults, noticed: np.ndarray
) -> pa.Array:
    """Return the values of a feature, or lists of them, as `Records` describes.

    Args:
        column: as returned by `cells.plain` and, of a feature with single values,
            `cells.null_where_missing`.
        path: the file, for messages.
        faults: gets the malformed values.
        noticed: int64 [COUNTS], the feature's counts of unusual forms. Added to.

    Raises:
        SourceError: the type of the column does not fit its use.
    """
    if feature.pooling == "single":
        if is_list(column.type):
            raise SourceError(f'{path}: column {feature.column} holds lists; give feature {feature.name} pooling "sum" or "mean"')
        values, offsets = column, np.arange(len(column) + 1)
    else:
        if not is_list(column.type):
            if is_text(column.type):
                notice_fields(column, feature.separator, noticed)
            column = fields_as_lists(column, feature.separator)
        values, offsets = column.flatten(), column.offsets.to_numpy()
        values = null_where_missing(plain(values, spec.text.missing, path, feature.column), spec)

    def report(place: int, value: object, reason: str) -> None:
        # `place` is a value's place among the values of all lists. Find the row whose list holds
        # it.
        faults.add(int(np.searchsorted(offsets, place, side="right")) - 1, feature.column, value, reason)

    if spec.rule == 2:
        notice_values(values, noticed)
    if feature.part is not None:
        values = parts_of_times(values, feature.part, feature.time_unit, f"{path}: column {feature.column}", report)
    if feature.fill is not None:
        values, offsets = _without_empty(values, offsets)
    values = _values(values, feature, spec, path, report)
    if not feature.listed:
        return values
    if feature.padding or feature.max_values is not None:
        values, offsets = _kept(values, offsets, feature)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _without_empty(values: pa.Array, offsets: np.ndarray) -> tuple[pa.Array, np.ndarray]:
    """Put one missing value into each empty list.

    Args:
        values: single values.
        offsets: int64 [n + 1], where the list of each row begins, from 0.

    Returns:
        The new values and offsets.
    """
    lengths = np.diff(offsets)
    new = np.append(0, np.cumsum(np.maximum(lengths, 1)))
    places = np.full(new[-1], -1)
    places[np.repeat(lengths > 0, np.maximum(lengths, 1))] = np.arange(len(values))
    return values.take(pa.array(places, mask=places < 0)), new


def _kept(values: pa.Array, offsets: np.ndarray, feature: Feature) -> tuple[pa.Array, np.ndarray]:
    """Leave out padding, and then what is beyond `max_values`.

    Args:
        values: values in which padding is missing.
        offsets: int64 [n + 1], where the list of each row begins.

    Returns:
        The values kept, and their offsets, from 0.
    """
    kept = present_in(values) if feature.padding else np.ones(len(values), bool)
    before = np.append(0, np.cumsum(kept))[offsets]
    counts = np.diff(before)
    if feature.max_values is not None and counts.max(initial=0) > feature.max_values:
        places = np.cumsum(kept) - 1
        firsts = np.repeat(before[:-1], np.diff(offsets))
        if feature.keep == "last":
            firsts += np.repeat(np.maximum(counts - feature.max_values, 0), np.diff(offsets))
        kept &= (places >= firsts) & (places < firsts + feature.max_values)
    return values.filter(pa.array(kept)), np.append(0, np.cumsum(kept))[offsets]


def fields_as_lists(column: pa.Array, separator: str) -> pa.Array:
    """Turn a column of single fields into lists.

    Texts are cut at the separator. Any other value becomes a list of one. A missing field becomes
    an empty list.
    """
    present = present_in(column)
    if not is_text(column.type):
        offsets = np.concatenate(([0], np.cumsum(present, dtype=np.int64)))
        return pa.LargeListArray.from_arrays(pa.array(offsets), column.filter(pa.array(present)))
    cut = pc.split_pattern(column, separator)
    lengths = np.where(present, pc.fill_null(pc.list_value_length(cut), 0).to_numpy(zero_copy_only=False), 0)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return pa.LargeListArray.from_arrays(pa.array(offsets), cut.filter(pa.array(present)).flatten())


def _values(
    column: pa.Array, feature: Feature, spec: FeatureSpec, path: str, report: Callable[[int, object, str], None]
) -> pa.Array:
    """Return single values as text, or as checked integers for the encoding `id`.

    Args:
        report: called with place, value and reason of each malformed value.
    """
    if feature.encoding != "id":
        texts = _filled(texts_of(column, feature.column, spec, path, report), feature.fill)
        return _without(texts, feature.padding)
    rows = spec.tables[feature.table].rows
    if rows is None:
        raise SourceError(f"{path}: feature {feature.name}: ids need a table whose rows are known")
    if pa.types.is_null(column.type):
        column = column.cast(pa.int64())
    whole = _filled(_whole_or_text(column, feature.column, spec, path, report), feature.fill)
    written = column if is_text(column.type) else whole
    if is_text(whole.type) and feature.padding:
        whole = pc.ascii_trim_whitespace(whole)
    # Padding need not be an id of the table, such as -1. An id may be written in several ways, so
    # padding that is one is left out once more by its number.
    whole = _without(whole, feature.padding)
    ids = _checked_ids(whole, rows, lambda place, reason: report(place, shown(written, place), reason))
    return _without(ids, feature.padding)


def _filled(column: pa.Array, fill: str | None) -> pa.Array:
    """Replace missing values, texts or integers, by `fill`."""
    present = present_in(column)
    if fill is None or present.all():
        return column
    if not is_text(column.type):
        column = column.cast(pa.string())
    return pc.if_else(pa.array(present), column, pa.scalar(fill, column.type))


def _without(column: pa.Array, padding: Sequence[str]) -> pa.Array:
    """Replace padding by null.

    Args:
        column: texts, or integers.
        padding: the texts of the values to replace.
    """
    if not padding:
        return column
    wanted = pa.array(padding, column.type) if is_text(column.type) else numbers_in(padding, column.type)
    return pc.if_else(pc.is_in(column, wanted), pa.scalar(None, column.type), column)


def texts_of(column: pa.Array, name: str, spec: FeatureSpec, path: str, report: Callable[[int, object, str], None]) -> pa.Array:
    """Return single values as text (docs/definitions.md, Encoding), null or "" where missing.

    Args:
        report: as in `_values`.
    """
    if not pa.types.is_null(column.type):
        column = _whole_or_text(column, name, spec, path, report)
    return column if is_text(column.type) else column.cast(pa.string())


def _whole_or_text(
    column: pa.Array, name: str, spec: FeatureSpec, path: str, report: Callable[[int, object, str], None]
) -> pa.Array:
    """Return single values as text or integers, whatever type the column has.

    Floats and decimals that are whole numbers become integers, or texts of integers. Fractions are
    malformed.

    Args:
        report: as in `_values`.
    """
    kind = column.type
    if is_text(kind):
        return column if spec.rule == 1 else whole_texts(column)
    # Integers with missing values often reach Parquet as floats.
    if pa.types.is_floating(kind):
        numbers = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
        whole = (np.floor(numbers) == numbers) & (np.abs(numbers) < 2.0**63)
        for place in np.flatnonzero(~whole & ~np.isnan(numbers)):
            report(int(place), numbers[place], _RULE)
        return pa.array(np.where(whole, numbers, 0).astype(np.int64), mask=~whole)
    if pa.types.is_decimal(kind):
        return _whole_texts(column, report)
    if not pa.types.is_integer(kind):
        raise SourceError(f"{path}: column {name} must hold text or whole numbers, not {kind}; convert it to one of them")
    return column


def _whole_texts(column: pa.Array, report: Callable[[int, object, str], None]) -> pa.Array:
    """Return decimals as texts of whole numbers of any size, null where missing.

    A decimal with a fraction is malformed: it is reported and becomes null.
    """
    wide = column.cast(pa.decimal256(76, column.type.scale))
    truncated = wide.cast(pa.decimal256(76, 0), safe=False)
    whole = pc.equal(truncated.cast(wide.type, safe=False), wide)
    for place in np.flatnonzero(pc.invert(whole).fill_null(False).to_numpy(zero_copy_only=False)):
        report(int(place), shown(column, place), _RULE)
    return pc.if_else(whole, truncated.cast(pa.string()), None)


def _checked_ids(column: pa.Array, rows: int, report: Callable[[int, str], None]) -> pa.Array:
    """Return ids as integers in 0 .. rows - 1, null where missing or malformed.

    Args:
        column: whole numbers, or their texts.
        rows: the rows of the table.
        report: called with place and reason of each malformed value.
    """
    if pa.types.is_integer(column.type):
        bounds = pc.min_max(column).as_py()
        if bounds["max"] is None or (bounds["min"] >= 0 and bounds["max"] < rows):
            return column
    reason = f"an id must be a whole number in 0 .. {rows - 1}"
    if is_text(column.type):
        column = cast_text(column, pa.int64(), lambda place, _: report(place, reason))
    elif pa.types.is_uint64(column.type):
        # Report ids that are too large before the cast, which wraps those above 2^63 - 1 around.
        for place in np.flatnonzero(
            pc.fill_null(pc.greater(column, pa.scalar(rows - 1, pa.uint64())), False).to_numpy(zero_copy_only=False)
        ):
            report(int(place), reason)
        column = column.cast(pa.int64(), safe=False)
    else:
        column = column.cast(pa.int64())
    ids = pc.fill_null(column, 0).to_numpy()
    wrong = (ids < 0) | (ids >= rows)
    if not wrong.any():
        return column
    for place in np.flatnonzero(wrong):
        report(int(place), reason)
    return pa.array(ids, mask=wrong | np.asarray(column.is_null()))
