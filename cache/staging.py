"""Staging of one lane: arrived rows that wait for their slots, and ended rows that wait for their write-back. Pure: no store, no thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import numba as nb
import numpy as np

from cache.errors import CacheError
from cache.initial import initial_weights
from cache.placement import Placement, fields
from cache.rows import RowLayout, encode_rows
from pipelines.prefetch import prefetch
from pipelines.schedule_format import Arrivals

_AHEAD = 16  # rows that are asked for early: they lie at random in a partition
_LINE = 16  # 4-byte values in a cache line
BATCH_ROWS = 2048  # of one write-back batch on one store shard: one atomic command


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
    """out[i] = source[places[i]]: source float32 [m, W], contiguous; places integers [n]; out float32 [n, W]. Bits are copied as they are."""
    _take(source.view(np.int32), places, out.view(np.int32))


def copies_of_rows(source: np.ndarray, places: np.ndarray) -> np.ndarray:
    """source[places], float32 [n, W], in memory of its own."""
    out = np.empty((len(places), source.shape[1]), np.float32)
    take_rows(source, places, out)
    return out


def put_rows(rows: np.ndarray, places: np.ndarray, target: np.ndarray) -> None:
    """Copy rows float32 [n, w] to target[places, :w]; places integers [n], distinct; target float32 [m, >= w], contiguous."""
    _put(rows.view(np.int32), places, target.view(np.int32))


@dataclass(frozen=True, slots=True)
class RowShapes:
    """The distinct (W, S) among tables, for requests grouped by width.

    shapes: (W, S) each; of_table: int64 [tables], the place of a table's shape in them; width, state_width: the largest W and S.
    """

    shapes: tuple[tuple[int, int], ...]
    of_table: np.ndarray
    width: int
    state_width: int

    @classmethod
    def of(cls, layouts: Sequence[RowLayout]) -> RowShapes:
        """The shapes of these layouts, in order of first occurrence; layout k must be that of table k."""
        if not layouts or any(layout.table != k for k, layout in enumerate(layouts)):
            raise CacheError(f"row layouts: must be one a table, in order; got tables {[layout.table for layout in layouts]}")
        of_rows = [(layout.width, layout.state_width) for layout in layouts]
        shapes = tuple(dict.fromkeys(of_rows))
        places = np.array([shapes.index(shape) for shape in of_rows], np.int64)
        return cls(shapes, places, max(w for w, _ in shapes), max(s for _, s in shapes))

    def row_bytes(self, shape: int) -> int:
        """Bytes of a stored row of a shape."""
        width, state_width = self.shapes[shape]
        return 4 * (width + state_width) + 12


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows at hand: weights float32 [n, Wmax], state float32 [n, Smax], zero beyond a row's own width; tag int32 [n]."""

    weights: np.ndarray
    state: np.ndarray
    tag: np.ndarray

    @classmethod
    def zeros(cls, count: int, shapes: RowShapes) -> Rows:
        """Room for `count` rows of any table."""
        weights, state = (np.zeros((count, width), np.float32) for width in (shapes.width, shapes.state_width))
        return cls(weights, state, np.zeros(count, np.int32))


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that arrived for an event, in the order of its arrivals.

    weights: float32 [A, Wmax]; state: float32 [A, Smax]; waited: how long the caller was held up.
    """

    weights: np.ndarray
    state: np.ndarray
    waited: timedelta


@dataclass(frozen=True, slots=True)
class EndedRows:
    """Copies of the rows whose residency ended, for their write-back.

    weights: float32 [E, Wmax]; state: float32 [E, Smax]; table int16, ordinal int64, id int64, tag int32, stored_tag int32, all [E].
    """

    weights: np.ndarray
    state: np.ndarray
    table: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray
    stored_tag: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def select(self, which: np.ndarray) -> EndedRows:
        """The rows of a mask or of places."""
        return EndedRows(*(getattr(self, name)[which] for name in self.__slots__))


class EventStaging:
    """Arrival staging of one event: arrays [A, ...] that fill up, and which of the rows are there."""

    def __init__(self, arrivals: Arrivals, shapes: RowShapes) -> None:
        self.arrivals = arrivals
        self.rows = Rows.zeros(len(arrivals), shapes)
        self.ready = np.zeros(len(arrivals), bool)
        self.undue = 0  # rows whose fetch must wait for a boundary that is not yet released

    def fill_initial(self, seed: int, layouts: Sequence[RowLayout]) -> np.ndarray:
        """Make the rows that were never written (tag 0). Returns their places, int64 [n]; `ready` is left to the caller."""
        places = np.flatnonzero(self.arrivals.tag == 0)
        tables = self.arrivals.table[places]
        order = np.argsort(tables, kind="stable")
        places, tables = places[order], tables[order]
        made = np.empty((len(places), self.rows.weights.shape[1]), np.float32)
        starts = np.flatnonzero(np.diff(tables, prepend=-1))
        for start, end in pairwise([*starts, len(tables)]):
            layout = layouts[tables[start]]
            ids = self.arrivals.id[places[start:end]]
            initial_weights(seed, layout.table, ids, layout.scale, made[start:end], layout.init_columns)
        put_rows(made, places, self.rows.weights)
        return places


@dataclass(slots=True)
class _Chunk:
    boundary: int
    fields: np.ndarray  # uint64 [n]
    rows: np.ndarray  # uint8 [n, row_bytes]


@dataclass(slots=True)
class WriteBackBatch:
    """One numbered write-back batch: rows of one shape, at most 2,048 a store shard.

    parts: per store shard (fields uint64 [n], rows uint8 [n, row_bytes]), n may be 0; rows_of: boundary -> rows of it in this batch.
    """

    number: int
    parts: list[tuple[np.ndarray, np.ndarray]]
    rows_of: dict[int, int]

    @property
    def rows(self) -> int:
        """Rows on all store shards."""
        return sum(self.rows_of.values())


@dataclass(slots=True)
class WriteBackStaging:
    """Write-back staging of one lane: ended rows, encoded, in one queue a shape and store shard, from which batches are cut.

    number: of the last batch cut. A batch has one shape, so that it is one atomic command a store shard; rows of several boundaries share
    a batch where the store is slower than the trainer.
    """

    shapes: RowShapes
    placement: Placement
    number: int = 0
    _queues: dict[tuple[int, int], deque[_Chunk]] = field(default_factory=dict)

    def add(self, lane: int, boundary: int, ended: EndedRows) -> None:
        """Encode rows that ended at a boundary and queue them."""
        if not len(ended):
            return
        shards = self.placement.shard_count
        owner = self.shapes.of_table[ended.table] * shards + self.placement.shards(lane, ended.table, ended.ordinal)
        order = np.argsort(owner, kind="stable")
        owner = owner[order]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        names = fields(ended.table, ended.ordinal)
        for start, end in pairwise([*starts, len(owner)]):
            shape, shard = divmod(int(owner[start]), shards)
            width, state_width = self.shapes.shapes[shape]
            places = order[start:end]
            rows = np.empty((end - start, self.shapes.row_bytes(shape)), np.uint8)
            # A place for the base belongs here, beside the new bytes, once there is parity.
            encode_rows(
                copies_of_rows(ended.weights, places), copies_of_rows(ended.state, places), ended.id[places], ended.tag[places],
                width, state_width, rows,
            )  # fmt: skip
            self._queues.setdefault((shape, shard), deque()).append(_Chunk(boundary, names[places], rows))

    def cut(self) -> WriteBackBatch | None:
        """The next batch: rows of the shape that has waited longest; None when nothing waits."""
        waiting = [(queue[0].boundary, shape) for (shape, _), queue in self._queues.items() if queue]
        if not waiting:
            return None
        shape = min(waiting)[1]
        self.number += 1
        rows_of: dict[int, int] = {}
        parts = []
        for shard in range(self.placement.shard_count):
            chunks = _cut_rows(self._queues.get((shape, shard), deque()))
            for chunk in chunks:
                rows_of[chunk.boundary] = rows_of.get(chunk.boundary, 0) + len(chunk.fields)
            empty = np.empty((0, self.shapes.row_bytes(shape)), np.uint8)
            parts.append((
                np.concatenate([np.empty(0, np.uint64), *(chunk.fields for chunk in chunks)]),
                chunks[0].rows if len(chunks) == 1 else np.concatenate([empty, *(chunk.rows for chunk in chunks)]),
            ))  # fmt: skip
        return WriteBackBatch(self.number, parts, rows_of)


def _cut_rows(queue: deque[_Chunk]) -> list[_Chunk]:
    found: list[_Chunk] = []
    room = BATCH_ROWS
    while queue and room:
        chunk = queue.popleft()
        if len(chunk.fields) > room:
            queue.appendleft(_Chunk(chunk.boundary, chunk.fields[room:], chunk.rows[room:]))
            chunk = _Chunk(chunk.boundary, chunk.fields[:room], chunk.rows[:room])
        found.append(chunk)
        room -= len(chunk.fields)
    return found
