"""Parquet sources: the same samples as from text, any column type that can mean the same, and clear refusals."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_source import read_split

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.external_sort import order_keys
from foreload.pipelines.samples.features import (
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
    TextFormat,
)
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.sources import (
    Source,
    plan_splits,
    read_records,
)
from foreload.pipelines.sources.splits import Format

SPEC = FeatureSpec(
    labels=(Label("y", "y"),),
    dense=(Dense("d", "d", "log"),),
    features=(Feature("c", 0, "c", "hash"), Feature("i", 1, "i", "id"), Feature("m", 2, "m", "hash", "mean")),
    tables=(Table("c", 1000), Table("i", 50), Table("m", 100)),
    order_by="t",
)
ROWS = 40
Columns = dict[str, pa.Array]
Key = int | float | str | Decimal | None
Read = tuple[Samples, list[Key], list[tuple[int, str, str]]]  # samples, order keys, and line, field and value of rejects
PLAIN = {
    "y": pa.array([i % 2 for i in range(ROWS)], pa.int8()),
    "d": pa.array([None if i == 3 else i for i in range(ROWS)], pa.int32()),
    "c": pa.array([None if i == 5 else i * 1000 for i in range(ROWS)], pa.int64()),
    "i": pa.array([None if i == 7 else i for i in range(ROWS)], pa.int16()),
    "m": pa.array([None if i == 9 else [] if i == 11 else [i, i + 1] for i in range(ROWS)], pa.list_(pa.int64())),
    "t": pa.array([None if i == 13 else f"t{i}" for i in range(ROWS)], pa.string()),
}


def write(path: Path, columns: Columns, row_group_size: int = 7) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def read(path: Path, spec: FeatureSpec = SPEC, kind: Format = "parquet") -> Read:
    planned = plan_splits(Source(kind, (str(path),)), spec)
    pieces = [p for s in planned for p in read_split(s, spec)]
    rejects = [(r.line, r.field, r.value) for p in pieces for r in p.rejects]
    keys: list[Key] = []
    for piece in pieces:
        assert piece.keys is not None
        keys += piece.keys.to_pylist()
    return Samples.concat([p.samples for p in pieces]), keys, rejects


def assert_same(a: Samples, b: Samples) -> None:
    for name in ("labels", "dense", "ids", "offsets"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.fixture(scope="module")
def as_csv(tmp_path_factory: pytest.TempPathFactory) -> Read:
    path = tmp_path_factory.mktemp("csv") / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(PLAIN)
        for row in zip(*(column.to_pylist() for column in PLAIN.values()), strict=True):
            writer.writerow(["|".join(map(str, x)) if isinstance(x, list) else x for x in row])
    return read(path, kind="csv")


def decimals(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    return pa.array([None if value is None else Decimal(value) for value in values], kind)


TYPES: dict[str, Columns] = {
    "as they are": {},
    "texts": {n: PLAIN[n].cast(pa.string()) for n in ("y", "d", "c", "i")},
    "large texts": {n: PLAIN[n].cast(pa.large_string()) for n in ("y", "d", "c", "i", "t")},
    "text views": {n: PLAIN[n].cast(pa.string()).cast(pa.string_view()) for n in ("c", "i", "t")},
    "bytes": {n: PLAIN[n].cast(pa.string()).cast(pa.binary()) for n in ("c", "t")},
    "dictionaries": {n: PLAIN[n].cast(pa.string()).dictionary_encode() for n in ("c", "i", "t")},
    "floats": {n: PLAIN[n].cast(pa.float64()).fill_null(float("nan")) for n in ("d", "c", "i")},
    "small floats": {n: PLAIN[n].cast(pa.float32()) for n in ("y", "d", "i")},
    "booleans": {"y": PLAIN["y"].cast(pa.bool_())},
    "unsigned": {n: PLAIN[n].cast(pa.uint64()) for n in ("y", "c", "i")},
    "decimals": {n: decimals(PLAIN[n].to_pylist(), pa.decimal128(12, 2)) for n in ("y", "d", "c", "i")},
    "large decimals": {n: decimals(PLAIN[n].to_pylist(), pa.decimal256(70, 30)) for n in ("y", "d", "c", "i")},
    "small decimals": {n: decimals(PLAIN[n].to_pylist(), pa.decimal64(12, 1)) for n in ("d", "c", "i")},
    "decimals without places": {n: decimals(PLAIN[n].to_pylist(), pa.decimal128(38)) for n in ("y", "d", "c", "i")},
    "lists of decimals": {"m": PLAIN["m"].cast(pa.list_(pa.decimal128(21, 1)))},
    "half floats": {n: PLAIN[n].cast(pa.float16()) for n in ("y", "d", "i")},
    "lists of texts": {"m": PLAIN["m"].cast(pa.list_(pa.string()))},
    "large lists": {"m": PLAIN["m"].cast(pa.large_list(pa.large_string()))},
    "texts with separators": {"m": pa.array([None if not x else "|".join(map(str, x)) for x in PLAIN["m"].to_pylist()])},
}


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("row_group_size", [7, 1000])
def test_any_type_gives_the_samples_of_the_csv_file(tmp_path: Path, as_csv: Read, types: str, row_group_size: int) -> None:
    samples, keys, rejects = read(write(tmp_path / "log.parquet", PLAIN | TYPES[types], row_group_size))
    assert_same(samples, as_csv[0])
    assert keys == as_csv[1]
    assert not rejects


def test_a_single_value_in_a_multi_valued_feature_is_a_list_of_one(tmp_path: Path) -> None:
    whole = [None if x in (None, []) else x[0] for x in PLAIN["m"].to_pylist()]
    single, _, _ = read(write(tmp_path / "a.parquet", PLAIN | {"m": pa.array(whole)}))
    lists = pa.array([[] if x is None else [x] for x in whole])
    assert_same(single, read(write(tmp_path / "b.parquet", PLAIN | {"m": lists}))[0])
    nulls = pa.array([[None] if x is None else [x] for x in whole])
    assert_same(single, read(write(tmp_path / "c.parquet", PLAIN | {"m": nulls}))[0])


def test_a_column_of_nulls_is_missing_throughout(tmp_path: Path) -> None:
    nothing = {n: pa.nulls(ROWS) for n in ("d", "c", "i", "m")}
    samples, _, rejects = read(write(tmp_path / "log.parquet", PLAIN | nothing))
    assert not rejects
    assert not samples.dense.any()
    assert not samples.ids.any()
    assert len(samples.ids) == 3 * ROWS


@pytest.mark.parametrize(
    ("times", "keys"),
    [
        (pa.array([3, None, 1]), [3, None, 1]),
        (pa.array([3.5, float("nan"), -0.0]), [3.5, None, 0.0]),
        (pa.array(["b", "", "é"]), ["b", None, "é"]),
        (
            pa.array([datetime(1970, 1, 1, 0, 0, 1), None, datetime(1970, 1, 2)], pa.timestamp("ms")),
            [10**9, None, 86_400 * 10**9],
        ),
        (pa.array([date(1970, 1, 2), None, date(1969, 12, 31)]), [86_400 * 10**9, None, -86_400 * 10**9]),
    ],
)
def test_order_keys_keep_their_kind(tmp_path: Path, times: pa.Array, keys: list[Key]) -> None:
    columns = {name: column.slice(0, 3) for name, column in PLAIN.items()} | {"t": times}
    assert read(write(tmp_path / "log.parquet", columns))[1] == keys


@pytest.mark.parametrize("scale", [0, 2, 20])
@pytest.mark.parametrize("width", [pa.decimal128, pa.decimal256])
def test_large_decimals_lose_nothing(tmp_path: Path, width: Callable[[int, int], pa.DataType], scale: int) -> None:
    rows = 2**53 + 30
    spec = FeatureSpec(
        (Label("y", "y"),),
        (Dense("d", "d", "none"),),
        (Feature("c0", 0, "c", "hash"), Feature("c1", 1, "c", "id"), Feature("c2", 2, "c", "vocabulary")),
        (Table("c0", 2**40), Table("c1", rows), Table("c2", None)),
        order_by="c",
    )
    ids = list(range(2**53, 2**53 + 20))
    fractions = [Fraction(10**15 * k + 1, 3 * 10**4) for k in range(20)]
    dense = [Decimal(f.numerator * 100 // f.denominator).scaleb(-2) for f in fractions]
    columns = {
        "y": pa.array([0, 1] * 10),
        "c": decimals(ids, width(38, scale)),
        "d": pa.array(dense, pa.decimal128(30, 2)).cast(width(30, 2)),
    }
    (split,) = plan_splits(Source("parquet", (str(write(tmp_path / "a.parquet", columns, 100)),)), spec)
    (records,) = read_records(split, spec)
    texts = [str(x) for x in ids]
    assert [column.to_pylist() for column in records.categorical] == [texts, ids, texts]
    assert records.dense[:, 0].tolist() == [float(str(x)) for x in dense]
    assert len(set(order_keys(records.keys).to_pylist())) == 20
    assert not records.rejects
    beyond = columns | {"c": pa.array([Decimal(2**53 + 30)] * 20).cast(width(38, scale))}
    (split,) = plan_splits(Source("parquet", (str(write(tmp_path / "b.parquet", beyond, 100)),)), spec)
    (records,) = read_records(split, spec)
    assert (records.rejected, records.rejects[0].field) == (20, "c")
    assert records.rejects[0].value == str(2**53 + 30)


def test_a_decimal_with_a_fraction_is_no_category(tmp_path: Path) -> None:
    columns = {n: c.slice(0, 3) for n, c in PLAIN.items()}
    values = [Decimal("1.50"), Decimal("2.00"), Decimal("-0.01")]
    for name in ("c", "i"):
        path = write(tmp_path / f"{name}.parquet", columns | {name: pa.array(values)})
        assert read(path)[2] == [(1, name, "1.50"), (3, name, "-0.01")]


@pytest.mark.parametrize("order_type", [None, "integer", "number"])
def test_large_numbers_to_order_by_lose_nothing(tmp_path: Path, order_type: Literal["integer", "number"] | None) -> None:
    spec = replace(SPEC, order_type=order_type)
    for kind in (pa.int64(), pa.uint64(), pa.decimal128(38, 0), pa.decimal128(38, 5), pa.decimal256(70, 40)):
        first = 2**63 + 2**62 if kind == pa.uint64() else 2**62
        numbers = [first + (k * 7) % ROWS for k in range(ROWS)]
        times = decimals(numbers, kind) if pa.types.is_decimal(kind) else pa.array(numbers, kind)
        keys = read(write(tmp_path / "log.parquet", PLAIN | {"t": times}), spec)[1]
        assert len(set(keys)) == ROWS
        assert [int(key) for key in keys if key is not None] == numbers


SECONDS = [1_700_000_000, 1_700_086_400]
MOMENTS = {
    "seconds": pa.array(SECONDS, pa.int64()),
    "fractions": pa.array(SECONDS, pa.float64()),
    "decimals": decimals(SECONDS, pa.decimal128(20, 0)),
    "milliseconds": pa.array([s * 1000 for s in SECONDS], pa.timestamp("ms", tz="Asia/Tokyo")),
    "nanoseconds": pa.array([s * 10**9 for s in SECONDS], pa.timestamp("ns")),
    "days": pa.array([s // 86400 for s in SECONDS], pa.date32()),
    "text": pa.array(["2023-11-14T22:13:20", "2023-11-15T22:13:20"]),
    "dictionary": pa.array(["2023-11-14T22:13:20", "2023-11-15T22:13:20"]).dictionary_encode(),
    "bytes": pa.array([b"2023-11-14T22:13:20", b"2023-11-15T22:13:20"], pa.large_binary()),
    "nothing": pa.nulls(2),
}
KINDS = ({"seconds", "fractions", "decimals"}, {"milliseconds", "nanoseconds", "days"}, {"text", "dictionary", "bytes"})


@pytest.mark.parametrize(("first", "second"), list(combinations(MOMENTS, 2)))
def test_what_orders_is_of_one_kind_in_all_files(tmp_path: Path, first: str, second: str) -> None:
    few = {name: column.slice(0, 2) for name, column in PLAIN.items()}
    for name, kind in (("a", first), ("b", "nothing"), ("c", second)):
        write(tmp_path / f"{name}.parquet", few | {"t": MOMENTS[kind]})
    of = [next((k for k, names in enumerate(KINDS) if kind in names), None) for kind in (first, second)]
    source = Source("parquet", (str(tmp_path / "*"),))
    if None in of or of[0] == of[1]:
        assert len(plan_splits(source, SPEC)) == 3
        return
    with pytest.raises(SourceError) as refused:
        plan_splits(source, SPEC)
    assert str(refused.value) == (
        f"order_by: column t must be of one kind, numbers, times or text, in all files; got {MOMENTS[first].type} in {tmp_path}/a.parquet and "
        f"{MOMENTS[second].type} in {tmp_path}/c.parquet; convert one of them"
    )


NOTHING = {
    "null": pa.nulls(2),
    "int64": pa.nulls(2, pa.int64()),
    "NaN": pa.array([np.nan, None]),
    "timestamp": pa.nulls(2, pa.timestamp("us")),
    "texts": pa.array(["", "NULL"]),
    "dictionary": pa.array(["", None]).dictionary_encode(),
    "time32": pa.nulls(2, pa.time32("ms")),
    "list": pa.nulls(2, pa.list_(pa.int64())),
}


@pytest.mark.parametrize("order_type", [None, "text"])
@pytest.mark.parametrize("kind", NOTHING)
def test_a_column_without_values_is_of_no_kind(tmp_path: Path, kind: str, order_type: Literal["text"] | None) -> None:
    spec = replace(SPEC, order_type=order_type, text=TextFormat(missing=("NULL",)))
    few = {name: column.slice(0, 2) for name, column in PLAIN.items()}
    write(tmp_path / "b.parquet", few | {"t": NOTHING[kind]})
    for other in ["text"] if order_type else ["seconds", "milliseconds", "text"]:
        write(tmp_path / "a.parquet", few | {"t": MOMENTS[other]})
        read = [r for s in plan_splits(Source("parquet", (str(tmp_path / "*"),)), spec) for r in read_records(s, spec)]
        assert [len(records) for records in read] == [2, 2]
        assert [records.keys.null_count for records in read if records.keys is not None] == [0, 2]
    (tmp_path / "a.parquet").unlink()
    assert len(plan_splits(Source("parquet", (str(tmp_path / "*"),)), spec)) == 1


@pytest.mark.parametrize("kind", [pa.time32("ms"), pa.duration("s"), pa.bool_(), pa.list_(pa.int64())], ids=str)
def test_what_does_not_order_is_refused_before_anything_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    few = {name: column.slice(0, 2) for name, column in PLAIN.items()}
    values: list[Any] = [[1], [2]] if pa.types.is_list(kind) else [1, 0]
    column = pa.array(values, kind) if kind != pa.bool_() else pa.array([True, False])
    path = write(tmp_path / "b.parquet", few | {"t": column})
    with pytest.raises(SourceError) as refused:
        plan_splits(Source("parquet", (str(path),)), SPEC)
    assert str(refused.value) in (
        f"{path}: column t must hold numbers, times or text to order by, not {kind}",
        f"{path}: column t holds lists; order_by needs a column of single values",
    )
    for other in ("seconds", "milliseconds", "text"):
        write(tmp_path / "a.parquet", few | {"t": MOMENTS[other]})
        with pytest.raises(SourceError) as refused:
            plan_splits(Source("parquet", (str(tmp_path / "*"),)), SPEC)
        types = [pq.read_schema(tmp_path / f"{name}.parquet").field("t").type for name in "ab"]
        assert f"got {types[0]} in {tmp_path}/a.parquet and {types[1]} in {path}; convert one of them" in str(refused.value)


@pytest.mark.parametrize("row_group_size", [7, 1000])
def test_lists_of_a_fixed_size_may_be_missing(tmp_path: Path, row_group_size: int) -> None:
    pairs = [None if k in (9, 11) else [k, k + 1] for k in range(ROWS)]
    columns = PLAIN | {"c": PLAIN["c"].cast(pa.string()).cast(pa.large_string())}
    fixed = read(write(tmp_path / "a.parquet", columns | {"m": pa.array(pairs, pa.list_(pa.int64(), 2))}, row_group_size))
    lists = read(write(tmp_path / "b.parquet", columns | {"m": pa.array(pairs, pa.list_(pa.int64()))}, row_group_size))
    assert_same(fixed[0], lists[0])
    assert fixed[1:] == lists[1:]


def test_old_times_beyond_their_range_are_refused(tmp_path: Path) -> None:
    columns = {name: column.slice(0, 3) for name, column in PLAIN.items()}
    for year in (1969, 9999):
        times = pa.array([datetime(year, 1, 1, 0, 0, 0, 7), None, datetime(2020, 1, 1)], pa.timestamp("us"))
        path = tmp_path / f"{year}.parquet"
        pq.write_table(pa.table(columns | {"t": times}), path, use_deprecated_int96_timestamps=True)
        if year == 1969:
            assert read(path)[1] == [None if x is None else x * 1000 for x in times.cast(pa.int64()).to_pylist()]
        else:
            with pytest.raises(SourceError, match=r"9999\.parquet: column t holds times beyond the range of nanoseconds"):
                read(path)


def test_faults_are_located_by_row(tmp_path: Path) -> None:
    texts = TYPES["texts"]
    y, d, i = (texts[n].to_pylist() for n in ("y", "d", "i"))
    m = TYPES["lists of texts"]["m"].to_pylist()
    y[0], d[8], i[20], i[21], d[21] = None, "many", "50", "-1", "-inf"
    columns = PLAIN | {"y": pa.array(y), "d": pa.array(d), "i": pa.array(i), "m": pa.array(m)}
    samples, keys, rejects = read(write(tmp_path / "log.parquet", columns))
    assert rejects == [(1, "y", ""), (9, "d", "many"), (21, "i", "50"), (22, "d", "-inf")]
    assert len(samples) == len(keys) == ROWS - 4
    spec = FeatureSpec((Label("y", "y"),), (), (Feature("m", 0, "m", "id", "sum"),), (Table("m", 20),))
    planned = plan_splits(Source("parquet", (str(write(tmp_path / "m.parquet", PLAIN)),)), spec)
    found = [(r.line, r.value) for s in planned for records in read_records(s, spec) for r in records.rejects]
    assert found == [(20, "20")] + [(row + 1, str(row)) for row in range(20, ROWS)]


def test_large_unsigned_and_fractional_ids_are_rejects(tmp_path: Path) -> None:
    columns = {n: c.slice(0, 3) for n, c in PLAIN.items()}
    big = pa.array([2**64 - 1, 49, 50], pa.uint64())
    assert read(write(tmp_path / "a.parquet", columns | {"i": big}))[2] == [(1, "i", str(2**64 - 1)), (3, "i", "50")]
    assert read(write(tmp_path / "b.parquet", columns | {"i": pa.array([1.5, 2, 1e300])}))[2] == [
        (1, "i", "1.5"),
        (3, "i", "1e+300"),
    ]


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    def message(path: Path, spec: FeatureSpec = SPEC) -> str:
        with pytest.raises(SourceError) as caught:
            [r for s in plan_splits(Source("parquet", (str(path),)), spec) for r in read_records(s, spec)]
        text = str(caught.value)
        assert "\n" not in text
        assert path.name in text
        return text

    whole = write(tmp_path / "a.parquet", PLAIN).read_bytes()
    for name, content in (("cut", whole[:-100]), ("short", b"PAR1"), ("empty", b""), ("csv", b"y,d\n1,2\n")):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(content)
        assert "not a readable Parquet file" in message(path)
    broken = bytearray(whole)
    broken[4:400] = bytes(396)
    (tmp_path / "broken.parquet").write_bytes(broken)
    message(tmp_path / "broken.parquet")
    without = {n: c for n, c in PLAIN.items() if n != "c"}
    assert "no column 'c' among y, d, i, m, t" in message(write(tmp_path / "b.parquet", without))
    dates = pa.array([date(2020, 1, 1)] * ROWS)
    for name, columns, text in (
        ("c", {"c": dates}, "column c must hold text or whole numbers, not date32"),
        ("d", {"d": dates}, "column d must hold numbers or text, not date32"),
        ("e", {"c": PLAIN["m"]}, 'column c holds lists; give feature c pooling "sum" or "mean"'),
        ("f", {"t": PLAIN["m"]}, "order_by needs a column of single values"),
        ("g", {"t": PLAIN["y"].cast(pa.bool_())}, "column t must hold numbers, times or text"),
        ("h", {"c": pa.array([b"\xff"] * ROWS)}, "not valid text"),
        ("i", {"d": PLAIN["m"]}, "column d holds lists; give dense d size, how many numbers each list has"),
    ):
        assert text in message(write(tmp_path / f"{name}.parquet", PLAIN | columns))
