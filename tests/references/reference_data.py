"""Raw logs to ids, dense values, orders and slices, written from docs/definitions.md alone; shares no code with the project.

Plain Python over whole columns: correctness before speed. `reference.train` trains on what this module reads.
"""

from __future__ import annotations

import csv
import gzip
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64 of 0 .. 2^64 - 1."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix_array(x: np.ndarray) -> np.ndarray:
    """splitmix64 of uint64 [n]; array arithmetic wraps without a warning."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(first: int, *others: int) -> int:
    """Chained mix of integers, negative ones in two's complement: 0 .. 2^64 - 1."""
    h = mix(first & _MASK)
    for other in others:
        h = mix(h ^ (other & _MASK))
    return h


def key_array(prefix: Sequence[int], last: np.ndarray) -> np.ndarray:
    """key(*prefix, x) for every x of int64 [n]: uint64 [n]."""
    return mix_array(np.uint64(key(*prefix)) ^ last.astype(np.int64).view(np.uint64))


def hash64(text: bytes) -> int:
    """The hash of a string: its length, then its zero-padded little-endian words."""
    h = mix(len(text))
    for start in range(0, len(text), 8):
        h = mix(h ^ int.from_bytes(text[start : start + 8], "little"))
    return h


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense column and its transform: log, standard or none."""

    name: str
    column: str
    transform: str


@dataclass(frozen=True, slots=True)
class Feature:
    """A categorical column. encoding: hash, vocabulary or id; pooling: single, sum or mean."""

    name: str
    table: int
    column: str
    encoding: str
    pooling: str = "single"
    min_count: int = 1
    separator: str = "|"
    padding: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Label:
    """A label's column. kind: click or number; at_least: a click is 1 from this number on."""

    name: str
    column: str
    kind: str = "click"
    at_least: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table. rows: None where a vocabulary gives them; dimension and initial: None for the job's."""

    name: str
    rows: int | None
    dimension: int | None = None
    initial: str | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """What a log's columns mean.

    order_type: text, integer, number, or None for what the first values are; columns: their names where the files have no header;
    missing: texts that mean a missing value; weight, group: columns, or None; rule: of encoding, 1 or 2.
    """

    labels: tuple[Label, ...]
    dense: tuple[Dense, ...]
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]
    order_by: str | None = None
    order_type: str | None = None
    columns: tuple[str, ...] = ()
    delimiter: str = ","
    quoting: bool = True
    missing: tuple[str, ...] = ()
    weight: str | None = None
    group: str | None = None
    rule: int = 1

    def text(self, written: str) -> str:
        """What a single value is encoded as, '' where it is missing."""
        if self.rule == 1:
            return "" if written in self.missing else written
        text = whole_text(written)
        return "" if written in self.missing or text in {whole_text(missing) for missing in self.missing} else text


def whole_text(written: str) -> str:
    """By rule 2: a whole number written with a point and zeros behind it, without these; -0.0 is 0."""
    before, point, behind = written.partition(".")
    digits = before.removeprefix("-")
    if not point or not behind or set(behind) != {"0"} or not digits or set(digits) - set("0123456789"):
        return written
    if digits.startswith("0"):
        return "0" if digits == "0" else written
    return before


@dataclass(frozen=True, slots=True)
class Samples:
    """Encoded samples in an order. labels: float32 [n, labels]; dense: float32 [n, dense]; bags: [n][F] int64 arrays of ids; weights: float32 [n],
    ones without a column of them; groups: int64 [n], zeros without one.
    """

    labels: np.ndarray
    dense: np.ndarray
    bags: list[list[np.ndarray]]
    weights: np.ndarray
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, order: Sequence[int] | np.ndarray) -> Samples:
        bags = [self.bags[i] for i in order]
        return Samples(self.labels[order], self.dense[order], bags, self.weights[order], self.groups[order])


