"""Tasks that bring rows and parity rows to the store shards that are to have them, while training goes on: a chunk at a time, between two rounds.

There are two: `repair.rebuild` fills a shard that came back empty, and `migration` moves rows to other shards. Each chunk goes through four stages.
Its rows are selected; they are read from where they are, or decoded from their stripes; they are written where they go; and the chunk is settled,
which moves the lane's cursor behind it. Rounds go by the cursor. Where a shard is lost before the rows of a chunk are at hand, nothing has changed,
and the task tries again.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.store import Read
from foreload.cache.parity.decoding import Survivors, plan_decoding
from foreload.cache.parity.selecting import Selected, select_rows
from foreload.cache.protocol.rounds.background import Task
from foreload.cache.protocol.rounds.lanes import Lanes, LaneWrites
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_table import cursor_at, cursor_place


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one table of a lane that are brought at once; there are none where no rows are left. begin, end: the cursors before and behind them.

    shard: the only shard that they go to. If None, they go to several.
    """

    writes: LaneWrites
    selected: Selected
    begin: int
    end: int
    shard: int | None


class Refill(Task):
    """Brings all rows of the lanes that a traffic serves to where they are to be. on_rows: called with how many rows a chunk had."""

    def __init__(self, stored: StoredRows, lanes: Lanes, rounds: Rounds, on_rows: Callable[[int], None]) -> None:
        super().__init__()
        self._stored, self._shards, self._lanes, self._rounds = stored, stored.shards, lanes, rounds
        self._on_rows = on_rows

    def chunk(self) -> None:
        """Bring the next rows. Raises RowsLost, RowError, StoreError."""
        begun = time.monotonic()
        chunk = self._select()
        if chunk is not None:
            self._on_rows(self._bring(chunk))
            self._note(time.monotonic() - begun)

    def _bring(self, chunk: Chunk) -> int:
        """Bring the rows of a chunk to where they go; returns how many there are now."""
        count = len(chunk.selected.fields)
        if count:
            rows = self._get(chunk)
            if rows is None or not self._put(chunk, rows):
                return 0
        self._advance(chunk)
        return count

    @abstractmethod
    def _select(self) -> Chunk | None:
        """Return the next chunk; None where nothing is left to do."""

    @abstractmethod
    def _survivors(self, chunk: Chunk) -> Survivors | None:
        """Return what a chunk's rows are decoded from. If None, they are read from where they are."""

    @abstractmethod
    def _all_came(self, chunk: Chunk, reads: Sequence[tuple[int, Read]]) -> bool:
        """Return whether the reads of a chunk, each with its lane, brought all rows. A shard that lacks a row is lost, or the error is raised."""

    @abstractmethod
    def _put(self, chunk: Chunk, rows: np.ndarray) -> bool:
        """Write a chunk's rows (uint8 [n, row_bytes]) where they go; returns False where the task must bring them again."""

    @abstractmethod
    def _advance(self, chunk: Chunk) -> None:
        """Record that a chunk's rows are where they go, on the shards that must know, and move the lane's cursor to the chunk's end."""

    @abstractmethod
    def _note(self, seconds: float) -> None:
        """Report the progress after a chunk, which took so many seconds."""

    def _chunk(self, writes: LaneWrites, begin: int, most: int, shard: int | None = None) -> Chunk:
        """Return the next rows of a lane from a cursor on, at most `most` to a shard. shard: whose rows to select. If None, those that move."""
        tables, shards = len(self._stored.layouts), self._stored.placement.shard_count
        selected, (table, first) = Selected.none(), cursor_place(begin)
        while table < tables and not len(selected.fields):
            selected = select_rows(writes.stripes, table, first, most, shards, shard)
            # Where the table ends, the cursor goes on to the next: rows of this one that are written later are where they go to, too.
            table, first = (table + 1, 0) if selected.whole else (table, selected.end)
        return Chunk(writes, selected, begin, cursor_at(table, first), shard)

    def _get(self, chunk: Chunk) -> np.ndarray | None:
        """Return a chunk's rows, uint8 [n, row_bytes]; None where a shard was lost meanwhile, and the task must try again."""
        lane, selected = chunk.writes.lane, chunk.selected
        keys, row_bytes = self._stored.keys(lane), self._stored.layouts[selected.table].row_bytes
        survivors = self._survivors(chunk)
        if survivors is not None:
            plan = plan_decoding(chunk.writes.stripes, survivors, selected.stripe_places, row_bytes, keys)
            return plan.decode() if self._done(chunk, plan.reads) else None
        sources = list(by_shard(selected.source))
        reads = [
            Read(shard, keys[shard], selected.fields[at], np.empty((len(at), row_bytes), np.uint8), any_length=True)
            for shard, at in sources
        ]
        if not self._done(chunk, reads):
            return None
        rows = np.empty((len(selected.fields), row_bytes), np.uint8)
        for (_, at), read in zip(sources, reads, strict=True):
            rows[at] = read.rows
        return rows

    def _done(self, chunk: Chunk, reads: Sequence[Read]) -> bool:
        """Do the reads of a chunk; returns as `_all_came`."""
        of_lane = [(chunk.writes.lane, read) for read in reads]
        self._rounds.exchange(of_lane, [])
        return self._all_came(chunk, of_lane)

    def _passed(self, cursor: Callable[[int], int]) -> tuple[int, int]:
        """Return how many stripes lie before the cursors of their lanes, and how many there are. cursor: gives that of a lane."""
        passed = total = 0
        for writes in (state.writes for state in self._lanes.all):
            stripes = -(-writes.stripes.written.counts // writes.stripes.k)
            table, stripe = cursor_place(cursor(writes.lane))
            total += int(stripes.sum())
            passed += int(stripes[:table].sum()) + (min(stripe, int(stripes[table])) if table < len(stripes) else 0)
        return passed, total


def by_shard(shard: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the shards among int64 [n], ascending, each with its places."""
    for one in np.unique(shard).tolist():
        yield one, np.flatnonzero(shard == one)
