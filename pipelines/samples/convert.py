"""Convert columns of a source to typed values, locate every malformed record, and sum up what was wrong."""

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
from foreload.pipelines.samples.features import Dense, Feature, FeatureSpec, Label
from foreload.pipelines.samples.records import Cause, Faults, Records, RejectedRecord
from foreload.pipelines.samples.vocabulary import text_buffers

_KEY_REASONS = {
    kind: f'order_by must be {what}, as order_type or the first rows of the data say (order_type = "text" allows any value)'
    for kind, what in (("integer", "a whole number"), ("number", "a number"))
}
_CATEGORICAL_REASON = "a categorical value must be a text or a whole number"
_LARGEST = float(np.finfo(np.float32).max)
_TEXTS = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary, pa.types.is_large_binary,
    pa.types.is_binary_view, pa.types.is_fixed_size_binary,
)  # fmt: skip
"""Types that hold texts, as `cells.plain` reads them."""


class Rule(NamedTuple):
    """What every number of a column must be. holds: float64 [n], NaN where missing -> bool [n]."""

    reason: str
    holds: Callable[[np.ndarray], np.ndarray]


_CLICK = Rule("a label must be 0 or 1", lambda values: (values == 0) | (values == 1))
_COMPARED = Rule("a label must be a finite number", np.isfinite)
_NUMBER = Rule("a label must be a finite number within float32", lambda values: np.abs(values) <= _LARGEST)
_WEIGHT = Rule(
    "a weight must be a finite number of at least 0 within float32", lambda values: (values >= 0) & (values <= _LARGEST)
)


def required_numbers(spec: FeatureSpec) -> list[tuple[str, Rule]]:
    """The columns whose numbers no record may lack, the labels' in order and then that of weights, each with its rule."""
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
    """Type the columns that the spec needs; leave malformed rows out and report them.

    columns: name -> Arrow array [n], all of one length. path: for messages. line_of: rows (int64) -> lines from 1, asked only about
    malformed rows. scales: per dense column, where they are known; a value is malformed, too, if it is infinite as these standardise it. Raises
    SourceError where a whole column has a type that its use does not allow.
    """
    rows = len(next(iter(columns.values())))
    faults = Faults()
    written = {name: plain(column, spec.text.missing, path, name) for name, column in columns.items()}
    cells = {name: _single(column, spec) for name, column in written.items()}
    labels, weights = _labels(cells, rows, spec, path, faults)
    dense = np.empty((len(spec.dense), rows), np.float64).T  # column after column, as it is filled and transformed
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
    """A column as `plain` gives it, of single values, with nulls also where rule 2 says that a value is missing."""
    if spec.rule == 1 or not spec.text.missing or is_list(column.type):
        return column
    return without_missing(column, spec.text.missing)


def _labels(
    cells: Mapping[str, pa.Array], rows: int, spec: FeatureSpec, path: str, faults: Faults
) -> tuple[np.ndarray, np.ndarray | None]:
    """Labels float32 [n, labels] and weights float32 [n], None without a column of them; 0 in the rows at fault."""
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
    """float64 [n], NaN where missing; within float32 but in the rows at fault."""
    reason = "a dense value must be a finite number within float32"
    values = _numbers(column, entry.column, reason, path, faults)
    for row in np.flatnonzero(np.abs(values) > _LARGEST):
        faults.add(int(row), entry.column, shown(column, row), reason)
    if is_text(column.type):  # "nan" parses, but only an empty text, or one that [text] missing names, is a missing value
        for row in np.flatnonzero(np.isnan(values) & present_in(column)):
            faults.add(int(row), entry.column, shown(column, row), reason)
    return values


def _check_standard(values: np.ndarray, column: pa.Array, entry: Dense, scale: Scale, faults: Faults) -> None:
    """Note the rows whose values, float64 [n], are beyond float32 behind the transform."""
    for row in np.flatnonzero(np.abs(scale.standard(values)) > _LARGEST):
        reason = f"a dense value must be finite behind its transform, (x - {scale.mean:.6g}) / {scale.deviation:.6g}"
        faults.add(int(row), entry.column, shown(column, row), reason)


