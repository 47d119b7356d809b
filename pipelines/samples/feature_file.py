"""Reading a feature file (docs/features.md).

A `FeatureSpec` checks its own rules. Reading a file also checks what a spec cannot hold: unknown
entries, entries of another kind, and tables that no feature names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.features import Dense, Element, Feature, FeatureSpec, Label, Table, TextFormat, whole_text

RULE: Literal[1, 2] = 2
"""The rule of encoding for data that is prepared with a feature file."""

_OF_TABLE = ("rows", "dimension", "initial")  # entries of a table, or of a feature with one of its own
_OF_VALUES = ("padding", "max_values", "keep", "fill", "part", "time_unit")  # entries about a feature's values
_MOST_SIZE = 1 << 16  # the most numbers of a vector
_OURS = {
    "combiner": "pooling", "default_value": "fill", "emb_dim": "dimension", "embedding_dim": "dimension", "embedding_initializer": "initial",
    "embedding_name": "table", "feature_name": "name", "fill_na": "fill", "fillna": "fill", "hash_bucket_size": "rows", "init_fn": "initial",
    "initializer": "initial", "input_name": "column", "input_names": "column", "max_len": "max_values", "maxlen": "max_values",
    "min_categr_count": "min_count", "min_freq": "min_count", "mode": "pooling", "na_value": "fill", "normalizer": "transform",
    "num_buckets": "rows", "num_embeddings": "rows", "padding_idx": "padding", "sequence_length": "max_values", "share_embedding": "table",
    "shared_name": "table", "splitter": "separator", "value_dim": "size", "value_separator": "separator", "vocab_size": "rows",
    "vocabulary_size": "rows",
}  # fmt: skip
"""What other libraries (DeepCTR, FuxiCTR, TorchEasyRec, torch) call entries of a feature file."""


def load_features(path: str | Path) -> FeatureSpec:
    """Read a feature file (TOML, docs/features.md).

    Raises:
        FeatureError: the file is unreadable or invalid. The message names the file, the entry, the
            rule and the value.
    """
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise FeatureError(f"{path}: cannot read the feature file ({error.strerror}); check --features") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FeatureError(f"{path}: not valid TOML ({error})") from error
    try:
        return parse(document)
    except FeatureError as error:
        raise FeatureError(f"{path}: {error}") from error


def parse(document: Mapping[str, Any]) -> FeatureSpec:
    """Parse the contents of a feature file, as returned by tomllib.

    Raises:
        FeatureError: the contents are invalid.
    """
    known = {
        "label",
        "label_at_least",
        "label_kind",
        "label_negative",
        "weight",
        "group",
        "order_by",
        "order_type",
        "text",
        "table",
        "feature",
        "dense",
    }
    _refuse_unknown(document, known, "the feature file")
    tables = [_table(name, entry) for name, entry in _mapping(document, "table").items()]
    places = {table.name: k for k, table in enumerate(tables)}
    features = []
    for entry in _entries(document, "feature"):
        features.append(_feature(entry, tables, places))
    dense = [dense for entry in _entries(document, "dense") for dense in _dense(entry)]
    return FeatureSpec(
        labels=_labels(document),
        dense=tuple(dense),
        features=tuple(features),
        tables=tuple(tables),
        order_by=_optional(document, "order_by", "the feature file"),
        order_type=document.get("order_type"),
        text=_text_format(_mapping(document, "text")),
        weight=_optional(document, "weight", "the feature file"),
        group=_optional(document, "group", "the feature file"),
        rule=RULE,
    )


def _labels(document: Mapping[str, Any]) -> tuple[Label, ...]:
    """Read the labels, from one line `label = "column"` or from each [[label]]."""
    of_line = {"kind": "label_kind", "at_least": "label_at_least", "negative": "label_negative"}
    if not isinstance(document.get("label"), list | Mapping):
        column = _text(document, "label", "the feature file")
        return (Label(column, column, **{key: document[name] for key, name in of_line.items() if name in document}),)
    for key, name in of_line.items():
        if name in document:
            raise FeatureError(f'the feature file: {name} goes with label = "..."; in a [[label]], set {key} instead')
    entries = _entries(document, "label")
    if not entries:
        raise FeatureError('label: at least one is needed; add label = "..." or a [[label]]')
    return tuple(_label(entry) for entry in entries)


def _label(entry: Mapping[str, Any]) -> Label:
    name = _text(entry, "name", "[[label]]")
    where = f"label {name}"
    _refuse_unknown(entry, {"name", "column", "kind", "at_least", "negative"}, where)
    column = _optional(entry, "column", where) or name
    return Label(name, column, entry.get("kind", "click"), entry.get("at_least"), entry.get("negative"))


def _table(name: str, entry: Any) -> Table:
    where = f"[table.{name}]"
    if not isinstance(entry, Mapping):
        raise FeatureError(f"{where}: must be a table of rows, dimension and initial, not {entry!r}")
    _refuse_unknown(entry, set(_OF_TABLE), where)
    return Table(name, **{"rows": None, **entry})


def _feature(entry: Mapping[str, Any], tables: list[Table], places: dict[str, int]) -> Feature:
    """Read one [[feature]].

    A feature that names no table gets one of its own, which is appended to tables and places.
    """
    name = _text(entry, "name", "[[feature]]")
    where = f"feature {name}"
    known = {"name", "column", "table", "encoding", "pooling", "min_count", "separator", *_OF_VALUES, *_OF_TABLE}
    _refuse_unknown(entry, known, where)
    table = _optional(entry, "table", where) or name
    of_table = {key: entry[key] for key in _OF_TABLE if key in entry}
    if of_table and (table in places or table != name):
        raise FeatureError(
            f"{where}: rows, dimension and initial of a shared table belong to the table; set them under [table.{table}]"
        )
    if table not in places:
        if table != name:
            raise FeatureError(f"{where}: table must be one of the [table.NAME] of the file, not {table!r}; add [table.{table}]")
        places[table] = len(tables)
        tables.append(Table(table, **{"rows": None, **of_table}))
    return Feature(
        name=name,
        table=places[table],
        column=_optional(entry, "column", where) or name,
        encoding=entry.get("encoding", "hash"),
        pooling=entry.get("pooling", "single"),
        min_count=entry.get("min_count", 1),
        separator=entry.get("separator", "|"),
        padding=_padding(entry.get("padding", []), where),
        max_values=entry.get("max_values"),
        keep=entry.get("keep", "first"),
        fill=_categorical_value(entry["fill"], "fill", where) if "fill" in entry else None,
        part=entry.get("part"),
        time_unit=entry.get("time_unit"),
    )


def _padding(given: Any, where: str) -> tuple[str, ...]:
    values = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(_categorical_value(value, "padding", where) for value in values))


def _categorical_value(value: Any, key: str, where: str) -> str:
    """Return the text by which a value of the feature file is encoded."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise FeatureError(f"{where}: {key} must be a text or a whole number, not {value!r}")
    return whole_text(str(value))


