"""The layout of a stored row.

A row is weights float32 [W], state float32 [S], id int64 and tag int32, little-endian and
contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from foreload.base.codec import LeftOut
from foreload.cache.errors import CacheError
from foreload.pipelines.planning.sizing import stored_bytes
from foreload.pipelines.samples.initial_values import InitialValues

MOST_COLUMNS = 1 << 20  # of a part of a row
# Rows are made for every table at every boundary, and there are few rules.
_parsed = functools.cache(InitialValues.parse)

ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
"""The row optimizers. Kernels switch on their places; files have their names.

A new one goes last.
"""


def state_width(optimizer: str, parts: tuple[tuple[str, int], ...]) -> int:
    """Return the number of optimizer state columns of a row.

    sgd has none, adagrad one per weight, and rowwise_adagrad one per part. adam and ftrl have two
    per weight; the first ones of all weights come before the second ones.

    Args:
        parts: (name, columns) of each part of the row.

    Raises:
        CacheError: the optimizer is unknown.
    """
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
    """The layout of a table's rows: their parts, and the row optimizer whose state they have.

    Raises CacheError for invalid values.

    Attributes:
        table: the table's number.
        name: the table's name.
        rows: the number of rows in the table.
        parts: (name, columns) of each part, in order. The first part is `weights`, the embedding
            itself. Further parts are columns that the model declares.
        initial: how embeddings begin, as `InitialValues` is written.
    """

    table: int
    name: str
    rows: int
    parts: tuple[tuple[str, int], ...]
    optimizer: str = "sgd"
    initial: LeftOut[str] = "uniform"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise CacheError(f"table {self.name}: rows must be at least 1; got {self.rows}")
        if not self.parts or not all(1 <= columns <= MOST_COLUMNS for _, columns in self.parts):
            raise CacheError(f"table {self.name}: needs parts of 1 to {MOST_COLUMNS} columns each; got {self.parts}")
        state_width(self.optimizer, self.parts)
        try:
            _parsed(self.initial)
        except ValueError as error:
            raise CacheError(f"table {self.name}: initial {error}") from None

    @property
    def initial_values(self) -> InitialValues:
        """How embeddings begin."""
        return _parsed(self.initial)

    @property
    def width(self) -> int:
        """W: the number of float32 weights in all parts."""
        return sum(columns for _, columns in self.parts)

    @property
    def state_width(self) -> int:
        """S: the number of float32 columns of optimizer state."""
        return state_width(self.optimizer, self.parts)

    @property
    def row_bytes(self) -> int:
        """The bytes of a stored row."""
        return stored_bytes(self.width + self.state_width)

    @property
    def init_columns(self) -> int:
        """D: the columns of the embedding, which begin by `initial`. The others start at 0."""
        return self.parts[0][1]

    @property
    def scale(self) -> np.float32:
        """The factor of the draws of initial weights."""
        return self.initial_values.scale(self.rows, self.init_columns)


def slot_columns(layouts: Iterable[RowLayout]) -> int:
    """Return the columns of a slot that can hold a row of any of these layouts.

    That is the widest weights and the widest state together.
    """
    rows = list(layouts)
    return widest(rows) + max((row.state_width for row in rows), default=0)


def widest(layouts: Iterable[RowLayout]) -> int:
    """Return the columns of the widest weights of these layouts. Without tables, it is 0."""
    return max((row.width for row in layouts), default=0)
