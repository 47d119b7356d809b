"""What a sample consists of: labels, dense values, categorical features and their tables.

A `FeatureSpec` checks its own rules. `feature_file` reads one from a feature file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, Literal

from foreload.base.codec import Count, JsonForm, LeftOut, Natural, of_json, to_stored
from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.initial_values import InitialValues
from foreload.pipelines.samples.transforms import PARTS, TIME_UNITS

ENCODINGS = ("hash", "vocabulary", "id")
POOLINGS = ("single", "sum", "mean")
TRANSFORMS = ("log", "standard", "min_max", "none")
LABEL_KINDS = ("click", "number")
ORDER_TYPES = ("text", "integer", "number")
KEPT_VALUES = ("first", "last")
ENCODING_FOLDER = "encoding"  # in a schedule: vocabularies and scales

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
CRITEO_COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""The rows of the 26 tables of Criteo's Kaggle data set."""

_WHOLE = re.compile(r"(-?)(0|[1-9][0-9]*)[.]0+")
_LARGEST = 3.4028234663852886e38  # of float32
_MAX_TABLES = 1 << 15  # a store's field holds the table in 15 bits
_MAX_ROWS = (1 << 63) - 1
# Lines that a value may span by default. The limit keeps an unclosed quote from swallowing the rest
# of the file, or everything up to a quote far away.
_MOST_LINES = 1000


@dataclass(frozen=True, slots=True)
class Table:
    """One embedding table. Its ids are 0 .. rows - 1.

    Attributes:
        rows: None for a table with a vocabulary whose values are not counted yet.
        dimension: the columns of a row. If None, the job's --dim.
        initial: how rows begin, as `InitialValues` is written. If None, by the job's --row-initial.
    """

    name: str
    rows: Natural | None
    dimension: Natural | None = None
    initial: LeftOut[str | None] = None


@dataclass(frozen=True, slots=True)
class Feature:
    """One categorical feature: a column whose values are encoded as ids of a table.

    Attributes:
        table: the place of the table in the spec's tables.
        min_count: a vocabulary drops values with fewer occurrences.
        separator: separates several values in text.
        padding: texts of values that are left out, by rule 2. If there are any, missing values are
            left out too, and a sample may have no value.
        max_values: how many values of a sample are used. If None, all.
        keep: which of them, the first or the last.
        fill: the text that a missing value is encoded as. If None, it has an id of its own.
        part: the part of a time that is encoded. If None, the column does not hold times.
        time_unit: the unit of times that are numbers. If None, times are not numbers.
    """

    name: str
    table: Count
    column: str
    encoding: Literal["hash", "vocabulary", "id"]
    pooling: Literal["single", "sum", "mean"] = "single"
    min_count: Natural = 1
    separator: str = "|"
    padding: LeftOut[tuple[str, ...]] = ()
    max_values: LeftOut[Natural | None] = None
    keep: LeftOut[Literal["first", "last"]] = "first"
    fill: LeftOut[str | None] = None
    part: LeftOut[Literal["hour", "weekday"] | None] = None
    time_unit: LeftOut[Literal["s", "ms", "us", "ns"] | None] = None

    @property
    def listed(self) -> bool:
        """Whether a sample may have several values of the feature, or none."""
        return self.pooling != "single" or bool(self.padding)

    def encoding_entries(self) -> dict[str, Any]:
        """Return how values become ids, as exports describe it.

        Entries for several values are left out if a sample has one, and others if they have their
        defaults.
        """
        entries: dict[str, Any] = to_stored(self)
        for name in ("min_count", *(("separator",) if self.pooling == "single" else ())):
            del entries[name]
        return entries


@dataclass(frozen=True, slots=True)
class Element:
    """One number of a column of vectors.

    Attributes:
        place: its place in the vector, from 0.
        size: how many numbers every vector has.
        separator: separates them in text.
    """

    place: Count
    size: Natural
    separator: str = "|"


