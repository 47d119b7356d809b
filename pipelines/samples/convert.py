"""Converting columns of a source to typed values, with malformed records located and summarized."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.codec import JsonForm
from foreload.base.hashing import hash_strings
from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.cells import (
    cast_text,
    is_list,
    is_text,
    parses,
    plain,
    present_in,
    shown,
    whole_texts,
    without_missing,
)
from foreload.pipelines.samples.column_counts import COUNTS, notice_fields, notice_values
from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.features import CRITEO_COLUMNS, Dense, Feature, FeatureSpec, Label
from foreload.pipelines.samples.records import Cause, Faults, Records, RejectedRecord
from foreload.pipelines.samples.vocabulary import text_buffers

_KEY_REASONS = {
    kind: f'order_by must be {what}, as order_type or the first rows of the data say (order_type = "text" allows any value)'
    for kind, what in (("integer", "a whole number"), ("number", "a number"))
}
_CATEGORICAL_REASON = "a categorical value must be a text or a whole number"
_LARGEST = float(np.finfo(np.float32).max)
_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
"""Types that `cells.plain` reads as text."""


class Rule(NamedTuple):
    """A rule for the numbers of a column.

    Attributes:
        reason: the rule as error messages state it.
        holds: float64 [n], NaN where missing -> bool [n], whether each number keeps the rule.
    """

    reason: str
    holds: Callable[[np.ndarray], np.ndarray]


_CLICK = Rule("a label must be 0 or 1", lambda values: (values == 0) | (values == 1))
_COMPARED = Rule("a label must be a finite number", np.isfinite)
_NUMBER = Rule("a label must be a finite number within float32", lambda values: np.abs(values) <= _LARGEST)
_WEIGHT = Rule(
    "a weight must be a finite number of at least 0 within float32", lambda values: (values >= 0) & (values <= _LARGEST)
)


def required_numbers(spec: FeatureSpec) -> list[tuple[str, Rule]]:
    """Return the columns whose numbers no record may lack, each with its rule.

    The labels come first, in order, and then the weights.
    """
    return [(label.column, _rule_of(label)) for label in spec.labels] + ([(spec.weight, _WEIGHT)] if spec.weight else [])


def _rule_of(label: Label) -> Rule:
    if label.kind == "number":
        return _NUMBER
    return _CLICK if label.at_least is None else _COMPARED


def convert(
    columns: Mapping[str, pa.Array],
    spec: FeatureSpec,
    path: str,
    line_of: Callable[[np.ndarray], np.ndarray],
    scales: Sequence[Scale] = (),
) -> Records:
    """Convert the columns that the spec needs to typed values, and leave out malformed rows.

    Args:
        columns: name -> Arrow array [n], all of one length.
        path: the file, for messages.
        line_of: maps rows (int64) to lines from 1. It is called for malformed rows only.
        scales: for each dense column its scale, if the scales are known. A value is then malformed
            too if standardizing it gives a number beyond float32.

    Returns:
        The well-formed records, with the rejects among the rows.

    Raises:
        SourceError: the type of a whole column does not fit its use.
    """
    rows = len(next(iter(columns.values())))
    faults = Faults()
    written = {name: plain(column, spec.text.missing, path, name) for name, column in columns.items()}
    cells = {name: _single(column, spec) for name, column in written.items()}
    labels, weights = _labels(cells, rows, spec, path, faults)
    # Column-major, since it is filled and transformed column by column.
    dense = np.empty((len(spec.dense), rows), np.float64).T
    for place, entry in enumerate(spec.dense):
        dense[:, place] = _dense(cells[entry.column], entry, path, faults)
        if entry.transform == "standard" and scales:
            _check_standard(dense[:, place], cells[entry.column], entry, scales[place], faults)
    noticed: np.ndarray = np.zeros((len(spec.features) + 1, COUNTS), np.int64)
    categorical = tuple(
        _categorical((cells if f.pooling == "single" else written)[f.column], f, spec, path, faults, noticed[place])
        for place, f in enumerate(spec.features)
    )
    keys = None if spec.order_by is None else _keys(cells[spec.order_by], spec.order_by, spec.order_type, path, faults)
    groups = None if spec.group is None else _groups(cells[spec.group], spec, path, faults)
    if spec.group is not None and spec.rule == 2:
        notice_values(cells[spec.group], noticed[-1])
    records = Records(labels, dense, categorical, keys, weights, groups, noticed)
    if not faults:
        return records
    bad = faults.rows
    mask = np.ones(rows, bool)
    mask[bad] = False
    return replace(records.filter(mask), rejects=tuple(faults.rejected(path, line_of)), causes=faults.causes)


def _single(column: pa.Array, spec: FeatureSpec) -> pa.Array:
    """Replace by null the values of a column that rule 2 says are missing.

    Args:
        column: a column as returned by `plain`. A column of lists, or any column by rule 1, is
            returned unchanged.
    """
    if spec.rule == 1 or not spec.text.missing or is_list(column.type):
        return column
    return without_missing(column, spec.text.missing)


def _labels(
    cells: Mapping[str, pa.Array], rows: int, spec: FeatureSpec, path: str, faults: Faults
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return labels, float32 [n, labels], and weights, float32 [n]. Malformed rows have 0.

    Without a column of weights, the weights are None.
    """
    required = required_numbers(spec)
    numbers = np.zeros((rows, len(required)), np.float32)
    for place, (name, rule) in enumerate(required):
        values = _numbers(cells[name], name, rule.reason, path, faults)
        good = rule.holds(values)
        for row in np.flatnonzero(~good):
            faults.add(int(row), name, shown(cells[name], row), rule.reason)
        least = spec.labels[place].at_least if place < len(spec.labels) else None
        numbers[:, place] = np.where(good, values if least is None else values >= least, 0)
    if spec.weight is None:
        return numbers, None
    return np.ascontiguousarray(numbers[:, :-1]), np.ascontiguousarray(numbers[:, -1])


