"""Rows as bytes: written as they are stored, and taken apart (`layout` says how they look)."""

from __future__ import annotations

import numpy as np

from foreload.base.compiled import nb


# The kernels move 4-byte words, as int32, so that no bit changes on the way; an id is two of them, ids[i, 0] and ids[i, 1].
@nb.njit(nogil=True, cache=True)
def _encode(weights, state, ids, tags, W, S, out):  # type: ignore[no-untyped-def]
    for i in range(ids.shape[0]):
        for j in range(W):
            out[i, j] = weights[i, j]
        for j in range(S):
            out[i, W + j] = state[i, j]
        out[i, W + S] = ids[i, 0]
        out[i, W + S + 1] = ids[i, 1]
        out[i, W + S + 2] = tags[i]


@nb.njit(nogil=True, cache=True)
def _encode_at(weights, state, ids, tags, places, positions, W, S, out):  # type: ignore[no-untyped-def]
    for i in range(places.shape[0]):
        of, to = places[i], positions[i]
        if tags[of] == 0:  # never stored: what is in its columns means nothing
            for j in range(out.shape[1]):
                out[to, j] = 0
            continue
        for j in range(W):
            out[to, j] = weights[of, j]
        for j in range(S):
            out[to, W + j] = state[of, j]
        out[to, W + S] = ids[of, 0]
        out[to, W + S + 1] = ids[of, 1]
        out[to, W + S + 2] = tags[of]


@nb.njit(nogil=True, cache=True)
def _decode(rows, W, S, weights, state, ids, tags):  # type: ignore[no-untyped-def]
    for i in range(rows.shape[0]):
        for j in range(W):
            weights[i, j] = rows[i, j]
        for j in range(S):
            state[i, j] = rows[i, W + j]
        ids[i, 0] = rows[i, W + S]
        ids[i, 1] = rows[i, W + S + 1]
        tags[i] = rows[i, W + S + 2]


def encode_rows(
    weights: np.ndarray, state: np.ndarray, ids: np.ndarray, tags: np.ndarray, W: int, S: int, out: np.ndarray
) -> None:
    """Write n rows as they are stored.

    weights: float32 [n, >= W]; state: float32 [n, >= S]; ids: int64 [n]; tags: int32 [n]; written: out, uint8 [n, 4 * (W + S) + 12].
    The last axis of each is contiguous. Bits are copied as they are, NaN payloads included.
    """
    _encode(weights.view(np.int32), state.view(np.int32), ids.view(np.int32).reshape(-1, 2), tags, W, S, out.view(np.int32))


def encode_rows_at(
    rows: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    places: np.ndarray,
    positions: np.ndarray,
    W: int,
    S: int,
    out: np.ndarray,
) -> None:
    """out[positions[i]] = row places[i] as it is stored; all zeros, id and tag too, for a row of tag 0, which was never stored.

    rows: weights, state, ids, tags as in `encode_rows`; places, positions: int64 [n]; out: uint8 [m, 4 * (W + S) + 12], contiguous.
    """  # fmt: skip
    weights, state, ids, tags = rows
    bits = (weights.view(np.int32), state.view(np.int32), ids.view(np.int32).reshape(-1, 2), tags)
    _encode_at(*bits, places, positions, W, S, out.view(np.int32))


def decode_rows(
    rows: np.ndarray, W: int, S: int, weights: np.ndarray, state: np.ndarray, ids: np.ndarray, tags: np.ndarray
) -> None:
    """Take n stored rows apart: the reverse of `encode_rows`.

    rows: uint8 [n, 4 * (W + S) + 12]. Written: weights float32 [n, >= W] (columns below W), state float32 [n, >= S] (below S),
    ids int64 [n], tags int32 [n]. The last axis of each is contiguous.
    """
    _decode(rows.view(np.int32), W, S, weights.view(np.int32), state.view(np.int32), ids.view(np.int32).reshape(-1, 2), tags)
