"""Initial rows: the documented definition, written out in Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.base.hashing import key
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.samples.initial_values import InitialValues

MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, table: int, row: int, column: int, bound: float) -> np.float32:
    b = mixed(key(seed, table, row) ^ (column // 2))
    u = b >> 40 if column % 2 == 0 else (b >> 16) & 0xFFFFFF
    return np.float32((u - 2**23) * 2.0**-23) * np.float32(bound)


def normal(seed: int, table: int, row: int, column: int, deviation: float) -> np.float32:
    draws = [mixed(key(seed, table, row) ^ (3 * column + i)) for i in range(3)]
    total = sum(b >> shift & 0xFFFF for b in draws for shift in (0, 16, 32, 48))
    return np.float32(total - 393210) * np.float32(2.0**-16) * np.float32(deviation)


def layout_of(table: int, rows: int, dimension: int, rule: str) -> RowLayout:
    return RowLayout(table, "t", rows, (("weights", dimension),), "sgd", rule)


@given(
    st.integers(0, 2**63), st.integers(0, 100), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.integers(1, 7),
    st.integers(0, 3), st.integers(1, 10**9), st.sampled_from(["uniform", "uniform:0.05", "xavier", "normal:0.3", "zeros"]),
)  # fmt: skip
def test_initial_weights_follow_the_definition(
    seed: int, table: int, ids: list[int], D: int, further: int, rows: int, rule: str
) -> None:
    out = np.full((len(ids), D + further), np.nan, np.float32)
    initial_weights(seed, layout_of(table, rows, D, rule), np.array(ids, np.int64), out)
    of_row = {"uniform": 1 / np.sqrt(rows), "uniform:0.05": 0.05, "xavier": np.sqrt(6 / (rows + D)), "zeros": 0.0}
    expected = np.array(
        [
            [
                normal(seed, table, i, j, 0.3) if rule == "normal:0.3" else uniform(seed, table, i, j, of_row[rule])
                for j in range(D)
            ]
            for i in ids
        ],
        np.float32,
    ).reshape(len(ids), D)
    if rule == "zeros":
        expected[:] = 0.0
    assert out[:, :D].tobytes() == expected.tobytes()
    assert not out[:, D:].any()


def test_initial_weights_are_spread_evenly_within_the_scale() -> None:
    out = np.empty((20_000, 8), np.float32)
    initial_weights(1, layout_of(2, 4, 8, "uniform"), np.arange(20_000), out)
    assert np.abs(out).max() <= 0.5
    assert np.abs(out.mean(axis=0)).max() < 0.01
    assert np.abs(out.std(axis=0) - 0.5 / np.sqrt(3)).max() < 0.01


def test_normal_weights_are_normal() -> None:
    out = np.empty((20_000, 8), np.float32)
    initial_weights(1, layout_of(2, 4, 8, "normal:0.5"), np.arange(20_000), out)
    assert np.abs(out.mean(axis=0)).max() < 0.02
    assert np.abs(out.std(axis=0) - 0.5).max() < 0.01
    for within, share in ((0.5, 0.6827), (1.0, 0.9545)):
        assert abs((np.abs(out) < within).mean() - share) < 0.005


@pytest.mark.parametrize(
    "text", ["", "uniform:", "uniform:0", "uniform:-1", "uniform:nan", "uniform:1e99", "normal", "normal:1e-60", "he", 1, None]
)
def test_what_is_no_rule_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"must be uniform, uniform:A, xavier, normal:S or zeros.*got"):
        InitialValues.parse(text)


@pytest.mark.parametrize("text", ["uniform", "uniform:0.05", "xavier", "normal:0.3", "zeros"])
def test_a_rule_is_written_as_it_is_read(text: str) -> None:
    assert str(InitialValues.parse(text)) == text