@dataclass(frozen=True, slots=True)
class Dense:
    """One dense value: a column, or an element of one, and the transform applied to it.

    Attributes:
        fill: the number that a missing value is, before the transform. If None, a missing value is
            0 after it.
        part: the part of a time that is the value. If None, the column does not hold times.
        time_unit: the unit of times that are numbers. If None, times are not numbers.
        element: which number of a vector is the value. If None, the column holds numbers.
    """

    name: str
    column: str
    transform: Literal["log", "standard", "min_max", "none"]
    fill: LeftOut[float | None] = None
    part: LeftOut[Literal["hour", "weekday"] | None] = None
    time_unit: LeftOut[Literal["s", "ms", "us", "ns"] | None] = None
    element: LeftOut[Element | None] = None

    @property
    def scaled(self) -> bool:
        """Whether the transform depends on the training data."""
        return self.transform in ("standard", "min_max")

    @property
    def numeric(self) -> bool:
        """Whether the column itself holds the numbers."""
        return self.part is None and self.element is None


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a sample: a column and the kind of target in it.

    Attributes:
        kind: "click" is 0 or 1. "number" is any finite float32.
        at_least: a click is 1 if the column's number is at least this, else 0. If None, the column
            holds 0 and 1, or -1 and 1.
        negative: which number means no click, 0 or -1. If None, it is whichever the data has.
    """

    name: str
    column: str
    kind: Literal["click", "number"] = "click"
    at_least: int | float | None = None
    negative: LeftOut[Literal[0, -1] | None] = None

    @property
    def plain(self) -> bool:
        """Whether the line `label = "column"`, perhaps with label_at_least, declares it."""
        return self.name == self.column and self.kind == "click" and self.negative is None


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How text files are cut into fields.

    Attributes:
        delimiter: one character. If None, a tab in files named .tsv or .tab (before a gzip or zstd
            suffix), else a comma.
        columns: the column names, if files have no header line. Empty if they have one.
        quoting: whether fields may be in double quotes.
        missing: texts that mean a missing value. The empty text always does.
        newlines_in_values: whether quoted fields may hold line breaks. One worker then reads the
            whole file. A number limits the lines that a field may span.
    """

    delimiter: str | None = None
    columns: tuple[str, ...] = ()
    quoting: bool = True
    missing: tuple[str, ...] = ()
    newlines_in_values: bool | int = False

    @property
    def most_lines(self) -> int:
        """The number of lines that a value may span, or 0 if values hold no line breaks."""
        return _MOST_LINES if self.newlines_in_values is True else int(self.newlines_in_values)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The columns of a source and how they become samples.

    See docs/definitions.md, Encoding and Order.

    Attributes:
        labels: empty if a source is read for its features alone.
        order_by: the column of the global order, or None.
        order_type: how that column compares. If None, Parquet compares by the column's type, and
            text files compare as numbers if the first rows hold numbers, else by bytes.
        text: how text files are cut into fields.
        weight: the column of sample weights, or None.
        group: the column whose values group samples in evaluation, or None.
        rule: the rule of encoding. Feature files use 2. Criteo's and synthetic columns, and
            schedules that earlier versions prepared, use 1.
    """

    labels: tuple[Label, ...]
    dense: tuple[Dense, ...]
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]
    order_by: str | None = None
    order_type: Literal["text", "integer", "number"] | None = None
    text: TextFormat = field(default_factory=TextFormat)
    weight: str | None = None
    group: str | None = None
    rule: LeftOut[Literal[1, 2]] = 1

    def __post_init__(self) -> None:
        _check(self)

    @property
    def multi_valued(self) -> bool:
        """Whether a feature may have several values a sample, or none. Samples then carry offsets."""
        return any(feature.listed for feature in self.features)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a source must have, each once.

        In order: labels, weight, dense, features, group, order_by.
        """
        names = [label.column for label in self.labels], [self.weight], [d.column for d in self.dense]
        more = [f.column for f in self.features], [self.group, self.order_by]
        return tuple(dict.fromkeys(name for name in chain(*names, *more) if name is not None))

    @property
    def table_rows(self) -> tuple[int, ...]:
        """The rows of every table.

        Raises:
            FeatureError: a vocabulary is not counted yet.
        """
        rows = []
        for table in self.tables:
            if table.rows is None:
                raise FeatureError(
                    f"table {table.name}: its rows are known once its vocabulary is counted; prepare the data first"
                )
            rows.append(table.rows)
        return tuple(rows)

    @property
    def vocabulary_tables(self) -> tuple[int, ...]:
        """The places of the tables whose ids come from a vocabulary."""
        return tuple(sorted({f.table for f in self.features if f.encoding == "vocabulary"}))

    def text_of(self, written: str) -> str | None:
        """Return the text by which a categorical value is encoded, by the spec's rule.

        Returns None if the value is missing.

        Args:
            written: a single value as a text file has it.
        """
        if written in ("", *self.text.missing):
            return None
        if self.rule == 1:
            return written
        text = whole_text(written)
        return None if text in map(whole_text, self.text.missing) else text

    def most_rows(self, samples: int | None = None) -> int | None:
        """Return an upper bound on the distinct rows that a training may use.

        For each table it is the rows of the table or, if the samples have been counted, their
        lookups, whichever is less. Lookups count only if all features of the table are
        single-valued.

        Args:
            samples: the number of samples, if known.

        Returns:
            None if nothing that is known bounds a table.
        """
        total = 0
        for number, table in enumerate(self.tables):
            bounds = [] if table.rows is None else [table.rows]
            users = [feature for feature in self.features if feature.table == number]
            if samples is not None and all(feature.pooling == "single" for feature in users):
                bounds.append(samples * len(users))
            if not bounds:
                return None
            total += min(bounds)
        return total

    def unlabelled(self) -> FeatureSpec:
        """Return the spec for sources read for their features alone, in row order."""
        return replace(self, labels=(), weight=None, group=None, order_by=None, order_type=None)

    def min_count(self, table: int) -> int:
        """Return the occurrences that a value needs to enter the vocabulary of a table."""
        return next(f.min_count for f in self.features if f.table == table)

    def with_vocabulary(self, sizes: Mapping[int, int]) -> FeatureSpec:
        """Return the spec with the rows of its vocabulary tables filled in.

        Args:
            sizes: place of the table -> values kept. The table gets 2 rows more.
        """
        tables = [replace(t, rows=2 + sizes[k]) if k in sizes else t for k, t in enumerate(self.tables)]
        return replace(self, tables=tuple(tables))

    @staticmethod
    def criteo(rows: int | Sequence[int] | None = None, dimension: int | None = None) -> FeatureSpec:
        """Return the spec of Criteo's columns, with hashed ids.

        Args:
            rows: the rows of all tables, or of each of the 26. If None, the sizes of the Kaggle
                tables.
            dimension: the columns of a row. If None, the job's --dim.
        """
        return _criteo_columns(rows, dimension, "hash", "log")

    @staticmethod
    def synthetic(rows: int | Sequence[int] | None = None, dimension: int | None = None) -> FeatureSpec:
        """Return the spec of the synthetic generator's columns. Ids and dense values are unchanged.

        Args:
            rows: as in `criteo`.
            dimension: as in `criteo`.
        """
        return _criteo_columns(rows, dimension, "id", "none")


