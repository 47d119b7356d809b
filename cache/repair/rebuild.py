"""The rebuild of a store shard that came back empty: its rows and parity rows, from what is left of their stripes, in chunks.

A shard is live for the stripes already rebuilt: from the round after a chunk on, what is written there reaches it, and for later stripes it still
counts as lost. So a chunk is read and written while no batch is under way, and needs no other order with the writes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreload.cache.client.store import COMMAND_ROWS, NO_ROWS
from foreload.cache.parity.decoding import StripePlaces, plan_decoding, rows_on_shard
from foreload.cache.protocol.handover.migration import Migration
from foreload.cache.protocol.rounds.background import Task
from foreload.cache.protocol.rounds.lanes import Lanes, LaneWrites
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_table import cursor_at, cursor_place


class Rebuild(Task):
    """Rebuilds the shards that are not readable, one chunk at a time. on_action: the traffic's; on_rows: called with how many rows a chunk had."""

    def __init__(
        self,
        stored: StoredRows,
        rounds: Rounds,
        lanes: Lanes,
        move: Migration,
        on_action: Callable[[str], None],
        on_rows: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._stored, self._shards, self._rounds, self._lanes = stored, stored.shards, rounds, lanes
        self._migration, self._on_action, self._on_rows = move, on_action, on_rows

    @property
    def wanted(self) -> bool:
        """Whether a shard is there that does not have all rows of a lane."""
        return self._next() is not None

    def chunk(self) -> None:
        """Rebuild the next rows. Raises RowsLost, RowError, StoreError."""
        following = self._next()
        if following is not None:
            self._on_rows(self._chunk(*following))
            self._on_action("rows rebuilt")

    def _next(self) -> tuple[LaneWrites, int] | None:
        """The lane and shard that are to be rebuilt next."""
        if self._shards.whole:
            return None
        for state in self._lanes.all:
            for shard in self._stored.placement.live:
                if self._shards.rebuilding(state.lane, shard):
                    return state.writes, shard
        return None

    def _share(self, shard: int) -> float:
        """How much of a shard is rebuilt, as a share of the stripes."""
        passed = total = 0
        for writes in (state.writes for state in self._lanes.all):
            stripes = -(-writes.stripes.written.counts // writes.stripes.k)
            cursor = int(self._shards.of(writes.lane).cursors[shard])
            table, stripe = cursor_place(cursor)
            total += int(stripes.sum())
            passed += int(stripes[:table].sum()) + (min(stripe, int(stripes[table])) if table < len(stripes) else 0)
        return passed / total if total else 1.0

    def _chunk(self, writes: LaneWrites, shard: int) -> int:
        """Rebuild the next rows, at most 2,048, of a lane on a shard; returns how many."""
        lane, stripes = writes.lane, writes.stripes
        cursor = int(self._shards.of(lane).cursors[shard])
        table, first = cursor_place(cursor)
        if table == len(self._stored.layouts):
            self._finish(writes, shard)
            return 0
        shard_rows = rows_on_shard(stripes, table, first, shard, COMMAND_ROWS)
        row_bytes = self._stored.layouts[table].row_bytes
        if len(shard_rows.place):
            wanted = StripePlaces(np.full(len(shard_rows.place), table, np.int16), shard_rows.stripe, shard_rows.place)
            keys = self._stored.keys(lane)
            plan = plan_decoding(stripes, self._shards.survivors(lane), wanted, row_bytes, keys)
            reads = [(lane, read) for read in plan.reads]
            self._rounds.exchange(reads, [])
            if not all(self._shards.readable(lane, read.shard) for _, read in reads) or shard in self._shards.lost:
                return 0  # one more is lost; the next attempt decodes from others
            if self._rounds.checked.lacking(reads):
                return 0
            marker = Marker(writes.last_batch, writes.last_batch, rebuilding=True)
            names = shard_rows.fields(table, stripes.k)
            write = self._stored.write(lane, shard, names, plan.decode(), marker, len(names))
            self._rounds.exchange([], [(lane, write)])
            if shard in self._shards.lost:
                return 0
        # Where the table ends, the cursor goes on to the next: it is live for rows of this one that are written later, too.
        more = shard_rows.end * stripes.k < stripes.written.counts[table]
        following = (table, shard_rows.end) if more else (table + 1, 0)
        self._shards.advance(lane, shard, cursor_at(*following))
        self._shards.note_rebuilt(shard, self._share(shard))
        return len(shard_rows.place)

    def _finish(self, writes: LaneWrites, shard: int) -> None:
        """Have the marker say that the shard is whole; once that is acknowledged, it may be read."""
        lane = writes.lane
        number = writes.last_batch
        last = self._stored.write(
            lane, shard, *NO_ROWS, Marker(number, number), 0, self._migration.status_of(lane, shard, number)
        )
        self._rounds.exchange([], [(lane, last)])
        if shard not in self._shards.lost:
            self._rounds.failover.rebuilt(lane, shard)