@dataclass(frozen=True, slots=True)
class Data:
    """Training and evaluation samples, and the rows of every table. sets: where in the evaluation samples each set begins and ends."""

    training: Samples
    evaluation: Samples
    rows: tuple[int, ...]
    sets: tuple[tuple[int, int], ...]


KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 tables of Criteo's Kaggle data set."""


def criteo(rows: int | Sequence[int] = KAGGLE_ROWS, dimension: int | None = None) -> Log:
    """Criteo's columns, hashed. rows: of every table, or of each of the 26."""
    sizes = [rows] * 26 if isinstance(rows, int) else rows
    dense, categorical = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
    return Log(
        (Label("label", "label"),),
        tuple(Dense(name, name, "log") for name in dense),
        tuple(Feature(name, table, name, "hash") for table, name in enumerate(categorical)),
        tuple(Table(name, size, dimension) for name, size in zip(categorical, sizes, strict=True)),
        columns=("label", *dense, *categorical),
        delimiter="\t",
        quoting=False,
    )


def _table(name: str, entry: Mapping[str, Any]) -> Table:
    return Table(name, entry.get("rows"), entry.get("dimension"), entry.get("initial"))


def read_features(path: Path, delimiter: str = ",") -> Log:
    """The log that a feature file (docs/features.md) describes, without its checks."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    tables = [_table(name, entry) for name, entry in document.get("table", {}).items()]
    features = []
    for entry in document.get("feature", []):
        table = entry.get("table", entry["name"])
        if table not in [known.name for known in tables]:
            tables.append(_table(table, entry))
        place = [known.name for known in tables].index(table)
        rest = {name: entry[name] for name in ("pooling", "min_count", "separator", "padding") if name in entry}
        features.append(Feature(entry["name"], place, entry.get("column", entry["name"]), entry.get("encoding", "hash"), **rest))
    dense = [
        Dense(entry["name"], entry.get("column", entry["name"]), entry.get("transform", "log"))
        for entry in document.get("dense", [])
    ]
    text = document.get("text", {})
    entries = document["label"]
    if isinstance(entries, str):
        of_line = {name: document[f"label_{name}"] for name in ("kind", "at_least") if f"label_{name}" in document}
        entries = [{"name": entries, **of_line}]
    return Log(
        tuple(Label(**{"column": entry["name"], **entry}) for entry in entries),
        tuple(dense),
        tuple(features),
        tuple(tables),
        document.get("order_by"),
        document.get("order_type"),
        tuple(text.get("columns", ())),
        text.get("delimiter", delimiter),
        text.get("quoting", True),
        tuple(text.get("missing", ())),
        document.get("weight"),
        document.get("group"),
        2,
    )


def read_columns(sources: Sequence[Path], log: Log) -> dict[str, list[str]]:
    """Every column of the sources, one after the other, as the text that stands there; '' where it is missing."""
    names = {*(label.column for label in log.labels), *(d.column for d in log.dense), *(f.column for f in log.features)}
    names |= {name for name in (log.order_by, log.weight, log.group) if name is not None}
    columns: dict[str, list[str]] = {name: [] for name in names}
    for source in sources:
        opened = gzip.open if source.suffix == ".gz" else open
        with opened(source, "rt", encoding="utf-8", newline="") as lines:
            rows = csv.reader(lines, delimiter=log.delimiter, quoting=csv.QUOTE_MINIMAL if log.quoting else csv.QUOTE_NONE)
            header = list(log.columns) or next(rows)
            places = [(columns[name], header.index(name)) for name in sorted(names)]
            for row in filter(None, rows):
                for column, place in places:
                    column.append("" if row[place] in log.missing else row[place])
    return columns


def order_type_of(sources: Sequence[Path], log: Log) -> str:
    """What the order_by column counts as: as the log says, or else by the first 1,000 rows of the first file that has any value there."""
    assert log.order_by is not None
    if log.order_type is not None:
        return log.order_type
    for source in sources:
        values = [value for value in read_columns([source], log)[log.order_by][:1000] if value]
        for name, parse in (("integer", int), ("number", float)):
            try:
                if [parse(value) for value in values]:
                    return name
            except ValueError:
                continue
        if values:
            return "text"
    return "text"


def sort_order(values: Sequence[str], order_type: str) -> list[int]:
    """Places in the order of a column: numbers by value, text by bytes, missing values first, ties as they stood."""
    of: dict[str, Callable[[str], Any]] = {"text": str.encode, "integer": int, "number": float}
    keys = [(1, of[order_type](value)) if value else (0, 0) for value in values]
    return sorted(range(len(values)), key=keys.__getitem__)


def shuffled(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of an epoch under a shuffle seed: int64 [samples] of numbers."""
    return np.argsort(key_array((seed, epoch), np.arange(samples)), kind="stable")


