"""Rows at rest: the fields that name them, their sizes, and bit-exact round trips."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.cache.errors import CacheError
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import PARITY_BIT, decode_rows, encode_rows, fields, unpack

PARTS = (("weights", 16), ("linear", 1))


@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0), ("adagrad", 17), ("rowwise_adagrad", 2), ("adam", 34), ("ftrl", 34)]
)
def test_a_row_is_its_weights_its_state_and_twelve_bytes(optimizer: str, state: int) -> None:
    layout = RowLayout(0, "sites", 100, PARTS, optimizer)
    assert (layout.width, layout.state_width, layout.init_columns) == (17, state, 16)
    assert layout.row_bytes == 4 * (17 + state) + 12
    assert layout.scale == np.float32(0.1)


def test_a_layout_refuses_what_cannot_be() -> None:
    for rows, parts, optimizer, message in [
        (0, PARTS, "sgd", "table sites: rows must be at least 1; got 0"),
        (5, (), "sgd", "table sites: needs parts of 1 to 1048576 columns each"),
        (5, (("weights", 0),), "sgd", "table sites: needs parts of 1 to 1048576 columns each"),
        (5, PARTS, "lion", "row optimizer: must be one of .*; got 'lion'"),
    ]:
        with pytest.raises(CacheError, match=message):
            RowLayout(0, "sites", rows, parts, optimizer)


def test_a_field_holds_table_and_ordinal() -> None:
    got = fields(np.array([0, 5, 32767], np.int16), np.array([7, 2**48 - 1, 0]))
    assert got.dtype == np.uint64
    assert got.tolist() == [7, 5 << 48 | 2**48 - 1, 32767 << 48]
    assert [part.tolist() for part in unpack(got | PARITY_BIT)] == [[0, 5, 32767], [7, 2**48 - 1, 0]]


@given(st.integers(0, 20), st.integers(1, 9), st.integers(0, 9), st.integers(0, 3), st.integers(0, 2**32))
def test_decoding_gives_back_every_bit(n: int, W: int, S: int, spare: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def bits(rows: int, columns: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32).view(np.float32)

    weights, state = bits(n, W + spare), bits(n, S + spare)
    ids = rng.integers(-(2**63), 2**63 - 1, n)
    tags = rng.integers(0, 2**31, n).astype(np.int32)
    out = np.empty((n, 4 * (W + S) + 12), np.uint8)
    encode_rows(weights, state, ids, tags, W, S, out)
    for i in range(n):
        assert out[i].tobytes() == weights[i, :W].tobytes() + state[i, :S].tobytes() + ids[i].tobytes() + tags[i].tobytes()

    weights2, state2, ids2, tags2 = bits(n, W + spare), bits(n, S + spare), np.empty(n, np.int64), np.empty(n, np.int32)
    before = weights2.copy()
    decode_rows(out, W, S, weights2, state2, ids2, tags2)
    assert weights2[:, :W].tobytes() == weights[:, :W].tobytes()
    assert state2[:, :S].tobytes() == state[:, :S].tobytes()
    assert weights2[:, W:].tobytes() == before[:, W:].tobytes()
    assert np.array_equal(ids, ids2)
    assert np.array_equal(tags, tags2)