def _numbers(column: pa.Array, name: str, reason: str, path: str, faults: Faults) -> np.ndarray:
    """float64 [n], NaN where missing (or at fault)."""
    if is_text(column.type):
        column = cast_text(column, pa.float64(), lambda row, value: faults.add(row, name, value, reason))
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif pa.types.is_decimal(column.type):
        column = column.cast(pa.string())  # to the nearest number, which Arrow's cast from decimals is not always
    elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise SourceError(
            f"{path}: column {name} must hold numbers or text, not {column.type}; convert it, or name another column"
        )
    column = column.cast(pa.float64(), safe=False)
    return pc.fill_null(column, np.nan).to_numpy()


def _categorical(
    column: pa.Array, feature: Feature, spec: FeatureSpec, path: str, faults: Faults, noticed: np.ndarray
) -> pa.Array:
    """The feature's values, or lists of them, as described in Records. noticed: int64 [COUNTS], what is reported of them."""
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
        # The place of a value among all lists' values -> the row whose list has it.
        faults.add(int(np.searchsorted(offsets, place, side="right")) - 1, feature.column, value, reason)

    values = _single(plain(column.flatten(), spec.text.missing, path, feature.column), spec)
    if spec.rule == 2:
        notice_values(values, noticed)
    return pa.LargeListArray.from_arrays(column.offsets, _values(values, feature, spec, path, report))


def _lists(column: pa.Array, separator: str) -> pa.Array:
    """A column of single fields as lists: texts are cut at the separator, anything else is a list of one; missing is an empty list."""
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
    """Single values as text, or for the encoding id as checked integers. report: place, value, reason of each malformed one."""
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
    """Single values as text (docs/definitions.md, Encoding), null or "" where missing. report: as _values has it."""
    if not pa.types.is_null(column.type):
        column = _whole_or_text(column, name, spec, path, report)
    return column if is_text(column.type) else column.cast(pa.string())


def _whole_or_text(
    column: pa.Array, name: str, spec: FeatureSpec, path: str, report: Callable[[int, object, str], None]
) -> pa.Array:
    """Single values as text or integers, whatever whole numbers they are."""
    kind = column.type
    if is_text(kind):
        return column if spec.rule == 1 else whole_texts(column)
    if pa.types.is_floating(kind):  # how nullable integers often reach Parquet
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
    """int64 [n]: hash64 of the values' texts, 0 where missing."""
    name = spec.group or ""
    if is_list(column.type):
        raise SourceError(f"{path}: column {name} holds lists; group needs a column of single values")
    texts = _texts(column, name, spec, path, lambda row, value, reason: faults.add(row, name, value, reason))
    hashes = hash_strings(*text_buffers(texts)).view(np.int64)
    return np.where(present_in(texts), hashes, 0)


def _whole_texts(column: pa.Array, report: Callable[[int, object, str], None]) -> pa.Array:
    """Decimals as the texts of whole numbers, of any size; null where missing, or malformed since there is a fraction."""
    wide = column.cast(pa.decimal256(76, column.type.scale))
    truncated = wide.cast(pa.decimal256(76, 0), safe=False)
    whole = pc.equal(truncated.cast(wide.type, safe=False), wide)
    for place in np.flatnonzero(pc.invert(whole).fill_null(False).to_numpy(zero_copy_only=False)):
        report(int(place), shown(column, place), _CATEGORICAL_REASON)
    return pc.if_else(whole, truncated.cast(pa.string()), None)