def _dense(entry: Mapping[str, Any]) -> list[Dense]:
    """Read one [[dense]]: a single value, or one for each number of a vector."""
    name = _text(entry, "name", "[[dense]]")
    where = f"dense {name}"
    _refuse_unknown(entry, {"name", "column", "transform", "fill", "part", "time_unit", "size", "separator"}, where)
    column, fill = _optional(entry, "column", where) or name, entry.get("fill")
    # Negative numbers are usual in vectors, and log would read them as 0.
    transform = entry.get("transform", "none" if "size" in entry else "log")
    if isinstance(fill, int) and not isinstance(fill, bool) and abs(fill) < 1 << 128:
        fill = float(fill)
    single = Dense(name, column, transform, fill, entry.get("part"), entry.get("time_unit"))
    if "size" not in entry:
        if "separator" in entry:
            raise FeatureError(f"{where}: separator is for vectors; add size, how many numbers each has, or leave it out")
        return [single]
    size = entry["size"]
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MOST_SIZE:
        raise FeatureError(f"{where}: size must be how many numbers a vector has, 1 .. {_MOST_SIZE}, not {size!r}")
    elements = (Element(place, size, entry.get("separator", "|")) for place in range(size))
    return [replace(single, name=f"{name}.{element.place}", element=element) for element in elements]


def _text_format(entry: Mapping[str, Any]) -> TextFormat:
    _refuse_unknown(entry, {"delimiter", "columns", "quoting", "missing", "newlines_in_values"}, "[text]")
    for key in ("columns", "missing"):
        value = entry.get(key, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise FeatureError(f"[text]: {key} must be a list of texts, not {value!r}")
    return TextFormat(
        delimiter=entry.get("delimiter"),
        columns=tuple(entry.get("columns", [])),
        quoting=entry.get("quoting", True),
        missing=tuple(entry.get("missing", [])),
        newlines_in_values=entry.get("newlines_in_values", False),
    )


def _entries(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = document.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise FeatureError(f"{key}: write each as [[{key}]], not {key} = {entries!r}")
    return entries


def _mapping(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    entry = document.get(key, {})
    if not isinstance(entry, Mapping):
        raise FeatureError(f"{key}: must be a TOML table, not {entry!r}")
    return entry


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise FeatureError(
            f'{where}: {key} must be a text; add {key} = "..."' + ("" if value is None else f" instead of {value!r}")
        )
    return value


def _optional(entry: Mapping[str, Any], key: str, where: str) -> str | None:
    return _text(entry, key, where) if key in entry else None


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in entry:
        if key not in known:
            ours = _OURS.get(key.lower())
            raise FeatureError(
                f"{where}: unknown entry {key!r}; "
                + (f"it is called {ours} here; " if ours in known else "")
                + f"known are {', '.join(sorted(known))}"
            )