def whole_text(text: str) -> str:
    """Return the text of a value by rule 2 of encoding.

    If a whole number is written as a float, that is the part before the point, with "-0" as "0".
    Any other text stays as it is.
    """
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        return text
    return "0" if whole[2] == "0" else whole[1] + whole[2]


def _check(spec: FeatureSpec) -> None:
    """Check the rules of a spec.

    Raises:
        FeatureError: on the first rule that the spec breaks.
    """
    if not spec.features and not spec.dense:
        raise FeatureError("feature: at least one column to learn from is needed; add a [[feature]] or a [[dense]]")
    if len(spec.tables) > _MAX_TABLES:
        raise FeatureError(f"table: at most {_MAX_TABLES} are possible, not {len(spec.tables)}; let features share tables")
    _check_text(spec.text)
    _check_names("label", (label.name for label in spec.labels))
    for label in spec.labels:
        _check_label(label)
    if spec.order_type is not None:
        _one_of("the feature file", "order_type", spec.order_type, ORDER_TYPES)
        if spec.order_by is None:
            raise FeatureError(f"order_type: is only for use with order_by; without order_by leave out {spec.order_type!r}")
    _check_names("feature", (f.name for f in spec.features))
    _check_names("dense", (d.name for d in spec.dense))
    _check_names("table", (t.name for t in spec.tables))
    for d in spec.dense:
        _check_dense(d)
    for f in spec.features:
        _check_feature(f, spec)
    for place, table in enumerate(spec.tables):
        _check_table(table, [f for f in spec.features if f.table == place])


def features_stored(spec: FeatureSpec) -> dict[str, Any]:
    """Return the form in which a manifest stores a spec.

    A single plain label is stored as earlier versions stored it. They can then read every schedule
    that uses only what they know.
    """
    stored: dict[str, Any] = to_stored(spec)
    first = spec.labels[0] if spec.labels else None
    if len(spec.labels) > 1 or not (first is None or first.plain) or (spec.weight, spec.group) != (None, None):
        return stored
    for name in ("labels", "weight", "group"):
        del stored[name]
    at_least = {} if first is None or first.at_least is None else {"label_at_least": first.at_least}
    return stored | {"label": "" if first is None else first.column} | at_least


