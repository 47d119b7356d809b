"""The layout of a row at rest: weights float32 [W], state float32 [S], id int64, tag int32, little-endian, contiguous."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numba as nb
import numpy as np

from foreload.cache.errors import CacheError
from foreload.pipelines.planning.sizing import stored_bytes

MOST_COLUMNS = 1 << 20  # of a part of a row

ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")


def state_width(optimizer: str, parts: tuple[tuple[str, int], ...]) -> int:
    """Columns of optimizer state of a row with these parts: sgd 0, adagrad one a weight, rowwise_adagrad one a part, adam and
    ftrl two a weight, the first of all weights before the second."""
    if optimizer == "sgd":
        return 0
    if optimizer == "adagrad":
        return sum(columns for _, columns in parts)
    if optimizer == "rowwise_adagrad":
        return len(parts)
    if optimizer in ("adam", "ftrl"):
        return 2 * sum(columns for _, columns in parts)
    raise CacheError(f"row optimizer: must be one of {', '.join(ROW_OPTIMIZERS)}; got {optimizer!r}")


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of one table look: their parts in order (name, columns), and the row optimizer that their state belongs to.

    The first part is `weights`, the embedding itself; further parts are the columns that the model declares. table, name: the table's number
    and name; rows: how many rows the table has, which bounds initial weights. Raises CacheError for what cannot be.
    """

    table: int
    name: str
    rows: int
    parts: tuple[tuple[str, int], ...]
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise CacheError(f"table {self.name}: rows must be at least 1; got {self.rows}")
        if not self.parts or not all(1 <= columns <= MOST_COLUMNS for _, columns in self.parts):
            raise CacheError(f"table {self.name}: needs parts of 1 to {MOST_COLUMNS} columns each; got {self.parts}")
        state_width(self.optimizer, self.parts)

    @property
    def width(self) -> int:
        """W: float32 columns of weights, all parts together."""
        return sum(columns for _, columns in self.parts)

    @property
    def state_width(self) -> int:
        """S: float32 columns of optimizer state."""
        return state_width(self.optimizer, self.parts)

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return stored_bytes(self.width + self.state_width)

    @property
    def init_columns(self) -> int:
        """D: the columns with random initial values; the others begin at 0."""
        return self.parts[0][1]

    @property
    def scale(self) -> np.float32:
        """float32(1 / sqrt(rows)): the bound of initial weights."""
        return np.float32(1.0 / math.sqrt(self.rows))


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


def slot_columns(layouts: Iterable[RowLayout]) -> int:
    """Columns of a slot, which may hold a row of any of these: as wide as the widest weights, and the widest state."""
    rows = list(layouts)
    return max(row.width for row in rows) + max(row.state_width for row in rows)
