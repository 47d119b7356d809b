"""Rounds with parity: the phases in which a batch becomes part of the store (docs/internals/cache.md, Parity; docs/protocol.md).

Read phase: the parity rows of the stripes that the batch touches, and the fetches. Parity phase: the new parity rows, once all is read, the rows
of the batch before are acknowledged, and the batch is in the log. Data phase: the rows, in one exchange with the next read phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from foreload.cache.client.store import NO_ROWS, Read, Write
from foreload.cache.errors import RowError, StoreBusy, StoreError, StoreUnavailable
from foreload.cache.parity.decoding import Decoding, StripePlaces, plan_alone, plan_decoding
from foreload.cache.protocol.batch_log import BatchLog, LoggedBatch
from foreload.cache.protocol.batches import WriteBackBatch
from foreload.cache.protocol.failover import Failover
from foreload.cache.protocol.lanes import Lanes, LaneTraffic, LaneWrites, PlannedFetch
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.reading import (
    Expected,
    PlannedRead,
    StoredRows,
    WrongRows,
    accept,
    decode_wrong,
    missing_value,
    plan_reads,
)
from foreload.cache.protocol.rounds import Rounds, RoundStats
from foreload.cache.rows.fields import unpack
from foreload.cache.rows.staging import EventStaging
from foreload.pipelines.schedule.format import Arrivals


class ParityRounds(Rounds):
    """With parity: a shard that fails is lost, and what it has is decoded from the others.

    failover: for the shards of these rows; log: where the batch under way is held.
    """

    needs_base = True

    def __init__(
        self,
        stored: StoredRows,
        lanes: Lanes,
        check_tags: bool,
        on_action: Callable[[str], None],
        on_stats: Callable[[RoundStats], None],
        failover: Failover,
        log: BatchLog,
    ) -> None:
        super().__init__(stored, lanes, check_tags, on_action, on_stats)
        assert stored.placement.code is not None
        self._code, self._failover, self._log = stored.placement.code, failover, log
        # Of each lane whose batch is in its parity phase: the markers that a shard may have.
        self._phase: dict[int, list[Marker]] = {}
        self._parity_took = 0.0  # seconds, of the batches that are pending

    def run(self, fetches: Sequence[PlannedFetch]) -> bool:
        """Data phase of the batches before and read phase of the next, in one exchange; then the parity phase of these."""
        lanes = self._lanes.all
        self._begin([state for state in lanes if state.writes.first is not None and state.writes.staging.waiting])
        cut: list[tuple[LaneWrites, WriteBackBatch]] = []
        for state in lanes:
            batch = state.writes.staging.cut(self._shards.of(state.lane).cursors, self._size.rows)
            if batch is not None:
                cut.append((state.writes, batch))
        sent = [state.writes for state in lanes if state.writes.pending is not None]
        if not sent and not fetches and not cut:
            return False
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
        """The data phase of all batches, as an exchange of its own."""
        sent = [state.writes for state in self._lanes.all if state.writes.pending is not None]
        if sent:
            self._on_stats(self._read_phase([], [], sent))
        return bool(sent)

    def see_to_shards(self) -> bool:
        """While not all shards are whole: data goes out by itself, and servers that are there again, or named instead, are taken back."""
        self._failover.lose_found()
        self._failover.move_replaced()
        if self._shards.whole:
            return False
        flushed = self.flush_pending()
        self._failover.take_back({state.lane: state.writes.last_batch for state in self._lanes.all})
        return flushed

    def fail(self, shard: int, error: StoreError) -> None:
        """Go on without a shard."""
        if shard not in self._shards.lost:
            self._failover.lose(shard, str(error), not isinstance(error, StoreUnavailable) or isinstance(error, StoreBusy))

    def forget(self, shard: int) -> None:
        """Look for its server no more."""
        self._failover.forget(shard)

    @property
    def all_whole(self) -> bool:
        """Whether every shard is whole, and none is to have another server."""
        return self._failover.all_whole

    def replace(self, shard: int, url: str) -> None:
        """Use another server in place of a shard's from now on."""
        self._failover.replace(shard, url)

    def raise_term(self, term: int) -> None:
        """Fence as an owner of this term from now on."""
        self._failover.raise_term(term)

    def close(self) -> None:
        """Look for lost shards no more."""
        self._failover.close()

    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]]) -> None:
        """Do what the live shards are asked; what is left undone belongs to shards that are lost afterwards."""
        self._failover.exchange(reads, writes, self._markers)

    def _base_fetch(self, writes: LaneWrites, batch: WriteBackBatch) -> PlannedFetch:
        """The fetch of what a batch replaces and is not at hand, as after a takeover; it is decoded where a shard is lost, as any row is."""
        assert batch.baseless is not None
        who = batch.baseless.rows
        nowhere = Arrivals(*who.columns(), np.full(len(who), -1, np.int32), np.full(len(who), -1, np.int32))
        expected = Expected(*who.columns(), writes.lane)
        return PlannedFetch(writes, expected, EventStaging(nowhere, self._stored.shapes), np.arange(len(who)))

    def _begin(self, lanes: Sequence[LaneTraffic]) -> None:
        """Write the empty batch with which an owner's begin: from then on each number follows the one before.

        Not before there is a batch to write: what an owner changed nothing of stays as it was found.
        """
        if not lanes:
            return
        out: list[tuple[int, Write]] = []
        for writes in (state.writes for state in lanes):
            lane, number = writes.lane, writes.first
            assert number is not None
            leftover = self._shards.of(lane).leftover
            self._log.hold(lane, LoggedBatch.empty(number, writes.last_batch, writes.held + leftover))
            self._phase[lane] = [Marker(writes.last_batch, writes.last_batch), Marker(number, number)]
            for shard in self._stored.placement.live:
                marker = Marker(number, number, self._shards.rebuilding(lane, shard))
                out.append((lane, self._stored.write(lane, shard, *NO_ROWS, marker, 0)))
        self.exchange([], out)
        self._phase.clear()
        for state in lanes:
            writes = state.writes
            assert writes.first is not None
            writes.last_batch = writes.staging.number = writes.first
            writes.first = None
        self._on_stats(RoundStats(begun=lanes))

    def _read_phase(
        self, fetches: Sequence[PlannedFetch], cut: Sequence[tuple[LaneWrites, WriteBackBatch]], sent: Sequence[LaneWrites]
    ) -> RoundStats:
        """Read phase of these fetches and batches, with the data phase of what is pending in `sent`.

        A shard that lacks a row, or has another in its place, is lost; where parity does not cover one more loss, the row alone is decoded, and
        repaired.
        """
        for fetch in fetches:
            fetch.reads = plan_reads(self._stored, fetch.expected)
        parity = [(writes.lane, read) for writes, batch in cut for read in self._parity_reads(writes, batch)]
        out = [write for writes in sent for write in self._data_writes(writes)]
        if out:
            self._on_action("data leaves")
        if any(fetch.reads for fetch in fetches):
            self._on_action("fetch leaves")
        if parity:
            self._on_action("parity rows asked for")
        for fetch in fetches:
            for planned in fetch.reads:
                planned.asked = self._shards.read_from(fetch.writes.lane, planned.read.shard)
        asked = [(fetch.writes.lane, planned.read) for fetch in fetches for planned in fetch.reads if planned.asked]
        begun = time.monotonic()
        self.exchange([*asked, *parity], out)
        if out:
            self._note_exchange(time.monotonic() - begun, out, [read for _, read in (*asked, *parity)], self._parity_took)
            self._on_action("data acknowledged")
        stats = RoundStats(fetched=fetches)
        # Before anything is decoded: a shard that comes back without these rows now is not the one that acknowledged them.
        self._released(sent, stats)
        for lane, read in parity:
            if (
                read.missing is not None
                and self._live(read.shard)
                and not self._distrusted(read.shard, missing_value(self._stored, lane, read))
            ):
                self._decode_parity(lane, read)
        stats.rows_decoded = self._take_rows(fetches)
        stats.bytes_read += sum(planned.read.rows.nbytes for fetch in fetches for planned in fetch.reads)
        for _, read in parity:
            stats.parity_rows_read += len(read.fields)
            stats.bytes_read += read.rows.nbytes
        if parity:
            self._on_action("parity rows read")
        return stats

    def _parity_phase(self, cut: Sequence[tuple[LaneWrites, WriteBackBatch]]) -> RoundStats:
        """Compute and log the parity rows of batches, then send them: every live shard gets the marker, also where it has none of them."""
        out: list[tuple[int, Write]] = []
        for writes, batch in cut:
            assert batch.old is not None
            batch.update(self._code)
            with_parity = writes.held + batch.fresh.all_parity_rows
            held = np.stack([writes.held, with_parity, with_parity + batch.fresh.all_rows], axis=1)
            there = held + self._shards.of(writes.lane).leftover[:, None]
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
        for writes, batch in cut:
            writes.stripes.written.note(batch.table, batch.ordinal)
            writes.pending = batch
        live = [write for _, write in out if self._live(write.shard)]
        return RoundStats(
            parity_rows_written=sum(len(write.fields) for write in live), bytes_written=sum(write.rows.nbytes for write in live)
        )

    def _markers(self, lane: int) -> list[Marker]:
        """What the marker of a lane may be now on a store shard that has all of it."""
        if lane in self._phase:
            return self._phase[lane]
        writes = self._lanes[lane].writes
        if writes.pending is None:
            return [Marker(writes.last_batch, writes.last_batch)]
        # The reads go first, but a server may do them last.
        number = writes.pending.number
        return [Marker(number, writes.last_batch), Marker(number, number)]

    def _live(self, shard: int) -> bool:
        return shard not in self._shards.lost

    def _parity_reads(self, writes: LaneWrites, batch: WriteBackBatch) -> list[Read]:
        """The reads of the parity rows that a batch updates, in place: into the batch's own array."""
        parts = ((shard, *batch.updated_parity(shard)) for shard in self._stored.placement.live)
        return [
            Read(shard, self._stored.key(writes.lane, shard), fields, rows, any_length=True)
            for shard, fields, rows in parts
            if len(fields)
        ]

    def _distrusted(self, shard: int, error: RowError) -> bool:
        """Lose a live shard, which lacks a row, if parity covers that; returns whether it does."""
        if not self._shards.covers(shard):
            return False
        self._failover.lose(shard, str(error))
        return True

    def _take_rows(self, fetches: Sequence[PlannedFetch]) -> int:
        """Check the rows that came, and put them where they go; returns how many were decoded."""
        left = [(fetch, planned) for fetch in fetches for planned in fetch.reads]
        decoded = 0
        while left:
            decoded += self._decode_unread(left)
            wanting: list[tuple[PlannedFetch, PlannedRead]] = []
            for fetch, planned in left:
                lane, shard = fetch.writes.lane, planned.read.shard
                try:
                    accept(self._stored, fetch.expected, planned, fetch.event.rows, fetch.places, self._check_tags)
                except RowError as error:
                    if planned.decoded and (planned.asked or not self._shards.readable(lane, shard)):
                        raise
                    if planned.decoded:
                        # It was decoded to be faster; now it is seen what is there.
                        planned.decoded, planned.asked = False, True
                        self.exchange([(lane, planned.read)], [])
                        wanting.append((fetch, planned))
                        continue
                    # Another read may have shown it already.
                    if self._shards.readable(lane, shard) and not self._distrusted(shard, error):
                        decoded += self._decode_alone(fetch, planned, error)
                    wanting.append((fetch, planned))
            left = wanting  # of shards that are lost since, or decoded alone: once more
        return decoded

    def _decode_alone(self, fetch: PlannedFetch, planned: PlannedRead, error: RowError) -> int:
        """Decode the wrong rows of a read, and repair them, where more shards would be lost than parity covers. Raises the error if it must."""
        writes, read = fetch.writes, planned.read
        lost = self._unreadable(writes.lane, read.shard)
        wrong_rows = decode_wrong(self._stored, writes.stripes, fetch.expected, planned, error, lost)
        self._read_alone(writes.lane, wrong_rows.reads, error)
        self.exchange([], [(writes.lane, write) for write in wrong_rows.put(self._stored, writes.lane, read)])
        planned.decoded = True
        return len(wrong_rows.places)

    def _decode_parity(self, lane: int, read: Read) -> None:
        """The same for parity rows of a read that are missing, and are to be updated. Raises RowError."""
        error = missing_value(self._stored, lane, read)
        assert read.missing is not None
        places, stripes = np.flatnonzero(read.missing), self._lanes[lane].writes.stripes
        table, stripe = unpack(read.fields[places])
        place = np.empty(len(places), np.int64)
        for one in np.unique(table).tolist():
            own = table == one
            place[own] = (stripes.shards(one, stripe[own]) == read.shard).argmax(axis=1)
        lost = self._unreadable(lane, read.shard)
        decoding = plan_alone(
            stripes, self._stored.placement, lost, StripePlaces(table, stripe, place), read.rows.shape[1], self._stored.keys(lane)
        )
        if decoding is None:
            raise error
        wrong_rows = WrongRows(places, decoding)
        self._read_alone(lane, wrong_rows.reads, error)
        self.exchange([], [(lane, write) for write in wrong_rows.put(self._stored, lane, read)])

    def _unreadable(self, lane: int, shard: int) -> np.ndarray:
        """The shards that a lane's rows cannot be read from, and this one: bool [shards]."""
        return self._shards.of(lane).unreadable | self._stored.placement.mask([shard])

    def _read_alone(self, lane: int, reads: Sequence[Read], error: RowError) -> None:
        """Do the reads that single rows are decoded from; raises the error where any of them cannot be had."""
        self.exchange([(lane, read) for read in reads], [])
        if not all(self._shards.readable(lane, read.shard) and read.missing is None for read in reads):
            raise error

    def _decode_unread(self, left: Sequence[tuple[PlannedFetch, PlannedRead]]) -> int:
        """Fill the reads of shards that are not read from what is left of their stripes; returns how many rows that were."""
        if all(planned.asked or planned.decoded for _, planned in left) and self._shards.whole:
            return 0
        k = self._stored.placement.k
        # Again where a shard is lost meanwhile, until what is decoded from is all there.
        while True:
            work: list[tuple[PlannedFetch, PlannedRead, Decoding]] = []
            reads: list[tuple[int, Read]] = []
            for fetch, planned in left:
                lane, stripes, shard = fetch.writes.lane, fetch.writes.stripes, planned.read.shard
                if planned.decoded or (planned.asked and self._shards.readable(lane, shard)):
                    continue
                if self._shards.read_from(lane, shard):
                    # It was avoided, until another was lost.
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
            self.exchange(reads, [])
            if all(self._shards.readable(lane, read.shard) for lane, read in reads) and not self.lacking(sources):
                break
        for _, planned, plan in work:
            planned.read.rows[:] = plan.decode()
            planned.read.missing = None
            planned.decoded = True
        if work:
            self._on_action("rows decoded")
        return sum(len(planned.places) for _, planned, _ in work)

    def lacking(self, reads: Sequence[tuple[int, Read]]) -> bool:
        """Whether a live shard lacks a row that it must have; it is lost then. Raises RowError where parity does not cover that."""
        any_lost = False
        for lane, read in reads:
            if read.missing is not None and self._live(read.shard):
                error = missing_value(self._stored, lane, read)
                if not self._distrusted(read.shard, error):
                    raise error
                any_lost = True
        return any_lost
