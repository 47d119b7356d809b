"""Rounds without parity: one exchange with all shards, of each lane its next write-back batch, rows and marker, and all fetches that are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from foreload.cache.client.store import Read, Write
from foreload.cache.errors import CacheError, StoreError
from foreload.cache.protocol.lanes import Lanes, PlannedFetch
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.reading import StoredRows, accept, check_answer, check_marker, plan_reads
from foreload.cache.protocol.reconnection import Reconnection
from foreload.cache.protocol.rounds import Rounds, RoundStats


class PlainRounds(Rounds):
    """Without parity: a batch is pending once it is cut, and every failure of a shard is an error, but that of a connection which can be made again.

    reconnection: for the shards of these rows.
    """

    needs_base = False

    def __init__(
        self,
        stored: StoredRows,
        lanes: Lanes,
        check_tags: bool,
        on_action: Callable[[str], None],
        on_stats: Callable[[RoundStats], None],
        reconnection: Reconnection,
    ) -> None:
        super().__init__(stored, lanes, check_tags, on_action, on_stats)
        self._reconnection = reconnection

    def run(self, fetches: Sequence[PlannedFetch]) -> bool:
        """One exchange."""
        sent = []
        for state in self._lanes.all:
            if state.writes.first is not None:
                # All markers change with each batch, so that of the first is enough.
                state.writes.staging.number, state.writes.first = state.writes.first, None
            state.writes.pending = state.writes.staging.cut(self._shards.of(state.lane).cursors, self._size.rows)
            if state.writes.pending is not None:
                sent.append(state.writes)
        if not sent and not fetches:
            return False
        for fetch in fetches:
            fetch.reads = plan_reads(self._stored, fetch.expected)
        reads = [(fetch.writes.lane, planned.read) for fetch in fetches for planned in fetch.reads]
        out = [write for writes in sent for write in self._data_writes(writes)]
        if out:
            self._on_action("data leaves")
        if reads:
            self._on_action("fetch leaves")
        begun = time.monotonic()
        self.exchange(reads, out)
        if out:
            self._note_exchange(time.monotonic() - begun, out, [read for _, read in reads])
            self._on_action("data acknowledged")
        stats = RoundStats(fetched=fetches, bytes_read=sum(read.rows.nbytes for _, read in reads))
        self._released(sent, stats)
        for writes, batch in stats.written:
            writes.stripes.written.reserve(batch.table, batch.ordinal)
            writes.stripes.written.note(batch.table, batch.ordinal)
        for fetch in fetches:
            for planned in fetch.reads:
                accept(self._stored, fetch.expected, planned, fetch.event.rows, fetch.places, self._check_tags)
        self._on_stats(stats)
        if fetches:
            self._on_action("rows staged")
        return True

    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]]) -> None:
        """Do reads and writes of all shards."""
        try:
            self._exchange(reads, writes)
        except StoreError:
            self._reconnection.check_not_taken()
            raise

    def _exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]]) -> None:
        failures = self._stored.store.attempt([read for _, read in reads], [write for _, write in writes])
        for lane, read in reads:
            if read.shard not in failures:
                check_marker(self._stored, lane, read, self._markers(lane))
        for lane, write in writes:
            if write.shard not in failures:
                check_answer(self._stored, lane, write)
                self._stored.note(lane, write)
        if failures:
            again, left = self._reconnection.reconnect(failures, self._markers, writes, lambda shards: not shards)
            for error in left.values():
                raise error
            self._reconnection.repeat(reads, writes, again, self.exchange)

    def _markers(self, lane: int) -> list[Marker]:
        """What the marker of a lane may be now on a store shard."""
        writes = self._lanes[lane].writes
        allowed = [Marker(writes.last_batch, writes.last_batch)]
        if writes.pending is not None:
            # The reads go first, but a server may do them last.
            allowed.append(Marker(writes.pending.number, writes.pending.number))
        return allowed

    def flush_pending(self) -> bool:
        """No batch outlives its round."""
        return False

    def fail(self, shard: int, error: StoreError) -> None:
        """An error."""
        raise error

    def forget(self, shard: int) -> None:
        """It is not looked for."""

    def see_to_shards(self) -> bool:
        """Nothing: they all are there."""
        return False

    @property
    def all_whole(self) -> bool:
        """Always so."""
        return True

    def replace(self, shard: int, url: str) -> None:
        """Refused."""
        raise CacheError(f"store shard {shard}: there is no parity, so its rows are nowhere else; restore them and --resume")

    def raise_term(self, term: int) -> None:
        """Fence as an owner of this term from now on."""
        self._reconnection.raise_term(term)

    def close(self) -> None:
        """Nothing runs."""
