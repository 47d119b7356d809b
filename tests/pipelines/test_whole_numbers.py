"""Rule 2 of encoding: a whole number is one value however it is written and whatever holds it, and a missing one is missing in every source."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.base.codec import to_stored
from foreload.pipelines import prepare
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.cells import whole_texts, without_missing
from foreload.pipelines.samples.column_counts import COUNTS, EXPONENTS, LARGE, TEXTS, notice_values
from foreload.pipelines.samples.column_counts import NUMBERS as VALUES
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.feature_file import parse
from foreload.pipelines.samples.features import FeatureSpec, whole_text
from foreload.pipelines.samples.vocabulary import Vocabulary, count_values, merge_counts
from foreload.pipelines.schedule.format import Header
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources import Source, plan_splits, read_records
from foreload.pipelines.sources.splits import Format
from foreload.trainer.serving import raw_values
from foreload.trainer.serving.torch_folder import encoding_of

WRITTEN = {
    "26.0": "26", "26": "26", "26.00": "26", "-26.0": "-26", "0.0": "0", "-0.0": "0", "-0": "-0", "10.0": "10",
    "9007199254740993.0": "9007199254740993",
    "123456789012345678901234567890.0": "123456789012345678901234567890", "007": "007", "007.0": "007.0", "+5": "+5", "+5.0": "+5.0", "1e5": "1e5",
    "1.0e5": "1.0e5", "26.": "26.", " 26.0": " 26.0", "26.0 ": "26.0 ", "3.7": "3.7", "3.70": "3.70", ".0": ".0", "-.0": "-.0", "--1.0": "--1.0",
    "12e34567": "12e34567", "26.0.0": "26.0.0", "1,000.0": "1,000.0", "2\uff16.0": "2\uff16.0", "é.0": "é.0", "-": "-", ".": ".", "0": "0",
}  # fmt: skip
"""How a value is written, and what it is encoded as."""

FEATURES: dict[str, Any] = {
    "label": "y",
    "group": "g",
    "dense": [{"name": "d", "transform": "none"}],
    "feature": [
        {"name": "hashed", "column": "a", "rows": 10_007},
        {"name": "known", "column": "a", "encoding": "vocabulary"},
        {"name": "id", "column": "b", "encoding": "id", "rows": 1000},
        {"name": "bag", "column": "c", "rows": 10_007, "pooling": "sum", "separator": "|"},
        {"name": "pointed", "column": "c", "rows": 10_007, "pooling": "sum", "separator": "."},
    ],
}


@pytest.mark.parametrize(("written", "text"), WRITTEN.items())
def test_a_text_is_the_whole_number_that_it_writes_as_a_float(written: str, text: str) -> None:
    assert whole_text(written) == raw_values.whole_text(written) == text
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(["x", written, None, "", written], kind)
        assert whole_texts(column).to_pylist() == ["x", text, None, "", text]
        assert whole_texts(column[1:4]).to_pylist() == [text, None, ""]
        whole_texts(column).validate(full=True)


@given(st.lists(st.text("-+.01926e ", max_size=9) | st.none(), max_size=20))
def test_columns_of_texts_are_as_each_text(texts: list[str | None]) -> None:
    expected = [None if text is None else re.sub(r"\A(-?)(0|[1-9][0-9]*)\.0+\Z", r"\1\2", text) for text in texts]
    expected = ["0" if text == "-0" and written != "-0" else text for text, written in zip(expected, texts, strict=True)]
    assert whole_texts(pa.array(texts, pa.string())).to_pylist() == expected


def written_csv(path: Path, columns: Mapping[str, Sequence[str]]) -> Path:
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    arrow_csv.write_csv(table, path)
    return path


def read(path: Path, spec: FeatureSpec) -> dict[str, list[Any]]:
    """What a file's features, dense values and groups are, by feature as texts or ids, missing ones as None."""
    kind: Format = "parquet" if path.suffix == ".parquet" else "csv"
    values: dict[str, list[Any]] = {feature.name: [] for feature in spec.features} | {"d": [], "g": []}
    for split in plan_splits(Source(kind, (str(path),)), spec):
        for records in read_records(split, spec):
            assert not records.causes
            for feature, column in zip(spec.features, records.categorical, strict=True):
                values[feature.name] += [plain(value) for value in column.to_pylist()]
            values["d"] += [None if np.isnan(value) else value for value in records.dense[:, 0].tolist()]
            assert records.groups is not None
            values["g"] += records.groups.tolist()
    return values


