"""The digest is what docs/definitions.md says, whatever the pieces in which it gets the rows."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from foreload.trainer.saved.saved_model import Digest

PARAMETERS = {"b.weight": np.array([[1.0, 2.0, 3.0]], np.float32), "a.bias": np.array([0.5], np.float32)}
STATE = {
    "b.weight/sum": np.array([[4.0, 5.0, 6.0]], np.float32),
    "a.bias/step": np.array(7, np.float32),
    "a.bias/avg": np.array([8.0], np.float32),
}
IDS = np.array([2, 3, 10], np.int64)
WEIGHTS = np.arange(6, dtype=np.float32).reshape(3, 2)
SUMS = np.array([[0.25], [0.5], [0.75]], np.float32)


def digest(pieces: list[slice], weights: np.ndarray = WEIGHTS) -> str:
    """Of PARAMETERS and STATE, a table whose rows come in these pieces, and a table without rows."""
    whole = Digest()
    whole.dense(PARAMETERS, STATE)
    whole.table("t")
    for piece in pieces:
        whole.rows(IDS[piece], weights[piece], SUMS[piece])
    whole.table("empty")
    return whole.hexdigest()


def test_the_digest_follows_its_definition() -> None:
    expected = b"foreload digest 1\n"
    expected += b"a.bias\n1\n" + struct.pack("<f", 0.5) + b"b.weight\n1,3\n" + struct.pack("<3f", 1, 2, 3)
    expected += b"a.bias/avg\n1\n" + struct.pack("<f", 8) + b"a.bias/step\n\n" + struct.pack("<f", 7)
    expected += b"b.weight/sum\n1,3\n" + struct.pack("<3f", 4, 5, 6) + b"table t\n"
    for number, weights, state in zip(IDS.tolist(), WEIGHTS.tolist(), SUMS.tolist(), strict=True):
        expected += struct.pack("<q2f1f", number, *weights, *state)
    expected += b"table empty\n"
    assert digest([slice(0, 3)]) == hashlib.sha256(expected).hexdigest()


def test_pieces_do_not_matter_and_every_bit_does() -> None:
    whole = digest([slice(0, 3)])
    assert digest([slice(0, 1), slice(1, 1), slice(1, 3)]) == whole
    changed = WEIGHTS.copy()
    changed[0, 0] = -0.0
    assert digest([slice(0, 3)], changed) != whole


def test_rows_without_state_are_hashed_by_id_and_weights_also_where_these_are_not_contiguous() -> None:
    rows = Digest()
    rows.table("t")
    rows.rows(IDS, np.hstack([WEIGHTS, SUMS])[:, :2], np.empty((3, 0), np.float32))
    expected = b"foreload digest 1\ntable t\n"
    for number, weights in zip(IDS.tolist(), WEIGHTS.tolist(), strict=True):
        expected += struct.pack("<q2f", number, *weights)
    assert rows.hexdigest() == hashlib.sha256(expected).hexdigest()


def test_rows_must_ascend() -> None:
    for pieces in ([slice(1, 3), slice(0, 1)], [slice(0, 2), slice(1, 3)]):
        with pytest.raises(ValueError, match="ascending order of id"):
            digest(pieces)
    rows = Digest()
    rows.table("t")
    with pytest.raises(ValueError, match="ascending order of id"):
        rows.rows(IDS[::-1], WEIGHTS, SUMS)
