"""Converting columns of a source to typed values, with malformed records located and summarized."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.codec import JsonForm
from foreload.base.hashing import hash_strings
from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.categorical import categorical_values, fields_as_lists, texts_of
from foreload.pipelines.samples.cells import (
    cast_text,
    is_list,
    is_text,
    null_where_missing,
    parses,
    plain,
    present_in,
    shown,
)
from foreload.pipelines.samples.column_counts import COUNTS, notice_values
from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.features import CRITEO_COLUMNS, Dense, Element, FeatureSpec, Label
from foreload.pipelines.samples.records import Cause, Faults, Records, RejectedRecord
from foreload.pipelines.samples.times import parts_of_times
from foreload.pipelines.samples.transforms import transformed
from foreload.pipelines.samples.vocabulary import text_buffers

_KEY_REASONS = {
    kind: f'order_by must be {what}, as order_type or the first rows of the data say (order_type = "text" allows any value)'
    for kind, what in (("integer", "a whole number"), ("number", "a number"))
}
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


_CLICK = Rule("a label must be 0 or 1, or throughout -1 or 1", lambda values: (values == 0) | (np.abs(values) == 1))
_CLICK_FROM_0 = Rule("a label must be 0 or 1", lambda values: (values == 0) | (values == 1))
_CLICK_FROM_MINUS_1 = Rule("a label must be -1 or 1", lambda values: np.abs(values) == 1)
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
    if label.negative is not None:
        return _CLICK_FROM_0 if label.negative == 0 else _CLICK_FROM_MINUS_1
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
            too if scaling it gives a number beyond float32.

    Returns:
        The well-formed records, with the rejects among the rows.

    Raises:
        SourceError: the type of a whole column does not fit its use.
    """
    rows = len(next(iter(columns.values())))
    faults = Faults()
    written = {name: plain(column, spec.text.missing, path, name) for name, column in columns.items()}
    cells = {name: null_where_missing(column, spec) for name, column in written.items()}
    labels, weights = _labels(cells, rows, spec, path, faults)
    dense = _dense_columns(written, cells, rows, spec, path, faults)
    for place, entry in enumerate(spec.dense):
        if entry.scaled and scales:
            _check_scaled(dense[:, place], cells[entry.column], entry, scales[place], faults)
    noticed: np.ndarray = np.zeros((len(spec.features) + 1, COUNTS), np.int64)
    categorical = tuple(
        categorical_values((cells if f.pooling == "single" else written)[f.column], f, spec, path, faults, noticed[place])
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


def _labels(
    cells: Mapping[str, pa.Array], rows: int, spec: FeatureSpec, path: str, faults: Faults
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return labels, float32 [n, labels], and weights, float32 [n]. Malformed rows have 0.

    Without a column of weights, the weights are None.
    """
    required = required_numbers(spec)
    numbers = np.zeros((rows, len(required)), np.float32)
    for place, (name, rule) in enumerate(required):
        values = _numbers(cells[name], name, path, partial(_add_fault, faults, name, rule.reason))
        good = rule.holds(values)
        for row in np.flatnonzero(~good):
            faults.add(int(row), name, shown(cells[name], row), rule.reason)
        least = spec.labels[place].at_least if place < len(spec.labels) else None
        numbers[:, place] = np.where(good, values if least is None else values >= least, 0)
    if spec.weight is None:
        return numbers, None
    return np.ascontiguousarray(numbers[:, :-1]), np.ascontiguousarray(numbers[:, -1])


def _dense_columns(
    written: Mapping[str, pa.Array], cells: Mapping[str, pa.Array], rows: int, spec: FeatureSpec, path: str, faults: Faults
) -> np.ndarray:
    """Return the dense values, float64 [rows, dense width], NaN where missing, with `fill` filled in.

    All values lie within float32, except in malformed rows.

    Args:
        written: the columns, as returned by `plain`.
        cells: the same, with null where rule 2 says that a value is missing.
    """
    # Column-major, since it is filled and transformed column by column.
    dense = np.empty((len(spec.dense), rows), np.float64).T
    of_vectors: dict[tuple[str, int, str], np.ndarray] = {}
    for place, entry in enumerate(spec.dense):
        element = entry.element
        if element is None:
            values = _dense(cells[entry.column], entry, path, faults)
        else:
            key = entry.column, element.size, element.separator
            if key not in of_vectors:
                of_vectors[key] = _elements(written[entry.column], entry.column, element, spec, path, faults)
            values = of_vectors[key][:, element.place]
        dense[:, place] = values if entry.fill is None else np.where(np.isnan(values), entry.fill, values)
    return dense


def _dense(column: pa.Array, entry: Dense, path: str, faults: Faults) -> np.ndarray:
    """Return the values of a dense column, float64 [n], NaN where missing."""
    name = entry.column
    if is_list(column.type):
        raise SourceError(f"{path}: column {name} holds lists; give dense {entry.name} size, how many numbers each list has")

    def report(row: int, value: object, reason: str) -> None:
        faults.add(row, name, value, reason)

    if entry.part is not None:
        column = parts_of_times(column, entry.part, entry.time_unit, f"{path}: column {name}", report)
    return _finite_numbers(column, name, path, report)


def _elements(column: pa.Array, name: str, element: Element, spec: FeatureSpec, path: str, faults: Faults) -> np.ndarray:
    """Return the numbers of a column of vectors, float64 [n, element.size].

    They are NaN where missing, and in rows whose vectors are malformed.
    """
    lists = column if is_list(column.type) else fields_as_lists(column, element.separator)
    offsets = lists.offsets.to_numpy() - lists.offsets[0].as_py()
    lengths = np.diff(offsets)
    for row in np.flatnonzero((lengths != element.size) & (lengths > 0)):
        reason = f"a vector must have {element.size} numbers, as size says, and has {lengths[row]}"
        faults.add(int(row), name, shown(column, row), reason)

    def report(place: int, value: object, reason: str) -> None:
        faults.add(int(np.searchsorted(offsets, place, side="right")) - 1, name, value, reason)

    flat = null_where_missing(plain(lists.flatten(), spec.text.missing, path, name), spec)
    numbers = _finite_numbers(flat, name, path, report)
    whole = lengths == element.size
    values = np.full((len(column), element.size), np.nan)
    values[whole] = numbers[np.repeat(whole, lengths)].reshape(-1, element.size)
    return values


def _finite_numbers(column: pa.Array, name: str, path: str, report: Callable[[int, object, str], None]) -> np.ndarray:
    """Return the numbers of a column, float64 [n], NaN where missing. Malformed ones are reported."""
    reason = "a dense value must be a finite number within float32"
    values = _numbers(column, name, path, lambda place, value: report(place, value, reason))
    for place in np.flatnonzero(np.abs(values) > _LARGEST):
        report(int(place), shown(column, place), reason)
    # The text "nan" parses as a number, but only the empty text and the texts that the feature file
    # lists under missing mean a missing value.
    if is_text(column.type):
        for place in np.flatnonzero(np.isnan(values) & present_in(column)):
            report(int(place), shown(column, place), reason)
    return values


def _check_scaled(values: np.ndarray, column: pa.Array, entry: Dense, scale: Scale, faults: Faults) -> None:
    """Report the rows whose scaled value lies beyond float32.

    Args:
        values: float64 [n], before the transform.
        column: the same values as the source has them, for messages.
    """
    with np.errstate(over="ignore"):
        scaled = np.abs(transformed(values, entry.transform, scale.origin, scale.unit))
    for row in np.flatnonzero(scaled > _LARGEST):
        reason = f"a dense value must be finite after its transform, (x - {scale.origin:.6g}) / {scale.unit:.6g}"
        faults.add(int(row), entry.column, shown(column, row), reason)


def _add_fault(faults: Faults, name: str, reason: str, row: int, value: object) -> None:
    faults.add(row, name, value, reason)


def _numbers(column: pa.Array, name: str, path: str, report: Callable[[int, object], None]) -> np.ndarray:
    """Return the numbers of a column, float64 [n]. Missing and malformed values are NaN.

    Args:
        report: called with place and value of each malformed text.
    """
    if is_text(column.type):
        column = cast_text(column, pa.float64(), report)
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


def _groups(column: pa.Array, spec: FeatureSpec, path: str, faults: Faults) -> np.ndarray:
    """Return hash64 of the text of each value, int64 [n], 0 where missing."""
    name = spec.group or ""
    if is_list(column.type):
        raise SourceError(f"{path}: column {name} holds lists; group needs a column of single values")
    texts = texts_of(column, name, spec, path, lambda row, value, reason: faults.add(row, name, value, reason))
    hashes = hash_strings(*text_buffers(texts)).view(np.int64)
    return np.where(present_in(texts), hashes, 0)


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
    return _has_values(null_where_missing(column, spec))


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