def plain(value: Any) -> Any:
    return [plain(part) for part in value] or [None] if isinstance(value, list) else None if value == "" else value


def columns_of(values: Sequence[str], ids: Sequence[str]) -> dict[str, list[str]]:
    """Every value as a feature, a group, and with a neighbour as a bag; whole numbers as ids and as dense values."""
    beside = [f"{a}|{b}" for a, b in zip(values, [*values[1:], values[0]], strict=True)]
    of_ids = [ids[place % len(ids)] for place in range(len(values))]
    return {"y": ["1"] * len(values), "a": list(values), "b": of_ids, "c": beside, "d": of_ids, "g": list(values)}


@pytest.mark.parametrize("missing", [(), ("-1",), ("-1.0", "NULL"), ("007", "0", "3.7")])
def test_files_of_text_are_read_by_the_rule(tmp_path: Path, missing: tuple[str, ...]) -> None:
    spec = parse(FEATURES | {"text": {"missing": list(missing)}})
    random.seed(len(missing))
    values = [text for text in WRITTEN if "," not in text] + ["-1", "-1.0", "-1.00", "NULL", "", "0.0"]
    random.shuffle(values)
    columns = columns_of(values, ["26.0", "26", "7.00", "0.0", *(["-1.0", "-1"] if "-1" in {*map(whole_text, missing)} else [])])
    wholes = {whole_text(text) for text in missing}

    def text(written: str) -> str | None:
        return None if written in ("", *missing) or whole_text(written) in wholes else whole_text(written)

    def number(written: str) -> float | None:
        return None if text(written) is None else float(written)

    told = read(written_csv(tmp_path / "log.csv", columns), spec)
    assert told["hashed"] == told["known"] == [text(value) for value in values]
    assert told["id"] == [None if text(value) is None else int(float(value)) for value in columns["b"]]
    assert told["d"] == [number(value) for value in columns["b"]]
    assert told["bag"] == [[None] if field in missing else [text(part) for part in field.split("|")] for field in columns["c"]]
    # A field is cut before anything in it is taken for a number.
    assert told["pointed"] == [
        [None] if field in missing else [text(part) for part in field.split(".")] for field in columns["c"]
    ]
    by_text: dict[str | None, int] = {}
    for value, group in zip(values, told["g"], strict=True):
        assert by_text.setdefault(text(value), group) == group
    assert len(set(by_text.values())) == len(by_text)
    assert by_text[None] == 0


NUMBERS = [26, 0, -1, 5, 999, None, 300, 12, None, -7]
TYPES = {
    "int64": pa.array(NUMBERS, pa.int64()), "int16": pa.array(NUMBERS, pa.int16()), "float64": pa.array(NUMBERS, pa.float64()),
    "float32": pa.array(NUMBERS, pa.float32()), "float16": pa.array(NUMBERS, pa.float16()),
    "nan": pa.array([np.nan if number is None else number for number in NUMBERS], pa.float64(), from_pandas=False),
    "decimal": pa.array([None if n is None else Decimal(n) for n in NUMBERS], pa.decimal128(20, 3)),
    "text": pa.array([None if n is None else str(n) for n in NUMBERS]), "float_text": pa.array([None if n is None else f"{n}.0" for n in NUMBERS]),
    "bytes": pa.array([None if n is None else f"{n}.00".encode() for n in NUMBERS]),
    "dictionary": pa.array([None if n is None else f"{n}.0" for n in NUMBERS]).dictionary_encode(),
}  # fmt: skip


