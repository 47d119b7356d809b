"""The rebuild of a store shard that came back empty, in chunks, from the rest of its stripes.

A rebuilding shard is live for the stripes that are already rebuilt: from the round after a chunk
on, writes to those stripes reach the shard. For later stripes it still counts as lost. A chunk is
read and written while no batch is under way, so the rebuild needs no other order with the writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from foreload.cache.client.store import COMMAND_ROWS, NO_ROWS, Read
from foreload.cache.parity.decoding import Survivors
from foreload.cache.protocol.handover.migration import Chunk, Migration, Refill
from foreload.cache.protocol.rounds.lanes import Lanes, LaneWrites
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows


class Rebuild(Refill):
    """Rebuilds the shards that are not readable, one chunk at a time.

    Args:
        migration: says how far a lane has migrated.
        on_rows: as `Refill` has it.
    """

    def __init__(
        self,
        stored: StoredRows,
        lanes: Lanes,
        rounds: Rounds,
        migration: Migration,
        on_action: Callable[[str], None],
        on_rows: Callable[[int], None],
    ) -> None:
        super().__init__(stored, lanes, rounds, on_rows)
        self._migration, self._on_action = migration, on_action

    @property
    def wanted(self) -> bool:
        """Whether a shard that is back does not have all rows of a lane yet."""
        return self._next() is not None

    def _next(self) -> tuple[LaneWrites, int] | None:
        """Return the lane and the shard to rebuild next, or None."""
        if self._shards.whole:
            return None
        for state in self._lanes.all:
            for shard in self._stored.placement.live:
                if self._shards.rebuilding(state.lane, shard):
                    return state.writes, shard
        return None

    def _select(self) -> Chunk | None:
        following = self._next()
        if following is None:
            return None
        writes, shard = following
        return self._chunk(writes, self._cursor(writes.lane, shard), COMMAND_ROWS, shard)

    def _cursor(self, lane: int, shard: int) -> int:
        return int(self._shards.of(lane).cursors[shard])

    def _survivors(self, chunk: Chunk) -> Survivors:
        return self._shards.survivors(chunk.writes.lane)

    def _all_came(self, chunk: Chunk, reads: Sequence[tuple[int, Read]]) -> bool:
        # If another shard was lost during the reads, the next attempt decodes from other shards.
        there = all(self._shards.readable(lane, read.shard) for lane, read in reads) and chunk.shard not in self._shards.lost
        return there and not self._rounds.checked.lacking(reads)

    def _put(self, chunk: Chunk, rows: np.ndarray) -> bool:
        self._write(chunk, chunk.selected.fields, rows, rebuilding=True)
        return chunk.shard not in self._shards.lost

    def _write(self, chunk: Chunk, fields: np.ndarray, rows: np.ndarray, rebuilding: bool) -> None:
        """Write rows to a chunk's shard.

        The marker says whether the shard still lacks rows. If it does not, the write also records
        how far the lane has migrated.
        """
        lane, number = chunk.writes.lane, chunk.writes.last_batch
        assert chunk.shard is not None
        moved = None if rebuilding else self._migration.status_of(lane, chunk.shard, number)
        write = self._stored.write(lane, chunk.shard, fields, rows, Marker(number, number, rebuilding), len(fields), moved)
        self._rounds.exchange([], [(lane, write)])

    def _advance(self, chunk: Chunk) -> None:
        lane, shard = chunk.writes.lane, chunk.shard
        assert shard is not None
        if len(chunk.selected.fields):
            self._shards.advance(lane, shard, chunk.end)
            passed, total = self._passed(lambda other: self._cursor(other, shard))
            self._shards.note_rebuilt(shard, passed / total if total else 1.0)
            return
        # No rows are left. The marker now says that the shard is whole, and once that is
        # acknowledged, the shard may be read.
        self._write(chunk, *NO_ROWS, rebuilding=False)
        if shard not in self._shards.lost:
            self._rounds.failover.rebuilt(lane, shard)

    def _note(self, seconds: float) -> None:
        self._on_action("rows rebuilt")