def _dense(column: pa.Array, entry: Dense, path: str, faults: Faults) -> np.ndarray:
    """Return the values of a dense column, float64 [n], NaN where missing.

    All values lie within float32, except in malformed rows.
    """
    reason = "a dense value must be a finite number within float32"
    values = _numbers(column, entry.column, reason, path, faults)
    for row in np.flatnonzero(np.abs(values) > _LARGEST):
        faults.add(int(row), entry.column, shown(column, row), reason)
    # The text "nan" parses as a number, but only the empty text and the texts that the feature file
    # lists under missing mean a missing value.
    if is_text(column.type):
        for row in np.flatnonzero(np.isnan(values) & present_in(column)):
            faults.add(int(row), entry.column, shown(column, row), reason)
    return values


def _check_standard(values: np.ndarray, column: pa.Array, entry: Dense, scale: Scale, faults: Faults) -> None:
    """Report the rows whose standardized value lies beyond float32.

    Args:
        values: float64 [n], before the transform.
        column: the same values as the source has them, for messages.
    """
    for row in np.flatnonzero(np.abs(scale.standard(values)) > _LARGEST):
        reason = f"a dense value must be finite after its transform, (x - {scale.mean:.6g}) / {scale.deviation:.6g}"
        faults.add(int(row), entry.column, shown(column, row), reason)


def _numbers(column: pa.Array, name: str, reason: str, path: str, faults: Faults) -> np.ndarray:
    """Return the numbers of a column, float64 [n]. Missing and malformed values are NaN."""
    if is_text(column.type):
        column = cast_text(column, pa.float64(), lambda row, value: faults.add(row, name, value, reason))
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif pa.types.is_decimal(column.type):
        # Convert by way of text, which gives the nearest float64. Arrow's cast from decimals does
        # not always.
        column = column.cast(pa.string())
    elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise SourceError(
            f"{path}: column {name} must hold numbers or text, not {column.type}; convert it, or name another column"
        )
    column = column.cast(pa.float64(), safe=False)
    return pc.fill_null(column, np.nan).to_numpy()


def _categorical(
    column: pa.Array, feature: Feature, spec: FeatureSpec, path: str, faults: Faults, noticed: np.ndarray
) -> pa.Array:
    """Return the values of a feature, or lists of them, as `Records` describes.

    Args:
        noticed: int64 [COUNTS], the feature's counts of unusual forms. Added to.
    """
    if feature.pooling == "single":
        if is_list(column.type):
            raise SourceError(f'{path}: column {feature.column} holds lists; give feature {feature.name} pooling "sum" or "mean"')
        if spec.rule == 2:
            notice_values(column, noticed)
        return _values(column, feature, spec, path, lambda place, value, reason: faults.add(place, feature.column, value, reason))
    if not is_list(column.type):
        if is_text(column.type):
            notice_fields(column, feature.separator, noticed)
        column = _lists(column, feature.separator)
    offsets = column.offsets.to_numpy()

    def report(place: int, value: object, reason: str) -> None:
        # `place` is a value's place among the values of all lists. Find the row whose list holds
        # it.
        faults.add(int(np.searchsorted(offsets, place, side="right")) - 1, feature.column, value, reason)

    values = _single(plain(column.flatten(), spec.text.missing, path, feature.column), spec)
    if spec.rule == 2:
        notice_values(values, noticed)
    return pa.LargeListArray.from_arrays(column.offsets, _values(values, feature, spec, path, report))


