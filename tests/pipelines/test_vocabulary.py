"""Vocabularies counted in pieces, against a Counter."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.features import Feature, FeatureSpec, Label, Table
from foreload.pipelines.samples.records import Records
from foreload.pipelines.samples.vocabulary import Vocabulary, count_values, merge_counts

SPEC = FeatureSpec(
    (Label("y", "y"),),
    (),
    (
        Feature("a", 0, "a", "vocabulary"),
        Feature("h", 1, "h", "hash"),
        Feature("b", 0, "b", "vocabulary", "sum"),
    ),
    (Table("t", None), Table("h", 5)),
)
texts = st.text("aé€z", max_size=3) | st.none()
Row = tuple[str | None, list[str | None]]


def records(rows: Sequence[Row]) -> Records:
    labels = np.zeros((len(rows), 1), np.float32)
    columns = (
        pa.array([a for a, _ in rows], pa.string()),
        pa.array(["h"] * len(rows), pa.string()),
        pa.array([b for _, b in rows], pa.large_list(pa.string())),
    )
    return Records(labels, np.zeros((len(rows), 0)), columns, None)


@given(st.lists(st.lists(st.tuples(texts, st.lists(texts, max_size=3)), max_size=8), max_size=4), st.integers(1, 3), st.randoms())
def test_values_rank_by_count_then_bytes_whatever_the_order_of_the_pieces(
    pieces: list[list[Row]], min_count: int, random: Random
) -> None:
    counted = [count_values(records(rows), SPEC, 0) for rows in pieces]
    random.shuffle(counted)
    merged = merge_counts(counted)
    expected = Counter(v for rows in pieces for a, b in rows for v in (a, *b) if v)
    assert dict(zip(merged["value"].to_pylist(), merged["count"].to_pylist(), strict=True)) == {
        value.encode(): count for value, count in expected.items()
    }
    vocabulary = Vocabulary.of(merged, min_count)
    kept = sorted((v for v, n in expected.items() if n >= min_count), key=lambda v: (-expected[v], v.encode()))
    assert vocabulary.values.to_pylist() == [v.encode() for v in kept]
    asked = [None, "", "unknown", "aa", *kept, *expected]
    ids = [0 if not v else kept.index(v) + 2 if v in kept else 1 for v in asked]
    for kind in (pa.string(), pa.large_string()):
        assert vocabulary.ids(pa.array(["?", *asked], kind).slice(1)).tolist() == ids


def test_a_vocabulary_survives_disk_and_pickling(tmp_path: Path) -> None:
    values = [f"value {i}" for i in range(1000)]
    vocabulary = Vocabulary(pa.array(values))
    vocabulary.save(tmp_path / "v.arrow")
    for again in (Vocabulary.load(tmp_path / "v.arrow"), pickle.loads(pickle.dumps(vocabulary))):
        assert len(again) == 1000
        assert again.ids(pa.array(values)).tolist() == list(range(2, 1002))
    assert [p.name for p in tmp_path.iterdir()] == ["v.arrow"]
    (tmp_path / "v.arrow").write_bytes(b"x")
    with pytest.raises(FeatureError, match="not a readable vocabulary"):
        Vocabulary.load(tmp_path / "v.arrow")
