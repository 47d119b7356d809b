"""The layout of a row at rest: weights float32 [W], state float32 [S], id int64, tag int32, little-endian, contiguous."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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


def slot_columns(layouts: Iterable[RowLayout]) -> int:
    """Columns of a slot, which may hold a row of any of these: as wide as the widest weights, and the widest state."""
    rows = list(layouts)
    return max(row.width for row in rows) + max(row.state_width for row in rows)
