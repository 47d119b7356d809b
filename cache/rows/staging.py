"""Rows outside their slots: arrived rows that wait for a slot, and ended rows that wait for
write-back.

This module is pure: no store, no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise

import numpy as np

from foreload.base.compiled import nb
from foreload.base.intrinsics import prefetch
from foreload.cache.errors import CacheError
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.planning.sizing import stored_bytes
from foreload.pipelines.schedule.format import Arrivals, Occupants

_AHEAD = 16  # how many rows ahead memory is prefetched; rows lie at random in a partition
_LINE = 16  # 4-byte values in a cache line


@nb.njit(nogil=True, cache=True)
def _take(source, places, out):  # type: ignore[no-untyped-def]
    columns, last = out.shape[1], places.shape[0] - 1
    for i in range(places.shape[0]):
        ahead = np.int64(places[min(i + _AHEAD, last)]) * source.shape[1]
        for j in range(0, columns, _LINE):
            prefetch(source, ahead + j)
        place = np.int64(places[i])
        for j in range(columns):
            out[i, j] = source[place, j]


@nb.njit(nogil=True, cache=True)
def _put(rows, places, target):  # type: ignore[no-untyped-def]
    columns, last = rows.shape[1], places.shape[0] - 1
    for i in range(places.shape[0]):
        ahead = np.int64(places[min(i + _AHEAD, last)]) * target.shape[1]
        for j in range(0, columns, _LINE):
            prefetch(target, ahead + j)
        place = np.int64(places[i])
        for j in range(columns):
            target[place, j] = rows[i, j]


def take_rows(source: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
    """Copy rows: out[i] = source[places[i]]. Bits are copied unchanged.

    Args:
        source: float32 [m, W], contiguous.
        places: integers [n].
        out: float32 [n, W].
    """
    _take(source.view(np.int32), places, out.view(np.int32))


def copies_of_rows(source: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return source[places] as a new array, float32 [n, W]."""
    out = np.empty((len(places), source.shape[1]), np.float32)
    take_rows(source, places, out)
    return out


def put_rows(rows: np.ndarray, places: np.ndarray, target: np.ndarray) -> None:
    """Copy rows to target[places, :w].

    Args:
        rows: float32 [n, w].
        places: integers [n], distinct.
        target: float32 [m, >= w], contiguous.
    """
    _put(rows.view(np.int32), places, target.view(np.int32))


@dataclass(frozen=True, slots=True)
class RowShapes:
    """The distinct (W, S) of the tables' rows, for requests grouped by width.

    Attributes:
        shapes: the distinct (W, S).
        of_table: int64 [tables], the index of each table's shape in `shapes`.
        width: the largest W.
        state_width: the largest S.
    """

    shapes: tuple[tuple[int, int], ...]
    of_table: np.ndarray
    width: int
    state_width: int

    @classmethod
    def of(cls, layouts: Sequence[RowLayout]) -> RowShapes:
        """Return the shapes of these layouts, in order of first occurrence.

        Raises CacheError unless layout k is that of table k.
        """
        if any(layout.table != k for k, layout in enumerate(layouts)):
            raise CacheError(f"row layouts: must be one per table, in order; got tables {[layout.table for layout in layouts]}")
        shape_of = [(layout.width, layout.state_width) for layout in layouts]
        shapes = tuple(dict.fromkeys(shape_of))
        places = np.array([shapes.index(shape) for shape in shape_of], np.int64)
        return cls(shapes, places, max((w for w, _ in shapes), default=0), max((s for _, s in shapes), default=0))

    def row_bytes(self, shape: int) -> int:
        """Return the bytes of a stored row of a shape."""
        width, state_width = self.shapes[shape]
        return stored_bytes(width + state_width)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in memory.

    Attributes:
        weights: float32 [n, Wmax], zero beyond a row's own width.
        state: float32 [n, Smax], zero beyond a row's own width.
        tag: int32 [n].
    """

    weights: np.ndarray
    state: np.ndarray
    tag: np.ndarray

    @classmethod
    def zeros(cls, count: int, shapes: RowShapes) -> Rows:
        """Return room for `count` rows of any table."""
        weights, state = (np.zeros((count, width), np.float32) for width in (shapes.width, shapes.state_width))
        return cls(weights, state, np.zeros(count, np.int32))


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that arrived for an event, in the order of its arrivals.

    Attributes:
        weights: float32 [A, Wmax].
        state: float32 [A, Smax].
        waited: how long the caller had to wait.
    """

    weights: np.ndarray
    state: np.ndarray
    waited: timedelta


@dataclass(frozen=True, slots=True)
class EndedRows(Occupants):
    """Copies of rows whose residency ended, for their write-back, with their occupants' columns.

    Attributes:
        weights: float32 [E, Wmax].
        state: float32 [E, Smax].
        base_weights: the rows' weights in the store, undefined if the stored tag is 0. None if no
            base is kept.
        base_state: the rows' state in the store, as base_weights.
        base_known: bool [E], whether the base is known; it counts as known if the stored tag is 0.
            None if all bases are known.
    """

    weights: np.ndarray
    state: np.ndarray
    base_weights: np.ndarray | None = None
    base_state: np.ndarray | None = None
    base_known: np.ndarray | None = None

    def select(self, which: np.ndarray) -> EndedRows:
        """Return the rows that a mask or an array of indices selects."""
        rows = EndedRows(*self.columns(which), self.stored_tag[which], self.weights[which], self.state[which])
        if self.base_weights is None or self.base_state is None:
            return rows
        known = None if self.base_known is None else self.base_known[which]
        return replace(rows, base_weights=self.base_weights[which], base_state=self.base_state[which], base_known=known)


class EventStaging:
    """Arrival staging of one event: arrays [A, ...] that fill up.

    Attributes:
        ready: bool [A], which rows have arrived.
        not_due: the number of rows whose fetch must wait for a boundary that is not yet released.
    """

    def __init__(self, arrivals: Arrivals, shapes: RowShapes) -> None:
        self.arrivals = arrivals
        self.rows = Rows.zeros(len(arrivals), shapes)
        self.ready = np.zeros(len(arrivals), bool)
        self.not_due = 0

    def fill_initial(self, seed: int, layouts: Sequence[RowLayout]) -> np.ndarray:
        """Make the rows that were never written (tag 0).

        Returns:
            Their indices, int64 [n]. The caller sets `ready`.
        """
        places = np.flatnonzero(self.arrivals.tag == 0)
        tables = self.arrivals.table[places]
        # Sorted by table, so that one call of the kernel does all rows of a table.
        order = np.argsort(tables, kind="stable")
        places, tables = places[order], tables[order]
        made = np.empty((len(places), self.rows.weights.shape[1]), np.float32)
        starts = np.flatnonzero(np.diff(tables, prepend=-1))
        for start, end in pairwise([*starts, len(tables)]):
            layout = layouts[tables[start]]
            ids = self.arrivals.id[places[start:end]]
            initial_weights(seed, layout, ids, made[start:end])
        put_rows(made, places, self.rows.weights)
        return places