def _checked_ids(column: pa.Array, rows: int, report: Callable[[int, str], None]) -> pa.Array:
    """Whole numbers or their texts as integers 0 .. rows - 1, null where missing or malformed. report: place and reason of each malformed one."""
    if pa.types.is_integer(column.type):
        bounds = pc.min_max(column).as_py()
        if bounds["max"] is None or (bounds["min"] >= 0 and bounds["max"] < rows):
            return column
    reason = f"an id must be a whole number in 0 .. {rows - 1}"
    if is_text(column.type):
        column = cast_text(column, pa.int64(), lambda place, _: report(place, reason))
    elif pa.types.is_uint64(column.type):
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
    """What values of a type that order_by names are: "number", "time" or "text", or, where they are none of these, the type itself.

    order_type: how text compares.
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
    """Whether a column that order_by names, as it stands in a source, has a value that is not missing."""
    column = plain(column, spec.text.missing, path, spec.order_by or "")
    if pa.types.is_floating(column.type):
        column = _without_nan(column.cast(pa.float64()))
    return _has_values(_single(column, spec))


def _has_values(column: pa.Array) -> bool:
    return bool(len(column.flatten()) if is_list(column.type) else present_in(column).any())


def no_order(path: str, name: str, kind: pa.DataType) -> SourceError:
    """The error of a column that is to order records, and is of a type that cannot."""
    if is_list(kind):
        return SourceError(f"{path}: column {name} holds lists; order_by needs a column of single values")
    return SourceError(f"{path}: column {name} must hold numbers, times or text to order by, not {kind}")


def _keys(column: pa.Array, name: str, order_type: str | None, path: str, faults: Faults) -> pa.Array:
    """The order_by column, null where missing, of a type that keys have (Records)."""
    if pa.types.is_floating(column.type):
        column = _without_nan(column.cast(pa.float64()))
    if not _has_values(column):  # whatever its type, which other files need not share
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
            f'{path}: column {name} is of type {column.type}; order_type = "text" needs a column of text, leave it out'
        )
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        try:
            return column.cast(pa.timestamp("ns")).cast(pa.int64())  # one unit, whatever the files' units
        except pa.ArrowInvalid as error:
            raise SourceError(f"{path}: column {name} holds times beyond the range of nanoseconds ({error})") from error
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        return column
    raise no_order(path, name, column.type)


def _without_nan(column: pa.Array) -> pa.Array:
    """NaN as missing, -0.0 as 0.0."""
    values = pc.fill_null(column, np.nan).to_numpy() + 0.0
    return pa.array(values, mask=np.isnan(values))


MOST_CAUSES = 1000
"""Causes that are kept; of more, the most frequent."""

_SHOWN_CAUSES = 5
_SHOWN_VALUES = 5
_SHOWN_CHARACTERS = 40
_OFTEN = 10  # so often the same text in place of a number is hardly a slip
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
"""A cause, and how many records it has."""


@dataclass(frozen=True, slots=True)
class TaskRejects:
    """The malformed records of a task: the first, and all causes."""

    first: list[RejectedRecord]
    causes: list[CauseCount]


@dataclass(frozen=True, slots=True)
class Rejected:
    """How many records are malformed, and why."""

    count: int
    causes: list[CauseCount]


def add_causes(causes: Counter[Cause], more: Mapping[Cause, int]) -> None:
    """Count more causes; far more than MOST_CAUSES different ones are cut to the most frequent."""
    causes.update(more)
    if len(causes) > 10 * MOST_CAUSES:
        kept = causes.most_common(MOST_CAUSES)
        causes.clear()
        causes.update(dict(kept))


def by_frequency(causes: Mapping[Cause, int]) -> list[tuple[Cause, int]]:
    """The most frequent first, at most MOST_CAUSES."""
    return sorted(causes.items(), key=lambda item: (-item[1], item[0]))[:MOST_CAUSES]


def summed_up(causes: list[tuple[Cause, int]], rejected: int) -> str:
    """The most frequent causes, as by_frequency has them, on a line. rejected: malformed records in all."""
    shown = causes[:_SHOWN_CAUSES]
    parts = [f"{cause.field} {_short(cause.value)!r} {count:,} {'time' if count == 1 else 'times'}" for cause, count in shown]
    others = rejected - sum(count for _, count in shown)
    return ", ".join(parts + ([f"{others:,} others"] if others else []))


def remedy(causes: list[tuple[Cause, int]], spec: FeatureSpec) -> str | None:
    """The line of the feature file that takes for missing what seems to mean it, if anything does."""
    values = dict.fromkeys(cause.value for cause, count in causes if _means_missing(cause, count, spec))
    if not values:
        return None
    texts = [*spec.text.missing, *list(values)[:_SHOWN_VALUES]]
    return f"missing = {json.dumps(texts, ensure_ascii=False)} under [text] of the feature file"


def _means_missing(cause: Cause, count: int, spec: FeatureSpec) -> bool:
    """Whether a value stands where one may be missing, and is a usual sign of it, or frequent and no number."""
    ids = {feature.column for feature in spec.features if feature.encoding == "id"}
    required = {column for column, _ in required_numbers(spec)}
    if cause.field in required or cause.field not in {entry.column for entry in spec.dense} | ids | {spec.order_by}:
        return False
    text = cause.value.strip()
    often = count >= _OFTEN and len(text) <= _SHOWN_CHARACTERS and text.isprintable() and not parses(text, pa.float64())
    return text == cause.value and bool(text) and (text.lower() in _MARKERS or often)


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN_CHARACTERS else value[: _SHOWN_CHARACTERS - 3] + "..."