@pytest.mark.parametrize("missing", [(), ("-1", "300.0"), ("-7.0",)])
@pytest.mark.parametrize("kind", TYPES)
def test_a_log_has_the_same_values_as_text_and_as_parquet_of_any_type(
    tmp_path: Path, kind: str, missing: tuple[str, ...]
) -> None:
    spec = parse(
        {
            "label": "y",
            "group": "a",
            "text": {"missing": list(missing)},
            "dense": [{"name": "d", "column": "a", "transform": "none"}],
            "feature": [
                {"name": "hashed", "column": "a", "rows": 10_007},
                {"name": "bag", "column": "a", "rows": 9, "pooling": "mean"},
            ],
        }
    )
    wholes = {whole_text(text) for text in missing}
    expected = [None if number is None or str(number) in wholes else str(number) for number in NUMBERS]
    labels = pa.array([0, 1] * (len(NUMBERS) // 2))
    pq.write_table(pa.table({"y": labels, "a": TYPES[kind]}), tmp_path / "log.parquet")
    floats = ["" if number is None else f"{number}.0" for number in NUMBERS]
    written_csv(tmp_path / "log.csv", {"y": ["0", "1"] * (len(NUMBERS) // 2), "a": floats})
    told = [read(tmp_path / name, spec) for name in ("log.parquet", "log.csv")]
    for of_file in told:
        assert of_file["hashed"] == expected
        assert of_file["bag"] == [[text] for text in expected]
        assert of_file["d"] == [None if text is None else float(text) for text in expected]
    assert told[0]["g"] == told[1]["g"]
    # What a model serves, whose values come as Python has them.
    unlabelled = spec.unlabelled()
    about = encoding_of(unlabelled, Encoder(unlabelled)) | {"tables": [{"table_rows": rows} for rows in spec.table_rows]}
    served = raw_values.Encoder(about, {})
    for values in (TYPES[kind].to_pylist(), NUMBERS, floats):
        dense, lookups = served.encode({"a": values})
        assert dense[:, 0].tolist() == [0.0 if text is None else float(text) for text in expected]
        texts = [b"" if text is None else text.encode() for text in expected]
        ids = (raw_values.hash64(texts) % np.uint64(10_006)).astype(np.int64) + 1
        assert lookups["hashed"][0].tolist() == np.where([text is None for text in expected], 0, ids).tolist()


def test_a_fraction_of_parquet_is_missing_where_the_nearest_of_its_type_is_listed() -> None:
    missing = ["-999.9", "0.5", "1e5", "nothing", "16777217"]
    for kind in (pa.float64(), pa.float32(), pa.float16()):
        column = pa.array([-999.9, 0.5, 100_000.0 if kind != pa.float16() else 7.0, 0.25], pa.float64()).cast(kind, safe=False)
        assert without_missing(column, missing).is_null().to_pylist() == [True, True, False, False]
    decimals = pa.array([Decimal("-999.90"), Decimal("-999.91"), Decimal("0.50")], pa.decimal128(9, 2))
    assert without_missing(decimals, missing).is_null().to_pylist() == [True, False, True]
    # 2^24 + 1 is no float32: its neighbour, which is one, is not meant.
    assert without_missing(pa.array([2.0**24], pa.float32()), missing).null_count == 0
    assert without_missing(pa.array([2**24 + 1, 2**24], pa.int32()), missing).is_null().to_pylist() == [True, False]
    assert without_missing(pa.array([-0.0, 0.0, 1.0]), ["0"]).is_null().to_pylist() == [True, True, False]
    assert without_missing(pa.array([1, 255], pa.uint8()), ["-1", "300", "255"]).is_null().to_pylist() == [False, True]


def test_a_vocabulary_counts_a_value_once_however_it_is_written(tmp_path: Path) -> None:
    spec = parse({"label": "y", "feature": [{"name": "a", "encoding": "vocabulary", "min_count": 3}]})
    written_csv(tmp_path / "log.csv", {"y": ["1"] * 8, "a": ["26.0", "26", "26.00", "1e5", "1e5", "7", "7.0", ""]})
    (split,) = plan_splits(Source("csv", (str(tmp_path / "log.csv"),)), spec)
    (records,) = read_records(split, spec)
    vocabulary = Vocabulary.of(merge_counts([count_values(records, spec, 0)]), spec.min_count(0))
    assert vocabulary.values.to_pylist() == [b"26"]
    assert Encoder(spec.with_vocabulary({0: 1}), {0: vocabulary}).encode(records).ids.tolist() == [2, 2, 2, 1, 1, 1, 1, 0]


def noticed(column: pa.Array, which: int) -> int:
    counts = np.zeros(COUNTS, np.int64)
    notice_values(column, counts)
    return int(counts[which])


def test_exponents_and_large_floats_are_counted() -> None:
    with_exponent = ["1e5", "1E+05", "-1.5e17", "1.2345e+17", "9e-3", "0e0"]
    others = [
        "12e34567",
        "12e5",
        "a1e5",
        "e5",
        "1e",
        "1e+",
        "9e9999",
        "",
        "1.e5",
        "--1e5",
        "5",
        ".e5",
        "1.5",
        "-",
        "1e5x",
        "+1e5",
    ]
    assert noticed(pa.array([*with_exponent, *others, None]), EXPONENTS) == len(with_exponent)
    large = ["9007199254740992.0", "-10000000000000000.00", "9" * 30 + ".0"]
    small = ["9007199254740991.0", "9007199254740993", "09007199254740993.0", "-9007199254740991.0", "1.0"]
    assert noticed(pa.array([*large, *small, None]), LARGE) == len(large)
    assert noticed(pa.array([2.0**53, -(2.0**53), 2.0**53 - 1, None, float("nan")]), LARGE) == 2
    assert noticed(pa.array([2.0**24, 2.0**24 - 1], pa.float32()), LARGE) == 1
    assert noticed(pa.array([2**60]), LARGE) == 0


def test_the_header_says_the_rule_and_what_goes_on_keeps_it(tmp_path: Path) -> None:
    columns = {"y": ["0", "1"] * 4, "a": ["26.0", "26", "26.0", "7", "7.0", "7", "8", "9"]}
    log = written_csv(tmp_path / "log.csv", columns)
    features = tmp_path / "features.toml"
    features.write_text('label = "y"\n[[feature]]\nname = "a"\nrows = 1000\n')
    options = ["--format=csv", f"--features={features}", "--lanes=1", "--batch-size=4", "--slots=min", "--placement=order"]

    def prepared(out: Path, *more: str) -> Schedule:
        prepare.run([str(log), f"--out={out}", *options, *more])
        return Schedule(out)

    first = prepared(tmp_path / "first")
    assert (first.header.version, first.header.features.rule) == (2, 2)
    assert prepared(tmp_path / "second", f"--after={first.path}").header.version == 2
    assert first.rows_per_table() == [4]

    # As versions before rule 2 wrote it: no rule, and version 1.
    told = to_stored(first.header)
    del told["features"]["rule"]
    before = Header.of(told | {"version": 1})
    assert (before.version, before.features.rule) == (1, 1)
    assert to_stored(before) == told | {"version": 1}
    with pytest.raises(ScheduleError, match="schedule format version: must be 1 or 2; got 3"):
        Header.of(told | {"version": 3})


def test_what_goes_on_from_a_schedule_of_rule_1_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = written_csv(tmp_path / "log.csv", {"y": ["0", "1"] * 4, "a": ["26.0", "26", "26.0", "7", "7.0", "7", "8", "9"]})
    features = tmp_path / "features.toml"
    features.write_text('label = "y"\n[[feature]]\nname = "a"\nrows = 1000\n')
    options = [str(log), "--format=csv", f"--features={features}", "--lanes=1", "--batch-size=4", "--slots=min"]
    with monkeypatch.context() as patched:
        # What a feature file was to the versions before.
        patched.setattr("foreload.pipelines.samples.feature_file.RULE", 1)
        prepare.run([*options, f"--out={tmp_path / 'first'}"])
    prepare.run([*options, f"--out={tmp_path / 'second'}", f"--after={tmp_path / 'first'}"])
    second = Schedule(tmp_path / "second")
    assert (second.header.version, second.header.features.rule) == (1, 1)
    assert "rule" not in json.loads((tmp_path / "second" / "header.json").read_bytes())["features"]
    assert second.rows_per_table() == [6]  # 26.0 and 7.0 are values of their own


def test_values_that_are_missing_are_not_counted_whatever_the_source() -> None:
    for column in (pa.array(["1e5", "", None]), pa.array(["1e5", None, None])):
        assert (noticed(column, TEXTS), noticed(column, EXPONENTS)) == (1, 1)
    for column in (pa.array([2.0**53, np.nan, None]), pa.array([2.0**53, None, None])):
        assert (noticed(column, VALUES), noticed(column, LARGE)) == (1, 1)
