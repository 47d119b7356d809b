"""The synthetic source: a function of seed and row, Zipf-like, spread over the ids, with labels that can be learned."""

from __future__ import annotations

import math

import numpy as np
import pytest
from memory_source import read_split

from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.features import (
    KAGGLE_ROWS,
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
)
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.sources import Source, plan_splits
from foreload.pipelines.sources.synthetic import SPLIT_ROWS, Generator

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
# Of samples 5 .. 7 of seed 7: labels, the first dense columns x 2^16, and ids in the first tables, written down once and for all.
LABELS = [1.0, 0.0, 0.0]
DENSE = [[-42897.0, 28800.0, 30432.0], [-43136.0, 33054.0, -4508.0], [-31009.0, 7166.0, -42065.0]]
IDS = [[1083, 954, 1277], [245, 569, 313], [901698, 6028094, 7750384], [1890158, 2166771, 1580756], [7, 262, 27], [2, 10, 4]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Generator(1, KAGGLE_ROWS).rows(0, 100_000)


def test_a_row_is_a_function_of_seed_and_number(rows: Rows) -> None:
    again = Generator(1, KAGGLE_ROWS).rows(70_000, 70_123)
    for whole, part in zip(rows, again, strict=True):
        assert np.array_equal(whole[..., 70_000:70_123], part, equal_nan=whole.dtype == np.float64)
    other = Generator(2, KAGGLE_ROWS).rows(0, 1000)
    assert not np.array_equal(other[2], rows[2][:, :1000])


def test_these_rows_never_change() -> None:
    labels, dense, ids = Generator(7, KAGGLE_ROWS).rows(5, 8)
    assert labels.tolist() == LABELS
    assert (dense[:3] * 65536).tolist() == DENSE
    assert ids[:6].tolist() == IDS


def test_ranks_follow_a_zipf_law(rows: Rows) -> None:
    for place in (0, 2, 8, 16):
        size = KAGGLE_ROWS[place]
        # The sum of rank^-1.1 over the table, beyond a million by its integral.
        total = sum((r + 1) ** -1.1 for r in range(min(size, 10**6))) + (10 * (1e6**-0.1 - size**-0.1) if size > 10**6 else 0)
        counts = np.sort(np.unique(rows[2][place], return_counts=True)[1])[::-1] / 100_000
        for rank in range(min(size, 5)):
            share = (rank + 1) ** -1.1 / total
            # Buckets take the integral of the density, not its value, hence the few percent.
            assert counts[rank] == pytest.approx(share, rel=0.12), (place, rank)


def test_ids_are_spread_over_the_whole_table(rows: Rows) -> None:
    for place, size in enumerate(KAGGLE_ROWS):
        ids = rows[2][place]
        assert ids.min() >= 0
        assert ids.max() < size
        if size > 1000:
            tenths = np.bincount(np.unique(ids) * 10 // size, minlength=10)
            assert tenths.min() > 0.5 * tenths.mean(), place


def test_every_rank_has_an_id_of_its_own() -> None:
    generator = Generator(3, (2, 3, 4, 10, 200, 1025, 1 << 20, *KAGGLE_ROWS[7:]))
    ids = generator.rows(0, 50_000)[2]
    assert [len(np.unique(ids[k])) for k in range(5)] == [2, 3, 4, 10, 200]
    tiny = Generator(3, (1,) * 26).rows(0, 10)[2]
    assert not tiny.any()


def test_with_a_limit_on_values_accesses_do_not_depend_on_the_rows_of_a_table() -> None:
    small = Generator(1, (100_000,) * 26, 5000).rows(0, 20_000)
    large = Generator(1, (1 << 40,) * 26, 5000).rows(0, 20_000)
    assert np.array_equal(small[0], large[0])
    assert np.array_equal(small[1], large[1], equal_nan=True)
    for a, b in zip(small[2], large[2], strict=True):
        firsts = [np.unique(ids, return_index=True, return_inverse=True) for ids in (a, b)]
        of_small, of_large = (index[inverse] for _, index, inverse in firsts)
        assert np.array_equal(of_small, of_large)
        assert b.max() > 1 << 39


def test_dense_values_are_exact_centred_and_sometimes_missing(rows: Rows) -> None:
    dense = rows[1]
    known = dense[~np.isnan(dense)]
    assert np.array_equal(known, known.astype(np.float32))
    assert abs(known).max() < 1
    assert abs(np.nanmean(dense, axis=1)).max() < 0.01
    assert np.isnan(dense).mean() == pytest.approx(1 / 16, rel=0.05)


def test_labels_can_be_learned(rows: Rows) -> None:
    labels, dense, ids = rows
    assert 0.2 < labels.mean() < 0.3
    # A naive Bayes model: the log odds of every value, smoothed, on one half; the score of the other half is their sum.
    half = len(labels) // 2
    prior = labels[:half].mean()
    score = np.zeros(half)
    for column in (*ids, *np.nan_to_num(np.floor(dense * 8), nan=99).astype(np.int64)):
        values, places = np.unique(column, return_inverse=True)
        shown = np.bincount(places[:half], minlength=len(values))
        clicks = np.bincount(places[:half], labels[:half], len(values))
        rate = (clicks + 50 * prior) / (shown + 50)
        score += (np.log(rate / (1 - rate)) - math.log(prior / (1 - prior)))[places[half:]]
    ranks = np.empty(half)
    ranks[np.argsort(score)] = np.arange(1, half + 1)
    positive = labels[half:] == 1
    auc = (ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / (positive.sum() * (~positive).sum())
    assert 0.74 < auc < 0.82


def test_splits_cut_the_rows_without_changing_them() -> None:
    spec = FeatureSpec.synthetic(rows=50)
    source = Source("synthetic", rows=SPLIT_ROWS + 10, seed=1)
    planned = plan_splits(source, spec)
    assert [(s.start, s.end, s.split_index) for s in planned] == [(0, SPLIT_ROWS, 0), (SPLIT_ROWS, SPLIT_ROWS + 10, 1)]
    (last,) = read_split(planned[1], spec)
    labels, dense, ids = Generator(1, (50,) * 26).rows(SPLIT_ROWS, SPLIT_ROWS + 10)
    assert np.array_equal(last.samples.labels[:, 0], labels)
    assert np.array_equal(last.samples.dense, np.nan_to_num(dense.T).astype(np.float32))
    assert np.array_equal(last.samples.ids, ids.T.reshape(-1))
    assert last.rejected == 0


def test_features_may_be_fewer_and_encoded_otherwise() -> None:
    spec = FeatureSpec(
        (Label("label", "label"),),
        (Dense("x", "I2", "none"),),
        (Feature("c", 0, "C3", "hash"),),
        (Table("c", 1000),),
        order_by="C1",
    )
    (piece,) = read_split(plan_splits(Source("synthetic", rows=100), spec)[0], spec)
    assert isinstance(piece.samples, Samples)
    assert piece.samples.ids.min() >= 1
    assert piece.keys is not None
    assert len(piece.keys) == 100
    with pytest.raises(FeatureError, match=r"column C27: synthetic data has label, I1 .. I13 and C1 .. C26 only"):
        plan_splits(
            Source("synthetic", rows=1),
            FeatureSpec((Label("label", "label"),), (), (Feature("c", 0, "C27", "hash"),), (Table("c", 9),)),
        )
