"""Compiled: rows as entries of the store's hashes, with their field and their bytes, and initial
rows.

A row's field is table << 48 | ordinal. A parity row's field has the top bit as well, and its
stripe's number in the place of the ordinal. Fields are sent as 8 bytes, big-endian. Cursors over
stripes (by table, then number) are packed in the same way.
"""

from __future__ import annotations

import numpy as np

from foreload.base.compiled import nb
from foreload.base.hashing import key, mix
from foreload.cache.rows.layout import RowLayout


# The kernels move 4-byte words, as int32, so that no bit changes on the way. An id is two words,
# ids[i, 0] and ids[i, 1].
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
        # The row was never stored, so the contents of its columns mean nothing.
        if tags[of] == 0:
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
    """Write n rows in their stored form.

    The last axis of each array must be contiguous. Bits are copied unchanged, including NaN
    payloads.

    Args:
        weights: float32 [n, >= W].
        state: float32 [n, >= S].
        ids: int64 [n].
        tags: int32 [n].
        W: the columns of weights to write.
        S: the columns of state to write.
        out: uint8 [n, 4 * (W + S) + 12], written.
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
    """Write selected rows in their stored form: out[positions[i]] = row places[i].

    A row of tag 0, which was never stored, becomes all zeros, including id and tag.

    Args:
        rows: weights, state, ids, tags as in `encode_rows`.
        places: int64 [n], indices into `rows`.
        positions: int64 [n], indices into `out`.
        out: uint8 [m, 4 * (W + S) + 12], contiguous.
    """
    weights, state, ids, tags = rows
    bits = (weights.view(np.int32), state.view(np.int32), ids.view(np.int32).reshape(-1, 2), tags)
    _encode_at(*bits, places, positions, W, S, out.view(np.int32))


def decode_rows(
    rows: np.ndarray, W: int, S: int, weights: np.ndarray, state: np.ndarray, ids: np.ndarray, tags: np.ndarray
) -> None:
    """Take n stored rows apart: the reverse of `encode_rows`.

    The last axis of each array must be contiguous.

    Args:
        rows: uint8 [n, 4 * (W + S) + 12].
        weights: float32 [n, >= W], written in the columns below W.
        state: float32 [n, >= S], written in the columns below S.
        ids: int64 [n], written.
        tags: int32 [n], written.
    """
    _decode(rows.view(np.int32), W, S, weights.view(np.int32), state.view(np.int32), ids.view(np.int32).reshape(-1, 2), tags)


NUMBER_BITS = 48  # the 15 bits above are the table
# The bit that marks the field of a parity row; it lies above the table's bits.
PARITY_BIT = np.uint64(1 << 63)
_SHIFT, _NUMBER = np.uint64(NUMBER_BITS), np.uint64((1 << NUMBER_BITS) - 1)


@nb.njit(nogil=True, cache=True)
def pack(table, number):  # type: ignore[no-untyped-def]
    """Return table << 48 | number, as uint64, for kernels.

    With an ordinal as number this is the field of a row, with a stripe's number the name of the
    stripe.
    """
    return (np.uint64(table) << _SHIFT) | np.uint64(number)


def fields(table: np.ndarray | int, number: np.ndarray) -> np.ndarray:
    """Return the fields of rows: uint64 [n].

    Args:
        table: integers [n], or one integer for all rows; 0 .. 2^15 - 1.
        number: int64 [n], the rows' ordinals, 0 .. 2^48 - 1.
    """
    tables = np.asarray(table).astype(np.uint64)
    packed: np.ndarray = (tables << _SHIFT) | number.astype(np.uint64)
    return packed


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables and the numbers in fields (uint64 [n]).

    Returns:
        (int16 [n], int64 [n]): the tables, and the ordinals of rows or stripes of parity rows.
    """
    return ((packed & ~PARITY_BIT) >> _SHIFT).astype(np.int16), (packed & _NUMBER).astype(np.int64)


def words(packed: np.ndarray) -> list[bytes]:
    """Return fields (uint64 [n]) in their stored form, for commands made in Python.

    Each is 8 bytes, big-endian.
    """
    swapped = packed.astype(">u8").tobytes()
    return [swapped[first : first + 8] for first in range(0, len(swapped), 8)]


_TWO23 = np.float32(2.0**23)
_INVERSE23 = np.float32(2.0**-23)
_S16, _S40, _MASK24 = np.uint64(16), np.uint64(40), np.uint64(0xFFFFFF)
# Twelve draws of 16 bits each have this mean and, divided by 2^16, nearly the variance 1.
_MASK16, _MEAN_OF_12, _INVERSE16 = np.uint64(0xFFFF), np.int64(12 * 0xFFFF // 2), np.float32(2.0**-16)


@nb.njit(nogil=True, cache=True)
def _initial(prefix, ids, scale, out, D):  # type: ignore[no-untyped-def]
    for i in range(ids.shape[0]):
        h = mix(prefix ^ np.uint64(ids[i]))
        for pair in range((D + 1) // 2):
            # Two draws: bits 40 to 63 for the even column, 16 to 39 for the odd one.
            b = mix(h ^ np.uint64(pair))
            # A 24-bit integer, its difference to 2^23 and the division by 2^23 are all exact. So
            # only the last product rounds.
            even = np.float32(np.int64(b >> _S40)) - _TWO23
            out[i, 2 * pair] = (even * _INVERSE23) * scale
            if 2 * pair + 1 < D:
                odd = np.float32(np.int64((b >> _S16) & _MASK24)) - _TWO23
                out[i, 2 * pair + 1] = (odd * _INVERSE23) * scale
        for j in range(D, out.shape[1]):
            out[i, j] = np.float32(0.0)


@nb.njit(nogil=True, cache=True)
def _initial_normal(prefix, ids, scale, out, D):  # type: ignore[no-untyped-def]
    for i in range(ids.shape[0]):
        h = mix(prefix ^ np.uint64(ids[i]))
        for j in range(D):
            total = np.int64(0)
            for draw in range(3):
                b = mix(h ^ np.uint64(3 * j + draw))
                for _ in range(4):
                    total += np.int64(b & _MASK16)
                    b >>= _S16
            # The difference to the mean of twelve draws is below 2^24, so that it is exact, as is
            # its product with a power of two. Only the last product rounds.
            out[i, j] = (np.float32(total - _MEAN_OF_12) * _INVERSE16) * scale
        for j in range(D, out.shape[1]):
            out[i, j] = np.float32(0.0)


def initial_weights(seed: int, layout: RowLayout, ids: np.ndarray, out: np.ndarray) -> None:
    """Write the initial weights of rows of one table.

    The columns of the embedding follow the table's rule. The others are set to 0.

    Args:
        seed: the run's seed.
        ids: int64 [n].
        out: float32 [n, >= layout.width], written.
    """
    kind = layout.initial_values.kind
    if kind == "zeros":
        out[:] = 0.0
        return
    fill = _initial_normal if kind == "normal" else _initial
    fill(np.uint64(key(seed, layout.table)), ids, layout.scale, out, layout.init_columns)
