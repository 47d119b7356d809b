"""Columns as they stand in a source -> typed values, with every malformed record located."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, SupportsInt

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.features import Dense, Feature, FeatureSpec

MOST_REJECTS = 100
"""Malformed records of a piece that are kept with all their details; more are only counted."""

_MOST_TEXT = 80  # characters of a malformed value that are shown
_KEY_REASONS = {
    kind: f'order_by must be {what}, as order_type or the first rows of the data say (order_type = "text" allows any value)'
    for kind, what in (("integer", "a whole number"), ("number", "a number"))
}
_CATEGORICAL_REASON = "a categorical value must be a text or a whole number"
_LARGEST = float(np.finfo(np.float32).max)


class Cause(NamedTuple):
    """Why a record is malformed: the column at fault, its value as text, and the rule broken."""

    field: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A malformed record: the file, the line (or Parquet row) from 1, the column at fault, its value as text, and the rule broken."""

    file: str
    line: int
    field: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.reason}, not {self.value!r}"


@dataclass(frozen=True, slots=True)
class Records:
    """Well-formed records, not encoded yet.

    labels: float32 [n], 0 or 1. dense: float64 [n, dense width], NaN where missing. categorical: per feature an Arrow array [n] of
    values, or large lists of values where the feature is multi-valued: integers for the encoding id, else string or large_string; null
    or "" where missing. keys: an Arrow array [n] of the order_by column, null where missing: integers, decimals, float64 or string; None
    without order_by. rejects: the first of the malformed records among these, at most MOST_REJECTS; causes: of all of them, and
    how many each has.
    """

    labels: np.ndarray
    dense: np.ndarray
    categorical: tuple[pa.Array, ...]
    keys: pa.Array | None
    rejects: tuple[RejectedRecord, ...] = ()
    causes: Mapping[Cause, int] = field(default_factory=dict)

    @property
    def rejected(self) -> int:
        """How many records among these are malformed."""
        return sum(self.causes.values())

    def __len__(self) -> int:
        return len(self.labels)

    def filter(self, mask: np.ndarray) -> Records:
        """The records where mask (bool [n]) holds."""
        chosen = pa.array(mask)
        return Records(
            self.labels[mask],
            self.dense[mask],
            tuple(column.filter(chosen) for column in self.categorical),
            None if self.keys is None else self.keys.filter(chosen),
            self.rejects,
            self.causes,
        )


class Faults:
    """Malformed rows of one piece: for each the first field at fault, in the order of the checks."""

    def __init__(self) -> None:
        self._rows: dict[int, Cause] = {}

    def add(self, row: int, field: str, value: object, reason: str) -> None:
        """Note that the row's field breaks a rule: `reason` says what the value must be."""
        self._rows.setdefault(row, Cause(field, "" if value is None else str(value)[:_MOST_TEXT], reason))

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> np.ndarray:
        """The malformed rows, ascending, int64."""
        return np.array(sorted(self._rows), np.int64)

    @property
    def causes(self) -> Counter[Cause]:
        """How many malformed rows each cause has."""
        return Counter(self._rows.values())

    def rejected(self, file: str, line_of: Callable[[np.ndarray], np.ndarray]) -> list[RejectedRecord]:
        """The first malformed records, at most MOST_REJECTS, by line. line_of: rows -> lines."""
        rows = self.rows[:MOST_REJECTS]
        return [RejectedRecord(file, int(line), *self._rows[int(row)]) for row, line in zip(rows, line_of(rows), strict=True)]


def convert(
    columns: Mapping[str, pa.Array], spec: FeatureSpec, path: str, line_of: Callable[[np.ndarray], np.ndarray]
) -> Records:
    """Type the columns that the spec needs; leave malformed rows out and report them.

    columns: name -> Arrow array [n], all of one length. path: for messages. line_of: rows (int64) -> lines from 1, asked only about
    malformed rows. Raises SourceError where a whole column has a type that its use does not allow.
    """
    rows = len(next(iter(columns.values())))
    faults = Faults()
    cells = {name: _plain(column, spec.text.missing, path, name) for name, column in columns.items()}
    labels = _labels(cells[spec.label], spec, path, faults) if spec.label else np.zeros(rows, np.float32)
    dense = np.empty((len(spec.dense), rows), np.float64).T  # column after column, as it is filled and transformed
    for place, entry in enumerate(spec.dense):
        dense[:, place] = _dense(cells[entry.column], entry, path, faults)
    categorical = tuple(_categorical(cells[f.column], f, spec, path, faults) for f in spec.features)
    keys = None if spec.order_by is None else _keys(cells[spec.order_by], spec.order_by, spec.order_type, path, faults)
    if not faults:
        return Records(labels, dense, categorical, keys)
    bad = faults.rows
    mask = np.ones(rows, bool)
    mask[bad] = False
    good = Records(labels, dense, categorical, keys).filter(mask)
    return Records(good.labels, good.dense, good.categorical, good.keys, tuple(faults.rejected(path, line_of)), faults.causes)


