"""The rebuild of a store shard that came back empty: its rows and parity rows, from what is left of their stripes, in chunks.

A shard is live for the stripes already rebuilt: from the round after a chunk on, what is written there reaches it, and for later stripes it still
counts as lost. So a chunk is read and written while no batch is under way, and needs no other order with the writes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from foreload.cache.client.store import COMMAND_ROWS, NO_ROWS
from foreload.cache.parity.decoding import plan_decoding, rows_on_shard
from foreload.cache.protocol.failover import Failover
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.reading import StoredRows
from foreload.cache.protocol.rounds import LaneWrites, Rounds

SHARE = 0.25  # of the traffic thread's time, at most: training comes first
_TABLE_SHIFT = np.uint64(48)


class Rebuild:
    """Rebuilds the shards that are not readable, one chunk at a time. throttled: no more than a quarter of the time goes into it."""

    def __init__(self, stored: StoredRows, failover: Failover, rounds: Rounds, lanes: Sequence[LaneWrites]) -> None:
        self._stored, self._shards, self._failover, self._rounds, self._lanes = stored, stored.shards, failover, rounds, lanes
        self.throttled = True
        self._not_before = 0.0

    def wanted(self) -> tuple[LaneWrites, int] | None:
        """The lane and shard that are to be rebuilt next."""
        for writes in self._lanes:
            for shard in range(self._stored.placement.shard_count):
                if self._shards.rebuilding(writes.lane, shard):
                    return writes, shard
        return None

    def _share(self, shard: int) -> float:
        """How much of a shard is rebuilt, as a share of the stripes."""
        passed = total = 0
        for writes in self._lanes:
            stripes = -(-writes.stripes.written.counts // writes.stripes.k)
            cursor = int(self._shards.of(writes.lane).cursors[shard])
            table, stripe = cursor >> 48, cursor & ((1 << 48) - 1)
            total += int(stripes.sum())
            passed += int(stripes[:table].sum()) + (min(stripe, int(stripes[table])) if table < len(stripes) else 0)
        return passed / total if total else 1.0

    def wait(self) -> timedelta:
        """How long the next chunk is to wait, if training is to come first."""
        return timedelta(seconds=max(self._not_before - time.monotonic(), 0.0) if self.throttled else 0.0)

    def chunk(self, writes: LaneWrites, shard: int) -> int:
        """Rebuild the next rows, at most 2,048, of a lane on a shard; returns how many. No batch of the lane is under way.

        Raises RowsLost, RowError, StoreError.
        """
        begun = time.monotonic()
        lane, stripes = writes.lane, writes.stripes
        cursor = int(self._shards.of(lane).cursors[shard])
        table, first = cursor >> 48, cursor & ((1 << 48) - 1)
        if table == len(self._stored.layouts):
            self._finish(writes, shard)
            return 0
        found = rows_on_shard(stripes, table, first, shard, COMMAND_ROWS)
        row_bytes = self._stored.layouts[table].row_bytes
        if len(found.place):
            wanted = np.full(len(found.place), table, np.int16), found.stripe, found.place
            keys = self._stored.keys(lane)
            plan = plan_decoding(stripes, self._shards.survivors(lane), wanted, row_bytes, keys)
            reads = [(lane, read) for read in plan.reads]
            self._rounds.exchange_alone(reads, [])
            if not all(self._shards.readable(lane, read.shard) for _, read in reads) or shard in self._shards.lost:
                return 0  # one more is lost; the next attempt decodes from others
            if self._rounds.lacking(reads):
                return 0
            marker = Marker(writes.last_batch, writes.last_batch, rebuilding=True)
            names = found.fields(table, stripes.k)
            write = self._stored.write(lane, shard, names, plan.decode(), marker, len(names))
            self._rounds.exchange_alone([], [(lane, write)])
            if shard in self._shards.lost:
                return 0
        more = found.end * stripes.k < stripes.written.counts[table]
        following = (table, found.end) if more else (table + 1, 0)
        self._shards.advance(lane, shard, (np.uint64(following[0]) << _TABLE_SHIFT) | np.uint64(following[1]))
        self._shards.note_rebuilt(shard, self._share(shard))
        now = time.monotonic()
        self._not_before = now + (now - begun) * (1 / SHARE - 1)
        return len(found.place)

    def _finish(self, writes: LaneWrites, shard: int) -> None:
        lane = writes.lane
        last = self._stored.write(lane, shard, *NO_ROWS, Marker(writes.last_batch, writes.last_batch), 0)
        self._rounds.exchange_alone([], [(lane, last)])
        if shard not in self._shards.lost:
            self._failover.rebuilt(lane, shard)
