"""Initial rows: the documented definition, written out in Python integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreload.base.hashing import key
from foreload.cache.rows.row_bytes import initial_weights

MASK = (1 << 64) - 1


def defined(seed: int, table: int, row: int, column: int, rows: int) -> np.float32:
    h = key(seed, table, row)
    x = ((h ^ (column // 2)) + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    b = x ^ (x >> 31)
    u = b >> 40 if column % 2 == 0 else (b >> 16) & 0xFFFFFF
    return np.float32((u - 2**23) * 2.0**-23) * np.float32(1 / np.sqrt(rows))


@given(
    st.integers(0, 2**63), st.integers(0, 100), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.integers(1, 7),
    st.integers(0, 3), st.integers(1, 10**9),
)  # fmt: skip
def test_initial_weights_follow_the_definition(seed: int, table: int, ids: list[int], D: int, further: int, rows: int) -> None:
    out = np.full((len(ids), D + further), np.nan, np.float32)
    initial_weights(seed, table, np.array(ids, np.int64), np.float32(1 / np.sqrt(rows)), out, D)
    expected = np.array([[defined(seed, table, i, j, rows) for j in range(D)] for i in ids], np.float32).reshape(len(ids), D)
    assert out[:, :D].tobytes() == expected.tobytes()
    assert not out[:, D:].any()


def test_initial_weights_are_spread_evenly_within_the_scale() -> None:
    out = np.empty((20_000, 8), np.float32)
    initial_weights(1, 2, np.arange(20_000), np.float32(0.5), out, 8)
    assert np.abs(out).max() <= 0.5
    assert np.abs(out.mean(axis=0)).max() < 0.01
    assert np.abs(out.std(axis=0) - 0.5 / np.sqrt(3)).max() < 0.01