def dense_column(values: Sequence[str], transform: str, training: Sequence[str]) -> np.ndarray:
    """float32 [n] of the transformed column; `standard` takes its mean and deviation from the training values."""
    x = np.array([float(v) if v else 0.0 for v in values], np.float64)
    if transform == "log":
        x = np.array([math.log1p(max(v, 0.0)) for v in x], np.float64)
    elif transform == "standard":
        known = [float(v) for v in training if v]
        mean, deviation = 0.0, 1.0
        if known:
            mean = math.fsum(known) / len(known)
            exact = [Fraction(v) for v in known]
            variance = float((len(exact) * sum(v * v for v in exact) - sum(exact) ** 2) / len(exact) ** 2)
            deviation = math.sqrt(variance) if variance > 0 else 1.0
        x = (x - mean) / deviation
    present = np.array([bool(v) for v in values], bool)
    return np.where(present, x, 0.0).astype(np.float32)


def values_of(feature: Feature, field: str, log: Log) -> list[str]:
    """The texts of the values in one field: one, or for a multi-valued feature those between separators. A missing value is ''.

    With padding, they are without it and without missing values.
    """
    values = [field] if feature.pooling == "single" else field.split(feature.separator)
    texts = [log.text(value) for value in values]
    return [text for text in texts if text not in ("", *feature.padding)] if feature.padding else texts


def vocabularies(log: Log, columns: dict[str, list[str]], training: Sequence[int]) -> dict[int, dict[str, int]]:
    """Per table with a vocabulary: value -> id, counted over all of the table's features in the training samples."""
    result: dict[int, dict[str, int]] = {}
    for table in sorted({f.table for f in log.features if f.encoding == "vocabulary"}):
        features = [f for f in log.features if f.table == table]
        counts = Counter(v for f in features for i in training for v in values_of(f, columns[f.column][i], log) if v)
        least = features[0].min_count
        kept = sorted((v for v, n in counts.items() if n >= least), key=lambda v: (-counts[v], v.encode()))
        result[table] = {value: place + 2 for place, value in enumerate(kept)}
    return result


def encode(feature: Feature, rows: int, vocabulary: dict[str, int] | None, value: str) -> int:
    """The id of one value; ValueError where an `id` lies outside the table."""
    if value == "":
        return 0
    if feature.encoding == "hash":
        return 1 + hash64(value.encode()) % (rows - 1)
    if feature.encoding == "vocabulary":
        assert vocabulary is not None
        return vocabulary.get(value, 1)
    if not 0 <= int(value) < rows:
        raise ValueError(f"{feature.name}: an id must be in 0 .. {rows - 1}, but is {value}")
    return int(value)


