"""Write-back staging of one lane: ended rows that wait for their write-back, and the numbered batches that are cut from them.

Pure: no store, no thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreload.cache.parity.erasure import Code, accumulate, difference
from foreload.cache.parity.stripes import Arrangement, Fresh, LaneStripes
from foreload.cache.rows.row_bytes import encode_rows_at
from foreload.cache.rows.staging import EndedRows, Rows, RowShapes
from foreload.pipelines.schedule.format import RowColumns

BATCH_ROWS = 2048  # rows, and as many parity rows, at most of a write-back batch on one store shard: one atomic command each


@dataclass(slots=True)
class _Chunk:
    """Rows of one shape that ended at a boundary: those at places[first:] (int64) of `ended` still wait."""

    boundary: int
    ended: EndedRows
    places: np.ndarray
    first: int = 0


@dataclass(frozen=True, slots=True)
class Baseless:
    """Rows of a batch whose base is not known, as the store must have them (the tag is the stored one); positions: int64 [n], in the batch."""

    rows: RowColumns
    positions: np.ndarray


@dataclass(slots=True)
class WriteBackBatch:
    """One numbered write-back batch: rows of one shape, at most 2,048 rows and 2,048 parity rows a store shard.

    table int16, ordinal int64 [n]: the rows as they came. new, old: uint8 [n, row_bytes] in the order of the arrangement, what is written and
    what it replaces (zeros where nothing was stored; None where no base is kept). parity: uint8 [entries, row_bytes], to be filled with the
    parity rows that are updated, and with all of them by `update`. rows_of: boundary -> how many of its rows are in this batch. fresh: what of it
    the store has not yet. shape: of its rows, as in `RowShapes`. pieces: what they were cut from, (boundary, ended, places
    int64 [n]). baseless: those of which `old` must be read first; None where there are none.
    """

    number: int
    table: np.ndarray
    ordinal: np.ndarray
    arrangement: Arrangement
    new: np.ndarray
    old: np.ndarray | None
    parity: np.ndarray
    rows_of: dict[int, int]
    fresh: Fresh
    shape: int
    pieces: Sequence[tuple[int, EndedRows, np.ndarray]]
    baseless: Baseless | None = None

    @property
    def rows(self) -> int:
        """Rows on all store shards."""
        return len(self.new)

    def part(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """A store shard's rows: fields uint64 [n], rows uint8 [n, row_bytes]; n may be 0."""
        own = self.arrangement.rows_of(shard)
        return self.arrangement.row_fields[own], self.new[own]

    def updated_parity(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """A store shard's parity rows that are updated, to be read in place: fields, rows."""
        own = self.arrangement.updated_of(shard)
        return self.arrangement.entry_fields[own], self.parity[own]

    def parity_part(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """A store shard's parity rows: fields, rows."""
        own = self.arrangement.entries_of(shard)
        return self.arrangement.entry_fields[own], self.parity[own]

    def put_base(self, rows: Rows, shapes: RowShapes) -> None:
        """The base of the rows that had none, in their order."""
        assert self.baseless is not None
        assert self.old is not None
        who = self.baseless.rows
        base = (rows.weights, rows.state, who.id, rows.tag)
        encode_rows_at(base, np.arange(len(who)), self.baseless.positions, *shapes.shapes[self.shape], self.old)
        self.baseless = None

    def update(self, code: Code) -> None:
        """Make the parity rows: parity_i ^= c_ij * (new ^ old) where they were read, parity_i = the sum of c_ij * new elsewhere."""
        assert self.old is not None
        placed = self.arrangement
        delta = difference(self.new, self.old, placed.updates)
        for i in range(code.r):
            factors = code.coefficients[i][placed.member]
            accumulate(delta, placed.position, factors, self.parity, placed.entry_of[:, i][placed.stripe_of])


@dataclass(slots=True)
class WriteBackStaging:
    """Write-back staging of one lane: ended rows in one queue a shape, from which batches are cut.

    number: of the last batch cut. A batch has one shape, so that it is one atomic command a store shard; rows of several boundaries share
    a batch where the store is slower than the trainer. with_base: whether a batch has what it replaces, too.
    """

    shapes: RowShapes
    stripes: LaneStripes
    with_base: bool
    number: int = 0
    _queues: dict[int, deque[_Chunk]] = field(default_factory=dict)
    _under_way: deque[WriteBackBatch] = field(default_factory=deque)

    def add(self, boundary: int, ended: EndedRows) -> None:
        """Queue rows that ended at a boundary."""
        if not len(ended):
            return
        if len(self.shapes.shapes) == 1:
            self._queue(0, boundary, ended, np.arange(len(ended)))
            return
        shape_of = self.shapes.of_table[ended.table]
        for shape in range(len(self.shapes.shapes)):
            places = np.flatnonzero(shape_of == shape)
            if len(places):
                self._queue(shape, boundary, ended, places)

    def _queue(self, shape: int, boundary: int, ended: EndedRows, places: np.ndarray) -> None:
        self._queues.setdefault(shape, deque()).append(_Chunk(boundary, ended, places))

    @property
    def waiting(self) -> bool:
        """Whether there is a batch to cut."""
        return any(self._queues.values())

    def cut(self, cursors: np.ndarray, most: int = BATCH_ROWS) -> WriteBackBatch | None:
        """The next batch: rows of the shape that has waited longest; None when nothing waits. cursors: as `LaneStripes.arrange` has it. most: rows,
        and parity rows, on a store shard.
        """
        waiting = [(queue[0].boundary, shape) for shape, queue in self._queues.items() if queue]
        if not waiting:
            return None
        shape = min(waiting)[1]
        pieces = self._take(self._queues[shape], len(cursors), most)
        self.number += 1
        rows_of: dict[int, int] = {}
        for boundary, _, places in pieces:
            rows_of[boundary] = rows_of.get(boundary, 0) + len(places)
        table = np.concatenate([ended.table[places] for _, ended, places in pieces])
        ordinal = np.concatenate([ended.ordinal[places] for _, ended, places in pieces])
        stored = np.concatenate([ended.stored_tag[places] != 0 for _, ended, places in pieces])
        placed = self.stripes.arrange(table, ordinal, cursors)
        fresh = self.stripes.fresh(placed, stored, len(cursors))
        row_bytes = self.shapes.row_bytes(shape)
        new = np.empty((len(table), row_bytes), np.uint8)
        old = np.empty_like(new) if self.with_base else None
        first, baseless = 0, []
        for _, ended, places in pieces:
            at = placed.position[first : first + len(places)]
            encode_rows_at((ended.weights, ended.state, ended.id, ended.tag), places, at, *self.shapes.shapes[shape], new)
            if old is not None:
                assert ended.base_weights is not None
                assert ended.base_state is not None
                base = (ended.base_weights, ended.base_state, ended.id, ended.stored_tag)
                encode_rows_at(base, places, at, *self.shapes.shapes[shape], old)
                if ended.base_known is not None:
                    missing = ~ended.base_known[places] & (ended.stored_tag[places] != 0)
                    baseless.append((ended, places[missing], at[missing]))
            first += len(places)
        parity = np.zeros((len(placed.entry_fields), row_bytes), np.uint8)
        batch = WriteBackBatch(
            self.number, table, ordinal, placed, new, old, parity, rows_of, fresh, shape, pieces, _baseless(baseless)
        )
        self._under_way.append(batch)
        return batch

    def acknowledge(self, batch: WriteBackBatch) -> None:
        """The store has a batch, and those that were cut before it."""
        while self._under_way and self._under_way[0].number <= batch.number:
            self._under_way.popleft()

    def unwritten(self) -> Iterator[tuple[int, EndedRows]]:
        """The rows that the store may lack, by boundary, in no order: those of batches under way, and those that wait."""
        for batch in self._under_way:
            yield from ((boundary, ended.select(places)) for boundary, ended, places in batch.pieces)
        for queue in self._queues.values():
            yield from ((chunk.boundary, chunk.ended.select(chunk.places[chunk.first :])) for chunk in queue)

    def _take(self, queue: deque[_Chunk], shards: int, most: int) -> list[tuple[int, EndedRows, np.ndarray]]:
        """Rows from the front of a queue, as many as a batch may have: (boundary, ended rows, places)."""
        counts = np.zeros(shards, np.int64), np.zeros(shards, np.int64)
        pieces = []
        while queue:
            chunk = queue[0]
            ended, left = chunk.ended, len(chunk.places) - chunk.first
            fits = self.stripes.room_for(ended.table, ended.ordinal, chunk.places, chunk.first, most, counts)
            if fits:
                pieces.append((chunk.boundary, ended, chunk.places[chunk.first : chunk.first + fits]))
                chunk.first += fits
            if fits < left:
                break
            queue.popleft()
        return pieces


def _baseless(pieces: Sequence[tuple[EndedRows, np.ndarray, np.ndarray]]) -> Baseless | None:
    """The rows at places (int64 [n]) of what ended, which go to positions (int64 [n]) of a batch."""
    if not sum(len(places) for _, places, _ in pieces):
        return None
    columns = [(*ended.columns(places)[:3], ended.stored_tag[places]) for ended, places, _ in pieces]
    table, ordinal, ids, tag = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Baseless(RowColumns(table, ordinal, ids, tag), np.concatenate([positions for _, _, positions in pieces]))