def _lists(column: pa.Array, separator: str) -> pa.Array:
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
        return _texts(column, feature.column, spec, path, report)
    if pa.types.is_null(column.type):
        return column.cast(pa.int64())
    rows = spec.tables[feature.table].rows
    if rows is None:
        raise SourceError(f"{path}: feature {feature.name}: ids need a table whose rows are known")
    whole = _whole_or_text(column, feature.column, spec, path, report)
    written = column if is_text(column.type) else whole
    return _checked_ids(whole, rows, lambda place, reason: report(place, shown(written, place), reason))


def _texts(column: pa.Array, name: str, spec: FeatureSpec, path: str, report: Callable[[int, object, str], None]) -> pa.Array:
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
            report(int(place), numbers[place], _CATEGORICAL_REASON)
        return pa.array(np.where(whole, numbers, 0).astype(np.int64), mask=~whole)
    if pa.types.is_decimal(kind):
        return _whole_texts(column, report)
    if not pa.types.is_integer(kind):
        raise SourceError(f"{path}: column {name} must hold text or whole numbers, not {kind}; convert it to one of them")
    return column


def _groups(column: pa.Array, spec: FeatureSpec, path: str, faults: Faults) -> np.ndarray:
    """Return hash64 of the text of each value, int64 [n], 0 where missing."""
    name = spec.group or ""
    if is_list(column.type):
        raise SourceError(f"{path}: column {name} holds lists; group needs a column of single values")
    texts = _texts(column, name, spec, path, lambda row, value, reason: faults.add(row, name, value, reason))
    hashes = hash_strings(*text_buffers(texts)).view(np.int64)
    return np.where(present_in(texts), hashes, 0)


def _whole_texts(column: pa.Array, report: Callable[[int, object, str], None]) -> pa.Array:
    """Return decimals as texts of whole numbers of any size, null where missing.

    A decimal with a fraction is malformed: it is reported and becomes null.
    """
    wide = column.cast(pa.decimal256(76, column.type.scale))
    truncated = wide.cast(pa.decimal256(76, 0), safe=False)
    whole = pc.equal(truncated.cast(wide.type, safe=False), wide)
    for place in np.flatnonzero(pc.invert(whole).fill_null(False).to_numpy(zero_copy_only=False)):
        report(int(place), shown(column, place), _CATEGORICAL_REASON)
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