def features_of(stored: dict[str, Any]) -> FeatureSpec:
    """Read a spec that `features_stored` wrote.

    Raises:
        FormError: the stored form is invalid.
    """
    fields = dict(stored)
    if "label" in fields:
        name, at_least = fields.pop("label"), fields.pop("label_at_least", None)
        fields["labels"] = [] if name == "" else [{"name": name, "column": name, "at_least": at_least}]
    return of_json(fields, FeatureSpec)


StoredFeatures = Annotated[FeatureSpec, JsonForm(dict[str, Any], features_stored, features_of)]


def _check_label(label: Label) -> None:
    where, least = f"label {label.name}", label.at_least
    _one_of(where, "kind", label.kind, LABEL_KINDS)
    if label.negative is not None:
        if label.negative not in (0, -1) or isinstance(label.negative, bool):
            raise FeatureError(f"{where}: negative must be 0 or -1, the number that means no click, not {label.negative!r}")
        if label.kind == "number" or least is not None:
            raise FeatureError(f"{where}: negative is for clicks that are written as two numbers, without at_least; leave it out")
    if least is None:
        return
    if label.kind == "number":
        raise FeatureError(
            f'{where}: at_least turns a number into a click, so a label of kind "number" cannot have it; leave out one of them'
        )
    if isinstance(least, bool) or not isinstance(least, int | float) or not math.isfinite(least):
        raise FeatureError(f"{where}: at_least must be a finite number, not {least!r}; leave it out if labels are 0 and 1")


def _check_text(text: TextFormat) -> None:
    if text.delimiter is not None and not (isinstance(text.delimiter, str) and len(text.delimiter.encode()) == 1):
        raise FeatureError(f"[text]: delimiter must be one ASCII character, not {text.delimiter!r}")
    if text.delimiter in ("\n", "\r", '"'):
        raise FeatureError(f"[text]: delimiter cannot be a line break or a quote, it is {text.delimiter!r}")
    if not isinstance(text.quoting, bool):
        raise FeatureError(f"[text]: quoting must be true or false, not {text.quoting!r}")
    if not isinstance(text.newlines_in_values, int) or text.newlines_in_values < 0:
        raise FeatureError(
            "[text]: newlines_in_values must be true, false, or the number of lines that a value may span, not "
            f"{text.newlines_in_values!r}"
        )
    if text.newlines_in_values and not text.quoting:
        raise FeatureError("[text]: newlines_in_values needs quoting = true, since only a quoted value can hold a line break")