def _plain(column: pa.Array, missing: Sequence[str], path: str, name: str) -> pa.Array:
    """The column without dictionaries, views and bytes (text instead), lists as large lists; texts that mean missing as nulls."""
    kind = column.type
    if _is_list(kind):
        values = _plain(column.flatten(), missing, path, name)
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
    if not _is_text(column.type):
        return column
    if missing:
        is_missing = pc.is_in(column, pa.array(missing, column.type))
        column = pc.if_else(is_missing, pa.scalar(None, column.type), column)
    return column


def _labels(column: pa.Array, spec: FeatureSpec, path: str, faults: Faults) -> np.ndarray:
    """float32 [n], 0 or 1 but in the rows at fault."""
    least = spec.label_at_least
    reason = "a label must be 0 or 1" if least is None else "a label must be a finite number"
    values = _numbers(column, spec.label, reason, path, faults)
    wrong = (values != 0) & (values != 1) if least is None else ~np.isfinite(values)
    for row in np.flatnonzero(wrong):
        faults.add(int(row), spec.label, _shown(column, row), reason)
    return (values if least is None else values >= least).astype(np.float32)


def _dense(column: pa.Array, entry: Dense, path: str, faults: Faults) -> np.ndarray:
    """float64 [n], NaN where missing; within float32 but in the rows at fault."""
    reason = "a dense value must be a finite number within float32"
    values = _numbers(column, entry.column, reason, path, faults)
    for row in np.flatnonzero(np.abs(values) > _LARGEST):
        faults.add(int(row), entry.column, _shown(column, row), reason)
    if _is_text(column.type):  # "nan" parses, but only an empty text, or one that [text] missing names, is a missing value
        for row in np.flatnonzero(np.isnan(values) & _present(column)):
            faults.add(int(row), entry.column, _shown(column, row), reason)
    return values


def _numbers(column: pa.Array, name: str, reason: str, path: str, faults: Faults) -> np.ndarray:
    """float64 [n], NaN where missing (or at fault)."""
    if _is_text(column.type):
        column = _cast_text(column, pa.float64(), lambda row, value: faults.add(row, name, value, reason))
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


def _categorical(column: pa.Array, feature: Feature, spec: FeatureSpec, path: str, faults: Faults) -> pa.Array:
    """The feature's values, or lists of them, as described in Records."""
    rows = spec.tables[feature.table].rows
    if feature.pooling == "single":
        if _is_list(column.type):
            raise SourceError(f'{path}: column {feature.column} holds lists; give feature {feature.name} pooling "sum" or "mean"')
        return _values(column, feature, rows, path, lambda place, value, reason: faults.add(place, feature.column, value, reason))
    if not _is_list(column.type):
        column = _lists(column, feature.separator)
    offsets = column.offsets.to_numpy()

    def report(place: int, value: object, reason: str) -> None:
        # The place of a value among all lists' values -> the row whose list has it.
        faults.add(int(np.searchsorted(offsets, place, side="right")) - 1, feature.column, value, reason)

    values = _values(_plain(column.flatten(), spec.text.missing, path, feature.column), feature, rows, path, report)
    return pa.LargeListArray.from_arrays(column.offsets, values)


def _lists(column: pa.Array, separator: str) -> pa.Array:
    """A column of single fields as lists: texts are cut at the separator, anything else is a list of one; missing is an empty list."""
    present = _present(column)
    if not _is_text(column.type):
        offsets = np.concatenate(([0], np.cumsum(present, dtype=np.int64)))
        return pa.LargeListArray.from_arrays(pa.array(offsets), column.filter(pa.array(present)))
    cut = pc.split_pattern(column, separator)
    lengths = np.where(present, pc.fill_null(pc.list_value_length(cut), 0).to_numpy(zero_copy_only=False), 0)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return pa.LargeListArray.from_arrays(pa.array(offsets), cut.filter(pa.array(present)).flatten())


def _values(
    column: pa.Array, feature: Feature, rows: int | None, path: str, report: Callable[[int, object, str], None]
) -> pa.Array:
    """Single values as text, or for the encoding id as checked integers. report: place, value, reason of each malformed one."""
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.int64() if feature.encoding == "id" else pa.string())
    if pa.types.is_floating(kind):  # how nullable integers often reach Parquet
        numbers = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
        whole = (np.floor(numbers) == numbers) & (np.abs(numbers) < 2.0**63)
        for place in np.flatnonzero(~whole & ~np.isnan(numbers)):
            report(int(place), numbers[place], _CATEGORICAL_REASON)
        column = pa.array(np.where(whole, numbers, 0).astype(np.int64), mask=~whole)
    elif pa.types.is_decimal(kind):
        column = _whole_texts(column, report)
    elif not (_is_text(kind) or pa.types.is_integer(kind)):
        raise SourceError(
            f"{path}: column {feature.column} must hold text or whole numbers, not {kind}; convert it to one of them"
        )
    if feature.encoding != "id":
        return column if _is_text(column.type) else column.cast(pa.string())
    if rows is None:
        raise SourceError(f"{path}: feature {feature.name}: ids need a table whose rows are known")
    return _checked_ids(column, rows, report)