def order_kind(kind: pa.DataType, order_type: str | None) -> str:
    """Return what the values of an order_by column of this type are: "number", "time" or "text".

    For any other type, the name of the type is returned.

    Args:
        order_type: how texts compare. If None, as text.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "time"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if any(holds(kind) for holds in _TEXTS):
        return "text" if order_type in (None, "text") else "number"
    return str(kind)


def has_order_values(column: pa.Array, spec: FeatureSpec, path: str) -> bool:
    """Return whether an order_by column has a value that is not missing.

    Args:
        column: the column as the source has it.
        path: the file, for messages.
    """
    column = plain(column, spec.text.missing, path, spec.order_by or "")
    if pa.types.is_floating(column.type):
        column = _without_nan(column.cast(pa.float64()))
    return _has_values(_single(column, spec))


def _has_values(column: pa.Array) -> bool:
    return bool(len(column.flatten()) if is_list(column.type) else present_in(column).any())


def no_order(path: str, name: str, kind: pa.DataType) -> SourceError:
    """Return the error for an order_by column of a type that cannot be ordered by."""
    if is_list(kind):
        return SourceError(f"{path}: column {name} holds lists; order_by needs a column of single values")
    return SourceError(f"{path}: column {name} must hold numbers, times or text to order by, not {kind}")


def _keys(column: pa.Array, name: str, order_type: str | None, path: str, faults: Faults) -> pa.Array:
    """Return the order_by column in one of the types that `Records` allows for keys.

    Missing and malformed values are null.
    """
    if pa.types.is_floating(column.type):
        column = _without_nan(column.cast(pa.float64()))
    # Without values the type of the column does not matter: other files may have another one.
    if not _has_values(column):
        return pa.nulls(len(column), pa.int64())
    if is_text(column.type):
        kind = {"integer": pa.int64(), "number": pa.float64()}.get(order_type or "text")
        if kind is not None:
            reason = _KEY_REASONS[order_type or ""]
            column = cast_text(column, kind, lambda row, value: faults.add(row, name, value, reason))
            return _without_nan(column) if order_type == "number" else column
        return pc.if_else(pa.array(present_in(column)), column, pa.scalar(None, column.type)).cast(pa.string())
    if order_type == "text":
        raise SourceError(
            f'{path}: column {name} is of type {column.type}; order_type = "text" needs a column of text; leave it out'
        )
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        try:
            # Files may have different units, so all times are compared in nanoseconds.
            return column.cast(pa.timestamp("ns")).cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise SourceError(f"{path}: column {name} holds times beyond the range of nanoseconds ({error})") from error
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        return column
    raise no_order(path, name, column.type)


def _without_nan(column: pa.Array) -> pa.Array:
    """Return floats with NaN as null and -0.0 as 0.0."""
    values = pc.fill_null(column, np.nan).to_numpy() + 0.0
    return pa.array(values, mask=np.isnan(values))


MOST_CAUSES = 1000
"""The number of causes that are kept. If there are more, the most frequent ones are kept."""

_SHOWN_CAUSES = 5
_SHOWN_VALUES = 5
_SHOWN_CHARACTERS = 40
# From this count on, the same text in place of a number is hardly a slip.
_OFTEN = 10
_MARKERS = frozenset(
    (
        "-",
        "--",
        "-1",
        "?",
        "\\n",
        "#n/a",
        "<na>",
        "(null)",
        "missing",
        "n/a",
        "na",
        "nan",
        "nat",
        "nil",
        "none",
        "null",
        "undefined",
        "unknown",
    )
)


CauseCount = tuple[Annotated[Cause, JsonForm(list[str], list, lambda parts: Cause(*parts))], int]
"""A cause, and how many records are malformed for it."""


@dataclass(frozen=True, slots=True)
class TaskRejects:
    """The malformed records of a task.

    Attributes:
        first: the first of them, in full.
        causes: all causes, counted.
    """

    first: list[RejectedRecord]
    causes: list[CauseCount]


@dataclass(frozen=True, slots=True)
class Rejected:
    """How many records are malformed, and why.

    Attributes:
        count: the number of malformed records.
        causes: the most frequent causes, counted.
    """

    count: int
    causes: list[CauseCount]


def add_causes(causes: Counter[Cause], more: Mapping[Cause, int]) -> None:
    """Add counts of causes to `causes`.

    If there are far more than MOST_CAUSES different ones, only the most frequent are kept.
    """
    causes.update(more)
    if len(causes) > 10 * MOST_CAUSES:
        kept = causes.most_common(MOST_CAUSES)
        causes.clear()
        causes.update(dict(kept))


def by_frequency(causes: Mapping[Cause, int]) -> list[tuple[Cause, int]]:
    """Return the causes by descending frequency, at most MOST_CAUSES."""
    return sorted(causes.items(), key=lambda item: (-item[1], item[0]))[:MOST_CAUSES]


def summed_up(causes: list[tuple[Cause, int]], rejected: int) -> str:
    """Summarize the most frequent causes in one line.

    Args:
        causes: as returned by `by_frequency`.
        rejected: the number of all malformed records.
    """
    shown = causes[:_SHOWN_CAUSES]
    parts = [f"{cause.field} {_short(cause.value)!r} {count:,} {'time' if count == 1 else 'times'}" for cause, count in shown]
    others = rejected - sum(count for _, count in shown)
    return ", ".join(parts + ([f"{others:,} others"] if others else []))


def remedy(causes: list[tuple[Cause, int]], spec: FeatureSpec) -> str | None:
    """Suggest a line of the feature file that declares frequent malformed values as missing.

    Returns None if no value looks like a sign of a missing value.
    """
    values = dict.fromkeys(cause.value for cause, count in causes if _means_missing(cause, count, spec))
    if not values:
        return None
    texts = [*spec.text.missing, *list(values)[:_SHOWN_VALUES]]
    return f"missing = {json.dumps(texts, ensure_ascii=False)} under [text] of the feature file"


def header_remedy(first: RejectedRecord, spec: FeatureSpec) -> str:
    """Return what to do if the first malformed record is a header line, or "" if it is none."""
    names = spec.text.columns
    if first.line != 1 or first.field not in names or first.value.strip() not in names:
        return ""
    line = f"; {first.file}:1 looks like a header line"
    if names == CRITEO_COLUMNS:
        return f"{line}, which files of --format criteo do not have: remove it, or give --format csv or tsv and a feature file"
    return f"{line}: leave out columns under [text] of the feature file"


def _means_missing(cause: Cause, count: int, spec: FeatureSpec) -> bool:
    """Return whether a malformed value seems to mean a missing one.

    It must be in a column whose values may be missing. It must also be a usual sign of a missing
    value, or be frequent and not a number.
    """
    ids = {feature.column for feature in spec.features if feature.encoding == "id"}
    required = {column for column, _ in required_numbers(spec)}
    if cause.field in required or cause.field not in {entry.column for entry in spec.dense} | ids | {spec.order_by}:
        return False
    text = cause.value.strip()
    often = count >= _OFTEN and len(text) <= _SHOWN_CHARACTERS and text.isprintable() and not parses(text, pa.float64())
    return text == cause.value and bool(text) and (text.lower() in _MARKERS or often)


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN_CHARACTERS else value[: _SHOWN_CHARACTERS - 3] + "..."
