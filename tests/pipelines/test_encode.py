"""Encoding, value by value, against the reference's plain Python."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import reference_data as reference
from hypothesis import given
from hypothesis import strategies as st

from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.encode import Encoder, hashed_ids
from foreload.pipelines.samples.features import (
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
)
from foreload.pipelines.samples.records import Records
from foreload.pipelines.samples.vocabulary import Vocabulary

# Up to three words of the hash, of 8 bytes each; with characters of two bytes, and the zero byte that words are padded with.
texts = st.text("ab0é\0", max_size=18) | st.none()


@given(st.lists(texts, max_size=20), st.integers(2, 1 << 62), st.integers(0, 3))
def test_hashing_is_as_documented_for_any_text(values: list[str | None], rows: int, skip: int) -> None:
    expected = [1 + reference.hash64(v.encode()) % (rows - 1) if v else 0 for v in values]
    for kind in (pa.string(), pa.large_string()):
        ids = hashed_ids(pa.array(["x"] * skip + values, kind).slice(skip), rows)
        assert ids.dtype == np.int64
        assert ids.tolist() == expected


SPEC = FeatureSpec(
    (Label("y", "y"),),
    (Dense("d", "d", "standard"),),
    (Feature("h", 0, "h", "hash", "mean"), Feature("v", 1, "v", "vocabulary"), Feature("i", 2, "i", "id", "sum")),
    (Table("h", 9), Table("v", None), Table("i", 100)),
)
Row = tuple[list[str | None], str | None, list[int | None]]
row = st.tuples(st.lists(texts, max_size=3), texts, st.lists(st.integers(0, 99) | st.none(), max_size=3))


@given(st.lists(row, max_size=8))
def test_lookups_are_in_the_order_sample_feature_value(rows: list[Row]) -> None:
    words = Vocabulary(pa.array(["b", "a"]))
    spec = SPEC.with_vocabulary({1: len(words)})
    records = Records(
        np.zeros((len(rows), 1), np.float32),
        np.full((len(rows), 1), 3.0),
        (
            pa.array([h for h, _, _ in rows], pa.large_list(pa.string())),
            pa.array([v for _, v, _ in rows], pa.string()),
            pa.array([i for _, _, i in rows], pa.large_list(pa.int64())),
        ),
        None,
    )
    samples = Encoder(spec, {1: words}, (Scale(1.0, 4.0),)).encode(records)
    ids: list[int] = []
    counts: list[int] = []
    for h, v, i in rows:
        hashes = [1 + reference.hash64(x.encode()) % 8 if x else 0 for x in h] or [0]
        word = [{"b": 2, "a": 3}.get(v, 1) if v else 0]
        numbers = [x or 0 for x in i] or [0]
        ids += hashes + word + numbers
        counts += [len(hashes), 1, len(numbers)]
    assert samples.ids.tolist() == ids
    assert samples.offsets is not None
    assert samples.offsets.tolist() == [0, *np.cumsum(counts)]
    assert samples.dense.tolist() == [[0.5]] * len(rows)
    filtered = records.filter(np.arange(len(rows)) % 2 == 1)
    again = Encoder(spec, {1: words}, (Scale(1.0, 4.0),)).encode(filtered)
    assert again.ids.tolist() == samples.take(np.arange(1, len(rows), 2)).ids.tolist()


def test_what_encoding_needs_is_asked_for() -> None:
    with pytest.raises(FeatureError, match="table v: its rows are known once"):
        Encoder(SPEC)
    with pytest.raises(FeatureError, match="table v: its vocabulary is missing"):
        Encoder(SPEC.with_vocabulary({1: 2}))
    with pytest.raises(FeatureError, match="needs the statistics"):
        Encoder(SPEC.with_vocabulary({1: 2}), {1: Vocabulary(pa.array(["a", "b"]))})