def _check_names(kind: str, names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if not name:
            raise FeatureError(f"{kind}: name must not be empty")
        if kind == "feature" and "." in name:
            raise FeatureError(f'feature {name}: name must not contain "."; give it another name and set column = "{name}"')
        if name in seen:
            raise FeatureError(f"{kind} {name}: two have this name; rename one of them")
        seen.add(name)


def _check_feature(f: Feature, spec: FeatureSpec) -> None:
    where = f"feature {f.name}"
    _one_of(where, "encoding", f.encoding, ENCODINGS)
    _one_of(where, "pooling", f.pooling, POOLINGS)
    _positive(where, "min_count", f.min_count)
    if f.min_count > 1 and f.encoding != "vocabulary":
        raise FeatureError(f'{where}: min_count needs encoding = "vocabulary", not "{f.encoding}"; leave it out')
    if not isinstance(f.separator, str) or not f.separator:
        raise FeatureError(f"{where}: separator must be a text of at least one character, not {f.separator!r}")
    if not 0 <= f.table < len(spec.tables):
        raise FeatureError(f"{where}: table must be a place among {len(spec.tables)} tables, not {f.table}")
    _check_part(where, f.part, f.time_unit)
    _one_of(where, "keep", f.keep, KEPT_VALUES)
    if f.max_values is not None:
        _positive(where, "max_values", f.max_values)
    for key, given in (("max_values", f.max_values is not None), ("keep", f.keep != "first")):
        if given and f.pooling == "single":
            raise FeatureError(f'{where}: {key} is for several values a sample; give it pooling "sum" or "mean", or leave it out')
    if f.keep != "first" and f.max_values is None:
        raise FeatureError(
            f'{where}: keep = "{f.keep}" says which of max_values values are used; add max_values, or leave it out'
        )
    if f.fill is not None:
        _check_fill(where, f, spec)


def _check_fill(where: str, f: Feature, spec: FeatureSpec) -> None:
    if spec.text_of(f.fill or "") is None:
        raise FeatureError(f"{where}: fill must be a value that is not missing itself, not {f.fill!r}; leave it out")
    rows = spec.tables[f.table].rows
    is_id = re.fullmatch("[0-9]{1,19}", f.fill or "", re.ASCII) is not None and (rows is None or int(f.fill or "") < rows)
    if f.encoding == "id" and not is_id:
        raise FeatureError(f"{where}: fill must be an id, a whole number in 0 .. {(rows or 1) - 1}, not {f.fill!r}")


def _check_dense(d: Dense) -> None:
    where = f"dense {d.name}"
    _one_of(where, "transform", d.transform, TRANSFORMS)
    _check_part(where, d.part, d.time_unit)
    if d.fill is not None:
        number = isinstance(d.fill, int | float) and not isinstance(d.fill, bool)
        if not number or not abs(d.fill) <= _LARGEST:
            raise FeatureError(f"{where}: fill must be a finite number within float32, not {d.fill!r}")
    if d.element is not None:
        if not isinstance(d.element.separator, str) or not d.element.separator:
            raise FeatureError(f"{where}: separator must be a text of at least one character, not {d.element.separator!r}")
        if d.part is not None:
            raise FeatureError(f"{where}: part takes one time, and size makes the column one of vectors; leave out one of them")


def _check_part(where: str, part: Any, unit: Any) -> None:
    if part is not None:
        _one_of(where, "part", part, PARTS)
    if unit is not None:
        _one_of(where, "time_unit", unit, tuple(TIME_UNITS))
        if part is None:
            raise FeatureError(f'{where}: time_unit is for times; add part = "hour" or "weekday", or leave it out')


def _check_table(table: Table, features: list[Feature]) -> None:
    where = f"table {table.name}"
    if not features:
        raise FeatureError(f"{where}: no feature uses it; name it in a [[feature]] or remove it")
    encodings = {f.encoding for f in features}
    if len(encodings) > 1:
        raise FeatureError(f"{where}: its features must have one encoding, not {', '.join(sorted(encodings))}")
    counts = {f.min_count for f in features}
    if len(counts) > 1:
        raise FeatureError(f"{where}: its features must have one min_count, not {', '.join(map(str, sorted(counts)))}")
    if table.dimension is not None:
        _positive(where, "dimension", table.dimension)
    if table.initial is not None:
        try:
            InitialValues.parse(table.initial)
        except ValueError as error:
            raise FeatureError(f"{where}: initial {error}") from None
    if table.rows is None:
        if encodings != {"vocabulary"}:
            raise FeatureError(f'{where}: rows is missing; set its number of rows, or encode its features by "vocabulary"')
        return
    _positive(where, "rows", table.rows)
    if table.rows > _MAX_ROWS:
        raise FeatureError(f"{where}: rows must be below 2^63, not {table.rows}")
    if encodings != {"id"} and table.rows < 2:
        raise FeatureError(f"{where}: rows must be at least 2 (id 0 is for missing values), not {table.rows}")


def _criteo_columns(
    rows: int | Sequence[int] | None, dimension: int | None, encoding: Literal["hash", "id"], transform: Literal["log", "none"]
) -> FeatureSpec:
    sizes = KAGGLE_ROWS if rows is None else (rows,) * 26 if isinstance(rows, int) else tuple(rows)
    if len(sizes) != len(CRITEO_CATEGORICAL):
        raise FeatureError(f"rows: one number, or one for each of the 26 tables, not {len(sizes)}")
    return FeatureSpec(
        labels=(Label("label", "label"),),
        dense=tuple(Dense(name, name, transform) for name in CRITEO_DENSE),
        features=tuple(Feature(name, k, name, encoding) for k, name in enumerate(CRITEO_CATEGORICAL)),
        tables=tuple(Table(name, size, dimension) for name, size in zip(CRITEO_CATEGORICAL, sizes, strict=True)),
        text=TextFormat(delimiter="\t", columns=CRITEO_COLUMNS, quoting=False),
    )


def _one_of(where: str, key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise FeatureError(f"{where}: {key} must be one of {', '.join(allowed)}, not {value!r}")


def _positive(where: str, key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FeatureError(f"{where}: {key} must be a whole number of at least 1, not {value!r}")