def load(
    log: Log,
    sources: Sequence[Path],
    evaluation_sources: Sequence[Path] = (),
    evaluation_fraction: float = 0.0,
    evaluation_sets: Sequence[Sequence[Path]] = (),
) -> Data:
    """Read, order, split and encode a log. Evaluation is a second source, or the sources of several sets, or the tail of the first one's order."""
    columns = read_columns(sources, log)

    def in_order(read: dict[str, list[str]], files: Sequence[Path]) -> list[int]:
        return (
            sort_order(read[log.order_by], order_type_of(files, log))
            if log.order_by
            else list(range(len(read[log.labels[0].column])))
        )

    order = in_order(columns, sources)
    held_out = math.floor(evaluation_fraction * len(order))
    training, evaluation = order[: len(order) - held_out], order[len(order) - held_out :]
    evaluation_columns, ends = columns, [0, len(evaluation)]
    if evaluation_sources or evaluation_sets:
        evaluation_columns, evaluation, ends = {}, [], [0]
        for of_set in evaluation_sets or [evaluation_sources]:
            read, first = read_columns(of_set, log), ends[-1]
            for name, values in read.items():
                evaluation_columns.setdefault(name, []).extend(values)
            evaluation += [first + place for place in in_order(read, of_set)]
            ends.append(len(evaluation))

    words = vocabularies(log, columns, training)
    rows = []
    for number, table in enumerate(log.tables):
        size = len(words[number]) + 2 if number in words else table.rows
        assert size is not None, f"{table.name}: a table without a vocabulary needs a number of rows"
        rows.append(size)

    def samples(source: dict[str, list[str]], places: Sequence[int]) -> Samples:
        labels = np.zeros((len(places), len(log.labels)), np.float32)
        for at, label in enumerate(log.labels):
            values = np.array([float(source[label.column][i]) for i in places], np.float64)
            labels[:, at] = values if label.at_least is None else np.where(values >= label.at_least, 1.0, 0.0)
            assert label.kind == "number" or np.isin(labels[:, at], (0, 1)).all(), "a click must be 0 or 1"
        weights = np.array([float(source[log.weight][i]) if log.weight else 1.0 for i in places], np.float32)
        texts = [log.text(source[log.group][i]) if log.group else "" for i in places]
        groups = np.array([hash64(text.encode()) if text else 0 for text in texts], np.uint64).view(np.int64)
        dense = np.zeros((len(places), len(log.dense)), np.float32)
        for at, column in enumerate(log.dense):
            of_training = [log.text(columns[column.column][i]) for i in training]
            dense[:, at] = dense_column([log.text(source[column.column][i]) for i in places], column.transform, of_training)
        bags: list[list[np.ndarray]] = [[] for _ in places]
        for feature in log.features:
            known: dict[str, np.ndarray] = {}
            for sample, i in enumerate(places):
                text = source[feature.column][i]
                if text not in known:
                    ids = [
                        encode(feature, rows[feature.table], words.get(feature.table), v) for v in values_of(feature, text, log)
                    ]
                    known[text] = np.array(ids, np.int64)
                bags[sample].append(known[text])
        return Samples(labels, dense, bags, weights, groups)

    return Data(samples(columns, training), samples(evaluation_columns, evaluation), tuple(rows), tuple(pairwise(ends)))


