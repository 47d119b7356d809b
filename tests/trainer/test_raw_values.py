"""Raw records as a served model encodes them, in NumPy alone: the ids and dense values that the trainer's encoder makes of them, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.base.hashing import hash_strings
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.convert import convert
from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.feature_file import parse
from foreload.pipelines.samples.vocabulary import Vocabulary, text_buffers
from foreload.trainer.serving import raw_values
from foreload.trainer.serving.torch_folder import encoding_of

FEATURES: dict[str, Any] = {
    "label": "label",
    "text": {"missing": ["none", "-1"]},
    "dense": [{"name": "x", "transform": "log"}, {"name": "y", "transform": "standard"}, {"name": "z", "transform": "none"}],
    "feature": [
        {"name": "user", "rows": 1000},
        {"name": "item", "encoding": "vocabulary"},
        {"name": "ad", "encoding": "id", "rows": 50},
        {"name": "words", "rows": 100, "pooling": "mean", "separator": ", "},
        {"name": "ads", "encoding": "id", "rows": 50, "pooling": "sum"},
    ],
}
GOOD: dict[str, list[Any]] = {
    "x": ["1.5", "-3", "", None, "none", " 2 ", "+.5", "1E+3"],
    "y": [1, 2.25, None, float("nan"), -7, 1e30, 0, 3.0],
    "z": ["1e-400", "12.", "0012", "-0", "1e38", "none", "\t4", "5\n"],
    "user": ["u1", "", None, "none", "a longer text, of more than eight bytes", "x" * 16, "Zürich", " spaced "],
    "item": ["B01", "B02", "never seen", None, "none", "", "B03", "B0"],
    "ad": ["1", " 49 ", None, "", "0", "007", "-1", "-0"],
    "words": ["a, b, a", "", None, "a, , none", "none", "one", "x,y", "é, b"],
    "ads": ["3|4|5", "1", "|", None, "none", "-1|7", "49", "0|0"],
}


def encoders() -> tuple[Any, Encoder, raw_values.Encoder]:
    vocabulary = Vocabulary(pa.array([b"B01", b"B02", b"B03"], pa.large_binary()))
    spec = parse(FEATURES).unlabelled()
    (table,) = spec.vocabulary_tables
    spec = spec.with_vocabulary({table: 3})
    encoder = Encoder(spec, {table: vocabulary}, [Scale(0.5, 3.25)] * 3)
    about = encoding_of(spec, encoder) | {"tables": [{"table_rows": rows} for rows in spec.table_rows]}
    return spec, encoder, raw_values.Encoder(about, {table: {b"B01": 2, b"B02": 3, b"B03": 4}})


def check_equal(columns: Mapping[str, Sequence[Any]], typed: Mapping[str, pa.Array] | None = None) -> None:
    """What both make of columns of values that are all good. typed: the same as the trainer reads them."""
    spec, encoder, served = encoders()
    arrays = typed or {name: pa.array(values) for name, values in columns.items()}
    records = convert(arrays, spec, "test", lambda rows: rows)
    assert not records.causes
    samples = encoder.encode(records)
    dense, lookups = served.encode(columns)
    assert dense.tobytes() == samples.dense.tobytes()
    features, count = len(spec.features), len(samples)
    assert samples.offsets is not None
    for place, feature in enumerate(spec.features):
        ids, offsets = lookups[feature.name]
        bags = np.split(ids, offsets[1:])
        for sample in range(count):
            start, end = samples.offsets[sample * features + place : sample * features + place + 2]
            assert bags[sample].tolist() == samples.ids[start:end].tolist(), (feature.name, columns[feature.column][sample])


def test_ids_and_dense_values_are_the_trainers() -> None:
    check_equal(GOOD)


def test_values_of_other_types_are_the_texts_that_they_are_in_decimal() -> None:
    others: dict[str, list[Any]] = {
        "x": [Decimal("1.10"), None], "y": [True, False], "z": [1.5, float("nan")], "user": [2.0, float("nan")],
        "item": [Decimal("7.00"), Decimal(10) ** 30], "ad": [3, None], "words": [["a", None, "none"], []], "ads": [[1, 2], None],
    }  # fmt: skip
    typed = {name: pa.array(values) for name, values in others.items()}
    check_equal(others, typed | {"item": pa.array(others["item"], pa.decimal128(34, 2))})
    bytes_too = {name: [text.encode() if isinstance(text, str) else text for text in values] for name, values in GOOD.items()}
    check_equal(bytes_too, {name: pa.array(values) for name, values in GOOD.items()})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("x", "1_0"), ("x", "nan"), ("x", "inf"), ("x", "0x1"), ("x", " "), ("x", "1e39"), ("x", float("inf")), ("y", "--1"), ("y", 10**400),
        ("user", 1.5), ("user", True), ("user", float("inf")), ("user", 2.0**63), ("user", Decimal("1.5")), ("item", -0.5),
        ("ad", "50"), ("ad", "-2"), ("ad", "1.5"), ("ad", "+1"), ("ad", "0x1"), ("ad", 50), ("ad", "9" * 30), ("ads", "1|x"), ("ads", "1| "),
        ("words", [1.5]), ("ads", [1, 50]),
    ],
)  # fmt: skip
def test_a_malformed_value_is_told_with_its_record_column_and_rule(column: str, value: Any) -> None:
    spec, _, served = encoders()
    columns = {name: [*values[:2], values[0]] for name, values in GOOD.items()} | {column: [None, value, None]}
    try:
        arrays = {name: pa.array(values) for name, values in columns.items()}
        records = convert(arrays, spec, "test", lambda rows: rows)
        (reason,) = {cause.reason for cause in records.causes}
    except (SourceError, OverflowError, pa.ArrowInvalid):
        reason = "a dense value must be" if column == "y" else "a categorical value must be"
    with pytest.raises(ValueError) as error:
        served.encode(columns, first=10)
    assert str(error.value).startswith(f"records[11]: {column}: {reason}")
    assert repr(value)[:20] in str(error.value)


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_hashes_are_the_trainers(texts: list[bytes]) -> None:
    data, offsets = text_buffers(pa.array(texts, pa.binary()))
    assert raw_values.hash64(texts).tolist() == hash_strings(data, offsets).tolist()


@pytest.mark.parametrize(("columns", "width"), [(1, 1), (7, 9), (16, 16)])
@pytest.mark.parametrize("rule", ["uniform", "uniform:0.05", "xavier", "normal:0.3", "zeros"])
def test_initial_rows_are_the_trainers(columns: int, width: int, rule: str) -> None:
    ids = np.array([0, 1, 7, 1 << 40, (1 << 63) - 1], np.int64)
    wanted = np.empty((len(ids), width), np.float32)
    rows = 1 << 30
    layout = RowLayout(3, "t", rows, (("weights", columns),), "sgd", rule)
    initial_weights(-5, layout, ids, wanted)
    assert raw_values.initial_rows(-5, 3, ids, rule, rows, columns, width).tobytes() == wanted.tobytes()


def test_records_come_as_dicts_columns_tables_and_frames() -> None:
    names = ["a", "b"]
    columns: dict[str, list[Any]] = {"a": [1, 2], "b": ["x", None]}

    class Frame:
        columns = ("b", "a")

        def __getitem__(self, name: str) -> np.ndarray:
            return np.array({"a": [1, 2], "b": ["x", None]}[name], object if name == "b" else np.int64)

    table = pa.table(columns)
    for records in ([{"a": 1, "b": "x"}, {"b": None, "a": 2}], columns, table, table.to_batches()[0], Frame()):
        assert {name: list(values) for name, values in raw_values.columns_of(records, names).items()} == columns
    assert raw_values.columns_of([], names) == {"a": [], "b": []}
    with pytest.raises(ValueError, match=r"records\[1\]: must be a dict with b"):
        raw_values.columns_of([{"a": 1, "b": 1}, {"a": 2}], names)
    with pytest.raises(ValueError, match="must have the column b; got a"):
        raw_values.columns_of({"a": [1]}, names)
    with pytest.raises(ValueError, match="of one length; b has 1, a 2"):
        raw_values.columns_of({"a": [1, 2], "b": [1]}, names)
