"""Rounds with the store: what the owner of lanes reads and writes, and in which order.

With parity a round has three phases (docs/internals/cache.md, Parity; docs/protocol.md):

1. Read phase: read the parity rows of the stripes that the next batch of each lane touches, and the
   rows of the fetches that are due.
2. Parity phase: write the new parity rows. It begins once everything is read, the rows of the batch
   before are acknowledged, and the batch is in the log.
3. Data phase: write the rows, in one exchange with the next read phase.

Without parity nothing must precede the rows of a batch, so a round is one exchange of these rows
and the fetches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreload.cache.client.store import NO_ROWS, Read, Write
from foreload.cache.errors import RowError, StoreUnavailable
from foreload.cache.parity.decoding import Decoding, StripePlaces, plan_alone, plan_decoding
from foreload.cache.parity.erasure import Code
from foreload.cache.protocol.ownership.batch_log import BatchLog, LoggedBatch
from foreload.cache.protocol.rounds.background import AdaptiveSize
from foreload.cache.protocol.rounds.failover import Failover
from foreload.cache.protocol.rounds.lanes import BATCH_ROWS, Lanes, LaneTraffic, LaneWrites, PlannedFetch, WriteBackBatch
from foreload.cache.protocol.rounds.reconnection import Exchange
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import (
    Expected,
    PlannedRead,
    StoredRows,
    WrongRows,
    accept,
    decode_wrong,
    missing_value,
    plan_reads,
)
from foreload.cache.rows.row_bytes import unpack
from foreload.cache.rows.staging import EventStaging
from foreload.pipelines.schedule.format import Arrivals


class CheckedReads:
    """Checks the results of the reads of an owner's rounds.

    A shard that lacks a row, or has another row in its place, is lost. If parity does not cover one
    more loss, only the wrong row is decoded, and the store is repaired. Without parity a missing or
    wrong row is a RowError.

    Args:
        failover: loses shards.
        exchange: performs further reads, and repairs.
        on_action: as `Traffic` has it.
    """

    def __init__(
        self,
        stored: StoredRows,
        failover: Failover,
        exchange: Exchange,
        on_action: Callable[[str], None],
    ) -> None:
        self._stored, self._shards, self._failover = stored, stored.shards, failover
        self._exchange, self._on_action = exchange, on_action

    def take_parity(self, reads: Sequence[tuple[LaneWrites, Read]]) -> None:
        """Decode the parity rows to be updated that are missing on a live shard.

        Raises:
            RowError: a parity row is missing and cannot be decoded.
        """
        for writes, read in reads:
            if read.missing is not None and self._live(read.shard):
                error = missing_value(self._stored, writes.lane, read)
                if not self._distrusted(read.shard, error):
                    self._decode_parity(writes, read, error)

    def take_rows(self, fetches: Sequence[PlannedFetch]) -> int:
        """Check the rows that were read, and copy them to the staging of their events.

        Returns:
            How many rows were decoded.

        Raises:
            RowError: a row is missing or wrong and cannot be decoded.
            RowsLost: more shards are lost than parity covers.
        """
        left = [(fetch, planned) for fetch in fetches for planned in fetch.reads]
        decoded = 0
        while left:
            decoded += self._decode_unread(left)
            wanting: list[tuple[PlannedFetch, PlannedRead]] = []
            for fetch, planned in left:
                lane, shard = fetch.writes.lane, planned.read.shard
                try:
                    accept(self._stored, fetch.expected, planned, fetch.event.rows, fetch.places)
                except RowError as error:
                    if planned.decoded and (planned.asked or not self._shards.readable(lane, shard)):
                        raise
                    if planned.decoded:
                        # The shard was avoided because it is slow. The decoded row is wrong, so
                        # read what the shard itself has.
                        planned.decoded, planned.asked = False, True
                        self._exchange([(lane, planned.read)], [])
                        wanting.append((fetch, planned))
                        continue
                    # An earlier read of this loop may have lost the shard already.
                    if self._shards.readable(lane, shard) and not self._distrusted(shard, error):
                        decoded += self._decode_alone(fetch, planned, error)
                    wanting.append((fetch, planned))
            # Go through these once more: their shard is lost by now, or their wrong rows were
            # decoded.
            left = wanting
        return decoded

    def lacking(self, reads: Sequence[tuple[int, Read]]) -> bool:
        """Return whether a live shard lacks a row that it must have. That shard is lost afterwards.

        Args:
            reads: reads that are done, each with its lane.

        Raises:
            RowError: a row is missing, and parity does not cover one more lost shard.
        """
        any_lost = False
        for lane, read in reads:
            if read.missing is not None and self._live(read.shard):
                error = missing_value(self._stored, lane, read)
                if not self._distrusted(read.shard, error):
                    raise error
                any_lost = True
        return any_lost

    def _live(self, shard: int) -> bool:
        return shard not in self._shards.lost

    def _distrusted(self, shard: int, error: RowError) -> bool:
        """Lose a shard that lacks a row, if parity covers the loss. Returns whether it does."""
        if not self._shards.covers(shard):
            return False
        self._failover.lose(shard, StoreUnavailable(str(error)))
        return True

    def _decode_unread(self, left: Sequence[tuple[PlannedFetch, PlannedRead]]) -> int:
        """Decode the rows of reads whose shard is not read, from the rest of their stripes.

        Returns how many rows were decoded.
        """
        if all(planned.asked or planned.decoded for _, planned in left) and self._shards.whole:
            return 0
        k = self._stored.placement.k
        # If a source shard is lost during the reads, plan again without it.
        while True:
            work: list[tuple[PlannedFetch, PlannedRead, Decoding]] = []
            reads: list[tuple[int, Read]] = []
            for fetch, planned in left:
                lane, stripes, shard = fetch.writes.lane, fetch.writes.stripes, planned.read.shard
                if planned.decoded or (planned.asked and self._shards.readable(lane, shard)):
                    continue
                if self._shards.read_from(lane, shard):
                    # The shard was avoided because it is slow. Another shard was lost since, so it
                    # is read after all.
                    planned.asked = True
                    reads.append((lane, planned.read))
                    continue
                rows = fetch.expected.select(planned.places)
                wanted = StripePlaces.of_rows(rows.table, rows.ordinal, k)
                row_bytes = planned.read.rows.shape[1]
                plan = plan_decoding(stripes, self._shards.sources(lane), wanted, row_bytes, self._stored.keys(lane))
                work.append((fetch, planned, plan))
            sources = [(fetch.writes.lane, read) for fetch, _, plan in work for read in plan.reads]
            reads += sources
            self._exchange(reads, [])
            if all(self._shards.readable(lane, read.shard) for lane, read in reads) and not self.lacking(sources):
                break
        for _, planned, plan in work:
            planned.read.rows[:] = plan.decode()
            planned.read.missing = None
            planned.decoded = True
        if work:
            self._on_action("rows decoded")
        return sum(len(planned.places) for _, planned, _ in work)

    def _decode_alone(self, fetch: PlannedFetch, planned: PlannedRead, error: RowError) -> int:
        """Decode only the wrong rows of a read, and repair the store.

        This is for a shard whose loss parity would not cover. Returns how many rows were decoded.

        Raises:
            RowError: the given error, if the rows cannot be decoded.
        """
        writes = fetch.writes
        lost = self._unreadable(writes.lane, planned.read.shard)
        wrong_rows = decode_wrong(self._stored, writes.stripes, fetch.expected, planned, error, lost)
        self._repair(writes.lane, planned.read, wrong_rows, error)
        planned.decoded = True
        return len(wrong_rows.places)

    def _decode_parity(self, writes: LaneWrites, read: Read, error: RowError) -> None:
        """Decode only the missing parity rows of a read, and repair the store.

        Raises:
            RowError: the given error, if the parity rows cannot be decoded.
        """
        assert read.missing is not None
        lane, stripes, places = writes.lane, writes.stripes, np.flatnonzero(read.missing)
        table, stripe = unpack(read.fields[places])
        place = np.empty(len(places), np.int64)
        for one in np.unique(table).tolist():
            own = table == one
            place[own] = (stripes.shards(one, stripe[own]) == read.shard).argmax(axis=1)
        lost, wanted = self._unreadable(lane, read.shard), StripePlaces(table, stripe, place)
        row_bytes, keys = read.rows.shape[1], self._stored.keys(lane)
        decoding = plan_alone(stripes, self._stored.placement, lost, wanted, row_bytes, keys)
        if decoding is None:
            raise error
        self._repair(lane, read, WrongRows(places, decoding), error)

    def _unreadable(self, lane: int, shard: int) -> np.ndarray:
        """Return the shards that a lane cannot be read from, and this shard: bool [shards]."""
        return self._shards.of(lane).unreadable | self._stored.placement.mask([shard])

    def _repair(self, lane: int, read: Read, wrong_rows: WrongRows, error: RowError) -> None:
        """Decode the wrong rows of a read, and write them to the shard that they belong to.

        Raises:
            RowError: the given error, if a row to decode from is not readable or is missing.
        """
        sources = wrong_rows.reads
        self._exchange([(lane, source) for source in sources], [])
        if not all(self._shards.readable(lane, source.shard) and source.missing is None for source in sources):
            raise error
        self._exchange([], [(lane, write) for write in wrong_rows.put(self._stored, lane, read)])


# Fetches wait for a batch, so a batch has only as many rows as one exchange takes this long for. It
# may take longer where fewer rows would take hardly less.
BATCH_SECONDS, MOST_BATCH_SECONDS = 0.05, 0.25
FEWEST_BATCH_ROWS = 64


@dataclass(slots=True)
class RoundStats:
    """The results of one exchange of a round, for the counters.

    Attributes:
        rows_decoded: fetched rows that were decoded from their stripes.
        bytes_read: bytes of rows and parity rows.
        bytes_written: bytes of rows and parity rows.
        fetched: the fetches whose rows are now in their staging.
        written: the batches whose rows every live shard has acknowledged.
        begun: lanes whose new owner has just written its opening (empty) batch.
    """

    parity_rows_read: int = 0
    parity_rows_written: int = 0
    rows_decoded: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    fetched: Sequence[PlannedFetch] = ()
    written: list[tuple[LaneWrites, WriteBackBatch]] = field(default_factory=list)
    begun: Sequence[LaneTraffic] = ()


class Rounds:
    """The rounds of one traffic. Only the traffic thread uses them.

    Args:
        lanes: the lanes of the traffic.
        on_stats: called once the rows that an exchange fetched are staged, before the round
            continues, so that a thread that waits for these rows does not wait for the rest of the
            round.
        failover: handles failing shards.
        log: holds the batches under way. Required with parity.
    """

    def __init__(
        self,
        stored: StoredRows,
        lanes: Lanes,
        on_action: Callable[[str], None],
        on_stats: Callable[[RoundStats], None],
        failover: Failover,
        log: BatchLog | None,
    ) -> None:
        self._stored, self._shards, self._lanes = stored, stored.shards, lanes
        self._on_action, self._on_stats, self._log = on_action, on_stats, log
        self._code = Code.of(stored.placement)  # None if there is no parity
        self.failover = failover
        self.checked = CheckedReads(stored, failover, self.exchange, on_action)
        self._size = AdaptiveSize(BATCH_ROWS, FEWEST_BATCH_ROWS, BATCH_ROWS, BATCH_SECONDS, MOST_BATCH_SECONDS)
        # For each lane whose batch is in its parity phase: the markers that a shard may have.
        self._phase: dict[int, list[Marker]] = {}
        self._parity_took = 0.0  # seconds that the parity phase of the pending batches took

    def run(self, fetches: Sequence[PlannedFetch]) -> bool:
        """Do one round: these fetches, and the next batch of each lane.

        Returns:
            False if there was nothing to exchange.

        Raises:
            RowError: a row is missing or wrong and cannot be decoded.
            StoreError: a server failed.
            RowsLost: more shards are lost than parity covers.
        """
        lanes = self._lanes.all
        self._begin([state for state in lanes if state.writes.first is not None and state.writes.staging.waiting])
        # The batches whose parity rows must be written before their rows.
        cut: list[tuple[LaneWrites, WriteBackBatch]] = []
        for state in lanes:
            batch = state.writes.staging.cut(self._shards.of(state.lane).cursors, self._size.rows)
            if batch is not None and self._code is not None:
                cut.append((state.writes, batch))
            elif batch is not None:
                state.writes.send_next(batch)
        sent = [state.writes for state in lanes if state.writes.pending is not None]
        if not sent and not fetches and not cut:
            return False
        # After a takeover the base of a row may be unknown. It is read in this phase, before the
        # log holds the batch.
        bases = [(batch, self._base_fetch(writes, batch)) for writes, batch in cut if batch.baseless is not None]
        stats = self._read_phase([*fetches, *(fetch for _, fetch in bases)], cut, sent)
        stats.fetched = fetches
        for batch, fetch in bases:
            batch.put_base(fetch.event.rows, self._stored.shapes)
        if bases:
            self._on_action("base read")
        self._on_stats(stats)
        if fetches:
            self._on_action("rows staged")
        if cut:
            self._on_stats(self._parity_phase(cut))
        return True

    def flush_pending(self) -> bool:
        """Send and await the rows of all pending batches, so that no batch is under way.

        Afterwards no read or write meets a half-written stripe. This is the data phase as an
        exchange of its own. Without parity no batch outlives its round.

        Returns:
            Whether a batch was pending.
        """
        sent = [state.writes for state in self._lanes.all if state.writes.pending is not None]
        if sent:
            self._on_stats(self._read_phase([], [], sent))
        return bool(sent)

    def see_to_shards(self) -> bool:
        """Handle shards that are not whole: flush the batches, and take returned servers back.

        As long as any shard is not whole, the data phase is an exchange of its own. Servers named
        by `Failover.replace` replace the old ones here.

        Returns:
            Whether a pending batch was flushed.

        Raises:
            CacheError: as `run` does.
        """
        self.failover.lose_found()
        self.failover.move_replaced()
        if self._shards.whole:
            return False
        flushed = self.flush_pending()
        self.failover.take_back({state.lane: state.writes.last_batch for state in self._lanes.all})
        return flushed

    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]]) -> None:
        """Perform reads and writes on the live shards, each item given with its lane.

        On return, an item that was not done belongs to a shard that is lost now. Raises as
        `Failover.exchange` does.
        """
        self.failover.exchange(reads, writes, self._markers)

    def _begin(self, lanes: Sequence[LaneTraffic]) -> None:
        """Start the batch numbers of these lanes' owner.

        With parity the owner writes an opening (empty) batch, so that from then on each batch
        number follows the one before. The owner does this only when it has a batch to write: a lane
        that the owner does not change stays as the owner found it.
        """
        if self._code is None:
            # Without parity the marker of the first batch goes to every shard, so no empty batch is
            # needed.
            for state in lanes:
                state.writes.begin()
        elif lanes:
            self._write_empty(lanes)

    def _write_empty(self, lanes: Sequence[LaneTraffic]) -> None:
        """Log the opening (empty) batch of these lanes' owner, and write its marker everywhere."""
        assert self._log is not None
        out: list[tuple[int, Write]] = []
        for writes in (state.writes for state in lanes):
            lane, number = writes.lane, writes.first
            assert number is not None
            # The log holds the record before its first byte leaves, so that a new owner can finish
            # it.
            self._log.hold(lane, LoggedBatch.empty(number, writes.last_batch, writes.held + self._shards.of(lane).leftover))
            self._phase[lane] = [Marker(writes.last_batch, writes.last_batch), Marker(number, number)]
            for shard in self._stored.placement.live:
                out.append((lane, self._stored.write(lane, shard, *NO_ROWS, self._marker(lane, shard, number), 0)))
        self.exchange([], out)
        self._phase.clear()
        for state in lanes:
            state.writes.begin()
            state.writes.last_batch = state.writes.staging.number
        self._on_stats(RoundStats(begun=lanes))

    def _base_fetch(self, writes: LaneWrites, batch: WriteBackBatch) -> PlannedFetch:
        """Return the fetch of the rows that a batch replaces and whose base is unknown.

        That is so after a takeover. If the shard of such a row is lost, the row is decoded like any
        other.
        """
        assert batch.baseless is not None
        who = batch.baseless.rows
        nowhere = Arrivals(*who.columns(), np.full(len(who), -1, np.int32), np.full(len(who), -1, np.int32))
        expected = Expected(*who.columns(), writes.lane)
        return PlannedFetch(writes, expected, EventStaging(nowhere, self._stored.shapes), np.arange(len(who)))

    def _read_phase(
        self, fetches: Sequence[PlannedFetch], cut: Sequence[tuple[LaneWrites, WriteBackBatch]], sent: Sequence[LaneWrites]
    ) -> RoundStats:
        """Do a read phase, together with the data phase of pending batches.

        Args:
            fetches: the fetches that are due.
            cut: the batches whose parity rows are read.
            sent: the lanes whose pending batch is sent.
        """
        for fetch in fetches:
            fetch.reads = plan_reads(self._stored, fetch.expected)
        parity = [(writes, read) for writes, batch in cut for read in self._parity_reads(writes, batch)]
        out = [write for writes in sent for write in self._data_writes(writes)]
        if out:
            self._on_action("data leaves")
        if any(fetch.reads for fetch in fetches):
            self._on_action("fetch leaves")
        if parity:
            self._on_action("parity rows asked for")
        planned_reads = [(fetch.writes.lane, planned) for fetch in fetches for planned in fetch.reads]
        for lane, planned in planned_reads:
            planned.asked = self._shards.read_from(lane, planned.read.shard)
        reads = [(lane, planned.read) for lane, planned in planned_reads if planned.asked]
        reads += [(writes.lane, read) for writes, read in parity]
        begun = time.monotonic()
        self.exchange(reads, out)
        if out:
            self._note_exchange(time.monotonic() - begun, out, reads)
            self._on_action("data acknowledged")
        stats = RoundStats(fetched=fetches)
        # Release the batches before anything is decoded. Decoding exchanges again, and a shard that
        # reconnects then without these rows must not pass for the one that acknowledged them.
        self._released(sent, stats)
        self.checked.take_parity(parity)
        stats.rows_decoded = self.checked.take_rows(fetches)
        stats.parity_rows_read = sum(len(read.fields) for _, read in parity)
        stats.bytes_read = sum(read.rows.nbytes for _, read in reads)
        if parity:
            self._on_action("parity rows read")
        return stats

    def _parity_reads(self, writes: LaneWrites, batch: WriteBackBatch) -> list[Read]:
        """Return the reads of the parity rows that a batch updates.

        They read in place, into the batch's own array.
        """
        parts = ((shard, *batch.updated_parity(shard)) for shard in self._stored.placement.live)
        return [
            Read(shard, self._stored.key(writes.lane, shard), fields, rows, any_length=True)
            for shard, fields, rows in parts
            if len(fields)
        ]

    def _data_writes(self, writes: LaneWrites) -> list[tuple[int, Write]]:
        """Return the writes of the rows of a lane's pending batch.

        Every live shard gets the marker, also a shard that gets none of the rows.
        """
        batch, lane = writes.pending, writes.lane
        assert batch is not None
        return [
            (
                lane,
                self._stored.write(
                    lane, shard, *batch.part(shard), self._marker(lane, shard, batch.number), int(batch.fresh.rows[shard])
                ),
            )
            for shard in self._stored.placement.live
        ]

    def _note_exchange(self, took: float, writes: Sequence[tuple[int, Write]], reads: Sequence[tuple[int, Read]]) -> None:
        """Adapt the batch size to how long an exchange took that wrote rows of batches.

        An exchange that read more rows than it wrote says nothing about the batch size.

        Args:
            took: seconds.
            writes: the writes of the exchange, each with its lane.
            reads: the reads of the exchange, each with its lane.
        """
        rows = [len(write.fields) for _, write in writes]
        few = sum(len(read.fields) for _, read in reads) <= sum(rows)
        self._size.note(max(self._parity_took, took if few else 0.0), max(rows))

    def _released(self, sent: Sequence[LaneWrites], stats: RoundStats) -> None:
        """Record that the pending batches of these lanes are acknowledged, that is, released."""
        for writes in sent:
            batch = writes.pending
            assert batch is not None
            writes.pending, writes.last_batch = None, batch.number
            stats.written.append((writes, batch))
            stats.bytes_written += batch.new.nbytes

    def _parity_phase(self, cut: Sequence[tuple[LaneWrites, WriteBackBatch]]) -> RoundStats:
        """Compute the parity rows of batches, log the batches, and write the parity rows.

        Every live shard gets the marker, also a shard that gets none of the parity rows.
        """
        assert self._code is not None
        assert self._log is not None
        out: list[tuple[int, Write]] = []
        for writes, batch in cut:
            assert batch.old is not None
            batch.update(self._code)
            with_parity = writes.held + batch.fresh.all_parity_rows
            # The row counts of each shard before the batch, with its parity, and with its data too.
            held = np.stack([writes.held, with_parity, with_parity + batch.fresh.all_rows], axis=1)
            there = held + self._shards.of(writes.lane).leftover[:, None]
            # The log must hold the batch before its first byte leaves. Otherwise a crash would
            # leave stripes half changed that no new owner could finish.
            self._log.hold(
                writes.lane,
                LoggedBatch(batch.number, batch.arrangement.row_fields, batch.old, batch.new, there, batch.number - 1),
            )
            writes.held = held[:, 2]
            self._on_action("batch logged")
            self._phase[writes.lane] = [Marker(batch.number - 1, batch.number - 1), Marker(batch.number, batch.number - 1)]
            for shard in self._stored.placement.live:
                marker = Marker(batch.number, batch.number - 1, self._shards.rebuilding(writes.lane, shard))
                fresh = int(batch.fresh.parity_rows[shard])
                out.append((writes.lane, self._stored.write(writes.lane, shard, *batch.parity_part(shard), marker, fresh)))
        self._on_action("parity leaves")
        begun = time.monotonic()
        self.exchange([], out)
        self._parity_took = time.monotonic() - begun
        self._on_action("parity acknowledged")
        self._phase.clear()
        # Every live shard has acknowledged the parity, so the rows may leave in the next exchange.
        for writes, batch in cut:
            writes.send_next(batch)
        live = [write for _, write in out if write.shard not in self._shards.lost]
        return RoundStats(
            parity_rows_written=sum(len(write.fields) for write in live), bytes_written=sum(write.rows.nbytes for write in live)
        )

    def _marker(self, lane: int, shard: int, number: int) -> Marker:
        """Return the marker of a shard that has all of a batch, parity and data."""
        return Marker(number, number, self._shards.rebuilding(lane, shard))

    def _markers(self, lane: int) -> list[Marker]:
        """Return the markers that a store shard which lacks nothing may have of a lane now."""
        if lane in self._phase:
            return self._phase[lane]
        writes = self._lanes[lane].writes
        if writes.pending is None:
            return [Marker(writes.last_batch, writes.last_batch)]
        # The reads leave before the rows of the pending batch, but a server may serve them after
        # the write. So the marker before and the marker after are both right.
        number = writes.pending.number
        parity = writes.last_batch if self._code is None else number
        return [Marker(parity, writes.last_batch), Marker(number, number)]