def slice_bounds(samples: int, lanes: int) -> list[tuple[int, int]]:
    """[first, last) of every lane's slice of a step whose samples are placed in order."""
    return [(lane * samples // lanes, (lane + 1) * samples // lanes) for lane in range(lanes)]


Row = tuple[int, int]
"""(table, id)"""


def rows_of(log: Log, samples: Samples) -> list[list[Row]]:
    """The rows that each sample looks up, in order."""
    return [
        [(feature.table, int(i)) for feature, bag in zip(log.features, bags, strict=True) for i in bag] for bags in samples.bags
    ]


def owner(row: Row, users: Sequence[int]) -> int:
    """The lane of a row whose first training step has it in the slices of these lanes, ascending."""
    return users[key(*row) % len(users)]


@dataclass(slots=True)
class Placement:
    """The slices of training steps, step by step. kind: order or locality; lane_of: the rows used so far."""

    lanes: int
    kind: str
    lane_of: dict[Row, int] = field(default_factory=dict)

    def slices(self, batch: Sequence[Sequence[Row]]) -> list[list[int]]:
        """Per lane, ascending, the places in the batch of its samples. batch: the rows that each sample looks up, in order."""
        if self.kind == "order":
            slices = [list(range(first, last)) for first, last in slice_bounds(len(batch), self.lanes)]
        else:
            slices = by_locality(batch, self.lane_of, self.lanes)
        users: dict[Row, list[int]] = {}
        for lane, places in enumerate(slices):
            for row in {row for place in places for row in batch[place]}:
                users.setdefault(row, []).append(lane)
        for row, lanes in users.items():
            self.lane_of.setdefault(row, owner(row, lanes))
        return slices


MOST_LOOKUPS = 16
"""Of a row in a batch, for it to count in placement by locality."""


def by_locality(batch: Sequence[Sequence[Row]], lane_of: Mapping[Row, int], lanes: int) -> list[list[int]]:
    """Placement by locality, from its definition. lane_of: the rows that belong to a lane."""
    lookups = Counter(row for rows in batch for row in rows)
    # The rows that count.
    counting = [[row for row in rows if lookups[row] <= MOST_LOOKUPS] for rows in batch]
    slices = _dealt(counting, lookups, lane_of, lanes)
    in_slice = [Counter(row for place in places for row in counting[place]) for places in slices]

    def gain(place: int, source: int, target: int) -> int:
        """How many rows fewer are exchanged when a sample moves alone."""
        rows = counting[place]
        saved = sum(lane_of.get(row) != source and in_slice[source][row] == 1 for row in rows)
        return saved - sum(lane_of.get(row) != target and in_slice[target][row] == 0 for row in rows)

    def exchanged(rows: set[Row]) -> int:
        """How often these rows go to a lane that is not their owner."""
        users = {row: {lane for lane in range(lanes) if in_slice[lane][row]} for row in rows}
        return sum(len(used - {lane_of[row]}) if row in lane_of else len(used) - 1 for row, used in users.items())

    def move(place: int, source: int, target: int) -> None:
        in_slice[source].subtract(counting[place])
        in_slice[target].update(counting[place])

    for a in range(lanes):
        for b in range(a + 1, lanes):
            ours = sorted(((-gain(place, a, b), at) for at, place in enumerate(slices[a])))
            theirs = sorted(((-gain(place, b, a), at) for at, place in enumerate(slices[b])))
            for (loss, here), (other_loss, there) in zip(ours, theirs, strict=False):
                if loss + other_loss >= 0:
                    break
                i, j = slices[a][here], slices[b][there]
                rows = {*counting[i], *counting[j]}
                before = exchanged(rows)
                move(i, a, b)
                move(j, b, a)
                if exchanged(rows) < before:
                    slices[a][here], slices[b][there] = j, i
                else:
                    move(i, b, a)
                    move(j, a, b)
    return [sorted(places) for places in slices]


def _dealt(
    counting: Sequence[Sequence[Row]], lookups: Mapping[Row, int], lane_of: Mapping[Row, int], lanes: int
) -> list[list[int]]:
    """The first part of placement by locality: samples dealt by their scores, each slice ascending."""
    scores = [[0] * lanes for _ in counting]
    for score, rows in zip(scores, counting, strict=True):
        for row in rows:
            if row in lane_of:
                score[lane_of[row]] += 64 // lookups[row]

    def difference(place: int) -> int:
        largest, second = sorted(scores[place], reverse=True)[:2] if lanes > 1 else (0, 0)
        return largest - second

    room = [last - first for first, last in slice_bounds(len(counting), lanes)]
    slices: list[list[int]] = [[] for _ in range(lanes)]
    for place in sorted(range(len(counting)), key=lambda place: (-difference(place), place)):
        lane = max((v for v in range(lanes) if room[v]), key=lambda v: (scores[place][v], room[v], -v))
        room[lane] -= 1
        slices[lane].append(place)
    return [sorted(places) for places in slices]