def _whole_texts(column: pa.Array, report: Callable[[int, object, str], None]) -> pa.Array:
    """Decimals as the texts of whole numbers, of any size; null where missing, or malformed since there is a fraction."""
    wide = column.cast(pa.decimal256(76, column.type.scale))
    truncated = wide.cast(pa.decimal256(76, 0), safe=False)
    whole = pc.equal(truncated.cast(wide.type, safe=False), wide)
    for place in np.flatnonzero(pc.invert(whole).fill_null(False).to_numpy(zero_copy_only=False)):
        report(int(place), _shown(column, place), _CATEGORICAL_REASON)
    return pc.if_else(whole, truncated.cast(pa.string()), None)


def _checked_ids(column: pa.Array, rows: int, report: Callable[[int, object, str], None]) -> pa.Array:
    """Whole numbers or their texts as integers 0 .. rows - 1, null where missing or malformed."""
    if pa.types.is_integer(column.type):
        bounds = pc.min_max(column).as_py()
        if bounds["max"] is None or (bounds["min"] >= 0 and bounds["max"] < rows):
            return column
    reason = f"an id must be a whole number in 0 .. {rows - 1}"
    given = column  # as the source has it, for messages
    if _is_text(column.type):
        column = _cast_text(column, pa.int64(), lambda place, value: report(place, value, reason))
    elif pa.types.is_uint64(column.type):
        for place in np.flatnonzero(
            pc.fill_null(pc.greater(column, pa.scalar(rows - 1, pa.uint64())), False).to_numpy(zero_copy_only=False)
        ):
            report(int(place), _shown(given, place), reason)
        column = column.cast(pa.int64(), safe=False)
    else:
        column = column.cast(pa.int64())
    ids = pc.fill_null(column, 0).to_numpy()
    wrong = (ids < 0) | (ids >= rows)
    if not wrong.any():
        return column
    for place in np.flatnonzero(wrong):
        report(int(place), _shown(given, place), reason)
    return pa.array(ids, mask=wrong | np.asarray(column.is_null()))


def _keys(column: pa.Array, name: str, order_type: str | None, path: str, faults: Faults) -> pa.Array:
    """The order_by column, null where missing, of a type that keys have (Records)."""
    if _is_list(column.type):
        raise SourceError(f"{path}: column {name} holds lists; order_by needs a column of single values")
    if _is_text(column.type):
        kind = {"integer": pa.int64(), "number": pa.float64()}.get(order_type or "text")
        if kind is not None:
            reason = _KEY_REASONS[order_type or ""]
            column = _cast_text(column, kind, lambda row, value: faults.add(row, name, value, reason))
            return _without_nan(column) if order_type == "number" else column
        return pc.if_else(pa.array(_present(column)), column, pa.scalar(None, column.type)).cast(pa.string())
    if order_type == "text":
        raise SourceError(
            f'{path}: column {name} is of type {column.type}; order_type = "text" needs a column of text, leave it out'
        )
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        try:
            return column.cast(pa.timestamp("ns")).cast(pa.int64())  # one unit, whatever the files' units
        except pa.ArrowInvalid as error:
            raise SourceError(f"{path}: column {name} holds times beyond the range of nanoseconds ({error})") from error
    if pa.types.is_floating(column.type):
        return _without_nan(column.cast(pa.float64()))
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        return column
    raise SourceError(f"{path}: column {name} must hold numbers, times or text to order by, not {column.type}")


def _without_nan(column: pa.Array) -> pa.Array:
    """NaN as missing, -0.0 as 0.0."""
    values = pc.fill_null(column, np.nan).to_numpy() + 0.0
    return pa.array(values, mask=np.isnan(values))


def _cast_text(column: pa.Array, kind: pa.DataType, report: Callable[[int, object], None]) -> pa.Array:
    """Texts as numbers of a kind (float64 or int64), null where missing. Malformed ones are reported by place and null too."""
    texts = pc.if_else(pa.array(_present(column)), column, pa.scalar(None, column.type))
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
        report(int(place), _shown(column, place))
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


def _present(column: pa.Array) -> np.ndarray:
    """Bool [n]: neither null nor an empty text."""
    valid = np.asarray(column.is_valid())
    if _is_text(column.type) and len(column):
        valid &= pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False) > 0
    return valid


def _shown(column: pa.Array, place: SupportsInt) -> object:
    return column[int(place)].as_py()


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
