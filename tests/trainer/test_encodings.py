"""Encodings that people otherwise write by hand: the trainer, a served model and plain Python agree on 10,000 raw records, bit for bit."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foreload
from foreload.pipelines.errors import FeatureError, RecordError
from foreload.pipelines.samples.convert import convert
from foreload.pipelines.samples.dense import DenseStatistics
from foreload.pipelines.samples.encode import Encoder, hashed_ids
from foreload.pipelines.samples.feature_file import parse
from foreload.pipelines.samples.features import FeatureSpec, features_of, features_stored
from foreload.trainer.commands import predict
from foreload.trainer.serving import raw_values, standalone
from foreload.trainer.serving.torch_folder import encoding_of

RECORDS = 10_000
FEATURES: dict[str, Any] = {
    "label": "y",
    "text": {"missing": ["NULL", "-9"]},
    "dense": [
        {"name": "price", "transform": "min_max", "fill": 2},
        {"name": "scaled", "column": "price", "transform": "min_max"},
        {"name": "hour", "column": "when", "part": "hour", "transform": "none", "fill": -1},
        {"name": "v", "size": 3, "separator": " "},
    ],
    "feature": [
        {"name": "recent", "column": "seen", "rows": 1000, "pooling": "mean", "padding": ["PAD", 0], "max_values": 2, "keep": "last"},
        {"name": "first", "column": "seen", "rows": 1000, "pooling": "sum", "max_values": 2, "fill": "none"},
        {"name": "item", "rows": 50, "encoding": "id", "padding": -1},
        {"name": "filled", "column": "item2", "rows": 50, "encoding": "id", "fill": 49},
        {"name": "at", "column": "when", "rows": 24, "encoding": "id", "part": "hour"},
        {"name": "day", "column": "when", "rows": 1000, "part": "weekday"},
        {"name": "stamp", "rows": 24, "encoding": "id", "part": "hour", "time_unit": "ms", "padding": []},
        {"name": "price_too", "column": "price", "rows": 1000},
    ],
}  # fmt: skip


def columns(count: int = RECORDS) -> dict[str, list[Any]]:
    draw = random.Random(7)

    def time() -> str:
        when = datetime(1900, 1, 1, tzinfo=UTC) + timedelta(seconds=draw.randrange(10**10))
        zone = draw.choice(["", "Z", " UTC", "+05:30", "-0800"])
        text = when.strftime(draw.choice(["%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.123456789", "%Y-%m-%d %H:%M"]))
        return draw.choice([text + zone, text + zone, when.strftime("%Y-%m-%d"), "NULL", ""])

    return {
        "price": [draw.choice(["", "NULL", "-9.0", f"{draw.uniform(-100, 1e6)!r}", f"{draw.randrange(2**60)}"]) for _ in range(count)],
        "when": [time() for _ in range(count)],
        "v": [draw.choice(["", "NULL", "0.1  -3e5", " ".join(f"{draw.gauss(0, 1)!r}" for _ in range(3))]) for _ in range(count)],
        "seen": ["|".join(draw.choice(["a", "b", "PAD", "0", "0.0", "", "NULL", "7.0"]) for _ in range(draw.randrange(7))) for _ in range(count)],
        "item": [draw.choice(["-1", " -1 ", "-1.0", "", "NULL", "3", "49", " 7"]) for _ in range(count)],
        "item2": [draw.choice(["", "NULL", "3", "48.0"]) for _ in range(count)],
        "stamp": [draw.choice(["", str(draw.randrange(-(10**13), 10**13)), f"{draw.randrange(10**12)}.75"]) for _ in range(count)],
    }  # fmt: skip


def encoders(
    arrays: Mapping[str, pa.Array], features: dict[str, Any] = FEATURES
) -> tuple[FeatureSpec, Encoder, raw_values.Encoder, Any]:
    spec = features_of(features_stored(parse(features))).unlabelled()
    records = convert(arrays, spec, "test", lambda rows: rows)
    assert not records.causes, records.causes
    encoder = Encoder(spec, {}, DenseStatistics.of(records.dense).scales(spec.dense))
    about = encoding_of(spec, encoder) | {"tables": [{"table_rows": rows} for rows in spec.table_rows]}
    return spec, encoder, raw_values.Encoder(about, {}), encoder.encode(records)


def bags(samples: Any, spec: FeatureSpec, name: str) -> list[list[int]]:
    place, width = [one.name for one in spec.features].index(name), len(spec.features)
    bounds = samples.offsets.tolist()
    return [samples.ids[bounds[k] : bounds[k + 1]].tolist() for k in range(place, len(samples) * width, width)]


def check_served(served: raw_values.Encoder, given: Mapping[str, Sequence[Any]], spec: FeatureSpec, samples: Any) -> None:
    dense, lookups = served.encode(given)
    assert dense.tobytes() == samples.dense.tobytes()
    for feature in spec.features:
        ids, offsets = lookups[feature.name]
        assert [bag.tolist() for bag in np.split(ids, offsets[1:])] == bags(samples, spec, feature.name), feature.name


def hashed(text: str) -> int:
    return int(hashed_ids(pa.array([text]), 1000)[0])


def utc(text: str) -> datetime | None:
    if text in ("", "NULL"):
        return None
    when = datetime.fromisoformat(text.replace(" UTC", "Z").replace(".123456789", ".123456"))
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)


def test_ten_thousand_records_are_what_plain_python_and_a_served_model_make_of_them() -> None:
    raw = columns()
    spec, _, served, samples = encoders({name: pa.array(values) for name, values in raw.items()})
    check_served(served, raw, spec, samples)
    times = [utc(text) for text in raw["when"]]
    assert [hour for (hour,) in bags(samples, spec, "at")] == [0 if when is None else when.hour for when in times]
    assert [day for (day,) in bags(samples, spec, "day")] == [
        0 if when is None else hashed(str(when.weekday())) for when in times
    ]
    assert samples.dense[:, 2].tolist() == [-1 if when is None else when.hour for when in times]
    missing = {"", "NULL", "-9.0"}
    prices = np.array([math.nan if text in missing else float(text) for text in raw["price"]])
    known = np.where(np.isnan(prices), 2.0, prices)
    assert samples.dense[:, 0].tobytes() == ((known - known.min()) / (known.max() - known.min())).astype(np.float32).tobytes()
    least, largest = np.nanmin(prices), np.nanmax(prices)
    scaled = np.nan_to_num((prices - least) / (largest - least), nan=0.0).astype(np.float32)
    assert samples.dense[:, 1].tobytes() == scaled.tobytes()
    vectors = [[float(x or 0) for x in text.split(" ")] if text not in ("", "NULL") else [0.0] * 3 for text in raw["v"]]
    assert samples.dense[:, 3:].tobytes() == np.array(vectors, np.float32).tobytes()
    text_of = {"0.0": "0", "7.0": "7"}
    for recent, first, text in zip(bags(samples, spec, "recent"), bags(samples, spec, "first"), raw["seen"], strict=True):
        values = [text_of.get(value, value) for value in text.split("|")] if text not in ("", "NULL") else []
        assert recent == [hashed(value) for value in values if value not in ("PAD", "0", "", "NULL")][-2:]
        assert first == [hashed("none" if value in ("", "NULL") else value) for value in values or [""]][:2]
    assert bags(samples, spec, "item") == [
        [] if text.strip() in ("-1", "-1.0", "", "NULL") else [int(text)] for text in raw["item"]
    ]
    assert bags(samples, spec, "filled") == [[49 if text in ("", "NULL") else int(float(text))] for text in raw["item2"]]
    hours = [0 if not text else math.floor(float(text) / 1000) // 3600 % 24 for text in raw["stamp"]]
    assert [hour for (hour,) in bags(samples, spec, "stamp")] == hours


def test_typed_columns_are_encoded_as_text_is() -> None:
    zone = timezone(timedelta(hours=-7))
    when = [datetime(1969, 12, 31, 23, 59, 59, 999999), None, datetime(2024, 3, 31, 2, 30), datetime(2000, 2, 29)]
    raw: dict[str, list[Any]] = {
        "price": [1, None, 2**53 + 1, -9], "when": when, "v": [[1.0, None, 3.0], None, [], [0, 0, 0]],
        "seen": [["a", None, "PAD"], [], None, ["b"] * 5], "item": [-1, None, 3, 49], "item2": [None, 1, 2, 3],
        "stamp": [-1, 0, 1_700_000_000_000, None],
    }  # fmt: skip
    typed = {name: pa.array(values) for name, values in raw.items()}
    spec, _, served, samples = encoders(typed)
    check_served(served, raw, spec, samples)
    assert bags(samples, spec, "at") == [[23], [0], [2], [0]]
    assert bags(samples, spec, "stamp") == [[23], [0], [22], [0]]
    assert bags(samples, spec, "recent") == [[hashed("a")], [], [], [hashed("b")] * 2]
    for unit in ("s", "ms", "us", "ns"):
        times = pa.array(when, pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
        again = encoders(typed | {"when": times})
        assert bags(again[3], spec, "at") in ([[23], [0], [2], [0]], [[0], [0], [2], [0]])
    aware = [one if one is None else one.replace(tzinfo=zone) for one in when]
    spec, _, served, samples = encoders(typed | {"when": pa.array(aware, pa.timestamp("us", "America/Phoenix"))})
    check_served(served, raw | {"when": aware}, spec, samples)
    assert bags(samples, spec, "at") == [[6], [0], [9], [7]]
    numpy_times = {"when": np.array(["2024-03-31T02:30", "NaT"], "datetime64[ns]")}
    listed = raw_values.columns_of(numpy_times, ["when"])["when"]
    assert [raw_values.part_of_time(value, {"part": "hour"}, raw_values.Rule(2, ())) for value in listed] == [2, None]


@given(st.datetimes(), st.integers(-1439, 1439) | st.none(), st.sampled_from(["hour", "weekday"]))
def test_a_part_of_any_time_is_that_of_the_time_in_utc(when: datetime, minutes: int | None, part: str) -> None:
    when = when.replace(microsecond=0)
    text = when.isoformat(" ")
    if minutes is not None:
        text += f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
    days = (when.toordinal() - datetime(2001, 1, 1).toordinal()) * 1440 + when.hour * 60 + when.minute - (minutes or 0)
    expected = days // 60 % 24 if part == "hour" else days // 1440 % 7  # 2001-01-01 is a Monday
    assert raw_values.part_of_time(text, {"part": part}, raw_values.Rule(2, ())) == expected


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("when", "2024-02-30", "a time must be"), ("when", "1700000000", "a time must be"), ("when", "2024-01-01 24:00", "a time must be"),
        ("when", "2024-01-01 12:00:60", "a time must be"), ("when", "2024-10-27 02:30 CEST", "a time must be"), ("when", "inf", "a time must be"),
        ("when", "2024-01-01 12:00+24:00", "a time must be"), ("stamp", "nan", "a time must be"), ("stamp", "1e300", "a time must be"),
        ("stamp", "9" * 30, "a time must be"), ("v", "1 2", "a vector must have 3 numbers, as size says, and has 2"), ("v", "1 2 3 4", "and has 4"),
        ("v", "1 x 3", "a dense value must be"), ("v", "1 nan 3", "a dense value must be"), ("v", "1 1e39 3", "a dense value must be"),
        ("item", "-2", "an id must be"), ("item", "50", "an id must be"), ("item2", "-1", "an id must be"), ("price", "inf", "a dense value must be"),
    ],
)  # fmt: skip
def test_a_malformed_value_is_located_in_both(column: str, value: str, rule: str) -> None:
    raw = columns(3)
    spec, _, served, _ = encoders({name: pa.array(values) for name, values in raw.items()})
    raw[column][1] = value
    (reject,) = convert({name: pa.array(values) for name, values in raw.items()}, spec, "log", lambda rows: rows + 1).rejects
    assert (reject.line, reject.field) == (2, column)
    assert rule in reject.reason
    with pytest.raises(ValueError, match=rf"records\[1\]: {column}: ") as error:
        served.encode(raw)
    assert rule in str(error.value)


def test_rules_of_a_feature_file() -> None:
    def refused(of: str, entry: dict[str, Any], message: str) -> None:
        base = {"name": "a", "rows": 10} if of == "feature" else {"name": "a"}
        document = {"label": "y", "feature": [{"name": "z", "rows": 10}], "text": {"missing": ["NULL"]}}
        document[of] = [base | entry]
        with pytest.raises(FeatureError, match=message):
            parse({"feature": [{"name": "z", "rows": 10}]} | document)

    refused("feature", {"padding": 1.5}, "padding must be a text or a whole number, not 1.5")
    refused("feature", {"padding": True}, "padding must be a text or a whole number, not True")
    refused("feature", {"fill": "NULL"}, "fill must be a value that is not missing itself")
    refused("feature", {"fill": 10, "encoding": "id"}, "fill must be an id, a whole number in 0 .. 9, not '10'")
    refused("feature", {"max_values": 2}, "max_values is for several values a sample")
    refused("feature", {"max_values": 0, "pooling": "sum"}, "max_values must be a whole number of at least 1")
    refused("feature", {"keep": "last", "pooling": "sum"}, "add max_values")
    refused("feature", {"keep": "best", "pooling": "sum", "max_values": 1}, "keep must be one of first, last")
    refused("feature", {"part": "month"}, "part must be one of hour, weekday, not 'month'")
    refused("feature", {"time_unit": "s"}, 'add part = "hour"')
    refused("feature", {"part": "hour", "time_unit": "m"}, "time_unit must be one of s, ms, us, ns, not 'm'")
    refused("feature", {"padding_idx": 0}, "it is called padding here")
    refused("dense", {"fill": math.nan}, "fill must be a finite number within float32, not nan")
    refused("dense", {"fill": 10**400}, "fill must be a finite number within float32")
    refused("dense", {"fill": "0"}, "fill must be a finite number within float32, not '0'")
    refused("dense", {"size": 0}, "size must be how many numbers a vector has")
    refused("dense", {"separator": " "}, "add size")
    refused("dense", {"size": 2, "separator": ""}, "separator must be a text of at least one character")
    refused("dense", {"size": 2, "part": "hour"}, "leave out one of them")
    refused("label", {"negative": 1}, "negative must be 0 or -1")
    refused("label", {"negative": -1, "at_least": 1}, "negative is for clicks")


FILE = """
label = "y"
[text]
missing = ["NULL"]
[[feature]]
name = "recent"
column = "seen"
rows = 50
pooling = "mean"
padding = ["PAD", 0]
max_values = 2
keep = "last"
[[feature]]
name = "item"
rows = 50
encoding = "id"
padding = -1
[[feature]]
name = "day"
column = "when"
encoding = "vocabulary"
part = "weekday"
fill = 3
[[feature]]
name = "price_too"
column = "price"
rows = 100
[[dense]]
name = "price"
transform = "min_max"
fill = 2
[[dense]]
name = "hour"
column = "when"
part = "hour"
transform = "standard"
[[dense]]
name = "v"
size = 3
separator = " "
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 10,000 records as log.csv, labels -1 and 1, and as log.parquet."""
    folder = tmp_path_factory.mktemp("encodings")
    raw = columns()
    table = pa.table({name: raw[name] for name in ("seen", "item", "when", "v")})
    table = table.append_column("price", pa.array([text.replace("-9.0", "") for text in raw["price"]]))
    table = table.append_column("y", pa.array([-1 if len(text) % 2 else 1 for text in raw["seen"]]))
    arrow_csv.write_csv(table, folder / "log.csv")
    pq.write_table(table, folder / "log.parquet")
    (folder / "features.toml").write_text(FILE)
    return folder


def test_trainer_predict_and_exported_model_agree_on_ten_thousand_raw_records(log: Path) -> None:
    given: dict[str, Any] = {"features": log / "features.toml", "batch_size": 512, "lanes": 2}
    schedule = foreload.prepare(log / "log.csv", out=log / "schedule", eval_source=[log / "log.csv"], **given)
    run = foreload.train(schedule, run=log / "run", store="local:1", model="wide_deep", dim=4)
    logits = run.predict(log / "log.csv", logits=True)
    assert len(logits) == RECORDS
    assert run.predict(log / "log.parquet", logits=True).tobytes() == logits.tobytes()
    # The records in the trainer's own steps, which are those of its evaluation.
    assert run.predict(log / "log.csv", steps_of=schedule, logits=True).tobytes() == logits.tobytes()
    # The exported model, given its records as the slices of `predict` are, and all in this process.
    run.export_torch(log / "called")
    with predict.run(str(log / "run"), None, predict.Records((str(log / "log.csv"),)), logits=True) as predictions:
        here = np.concatenate(list(predictions.batches))
    about = json.loads((log / "called" / standalone.ABOUT).read_text())
    alone = list(standalone.read_csv(str(log / "log.csv"), about))
    assert standalone.load(log / "called").predict(alone, batch_size=256, logits=True).tobytes() == here.tobytes()
    np.testing.assert_allclose(here, logits, rtol=0, atol=1e-5)


def test_labels_of_both_kinds_are_refused_with_a_record(log: Path) -> None:
    lines = (log / "log.csv").read_text().splitlines()
    lines[7] = lines[7].rpartition(",")[0] + ",0"
    (log / "mixed.csv").write_text("\n".join(lines) + "\n")
    given: dict[str, Any] = {"features": log / "features.toml", "batch_size": 512, "lanes": 2}
    with pytest.raises(
        RecordError,
        match=r"label y: must be 0 and 1, or -1 and 1, in all records; it is 0 in 1 and -1 in .*, as at .*mixed.csv:8;",
    ):
        foreload.prepare(log / "mixed.csv", out=log / "mixed", **given)
    (log / "strict.toml").write_text("label_negative = -1\n" + FILE)
    given["features"] = log / "strict.toml"
    with pytest.raises(RecordError, match=r"mixed.csv:8: y: a label must be -1 or 1, not '0'"):
        foreload.prepare(log / "mixed.csv", out=log / "mixed", **given)
