"""Rounds with the store: what is read and written for the lanes of an owner, and in which order (docs/internals/cache.md, Parity; docs/protocol.md).

Read phase: the parity rows of the stripes that the next batch of each lane touches, and the fetches. Parity phase: the new parity rows, once all is
read, the rows of the batch before are acknowledged, and the batch is in the log. Data phase: the rows, in one exchange with the next read phase.
Without parity nothing must go before a batch's rows, so a round is one exchange: these, and the fetches.
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
    """Checks what the reads of an owner's rounds brought.

    A shard that lacks a row, or has another in its place, is lost; where parity does not cover one more loss, the row alone is decoded, and
    repaired. Without parity that is a RowError. exchange: does further reads, and repairs; on_action: as `Traffic` has it.
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
        """Decode the parity rows that are missing, and are to be updated. Raises RowError."""
        for writes, read in reads:
            if read.missing is not None and self._live(read.shard):
                error = missing_value(self._stored, writes.lane, read)
                if not self._distrusted(read.shard, error):
                    self._decode_parity(writes, read, error)

    def take_rows(self, fetches: Sequence[PlannedFetch]) -> int:
        """Check the rows that came, and put them where they go; returns how many were decoded. Raises RowError, RowsLost."""
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
                        # It was decoded to be faster; now it is seen what is there.
                        planned.decoded, planned.asked = False, True
                        self._exchange([(lane, planned.read)], [])
                        wanting.append((fetch, planned))
                        continue
                    # Another read may have shown it already.
                    if self._shards.readable(lane, shard) and not self._distrusted(shard, error):
                        decoded += self._decode_alone(fetch, planned, error)
                    wanting.append((fetch, planned))
            left = wanting  # of shards that are lost since, or decoded alone: once more
        return decoded

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

    def _live(self, shard: int) -> bool:
        return shard not in self._shards.lost

    def _distrusted(self, shard: int, error: RowError) -> bool:
        """Lose a live shard, which lacks a row, if parity covers that; returns whether it does."""
        if not self._shards.covers(shard):
            return False
        self._failover.lose(shard, StoreUnavailable(str(error)))
        return True

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
        """Decode the wrong rows of a read, and repair them, where more shards would be lost than parity covers. Raises the error if it must."""
        writes = fetch.writes
        lost = self._unreadable(writes.lane, planned.read.shard)
        wrong_rows = decode_wrong(self._stored, writes.stripes, fetch.expected, planned, error, lost)
        self._repair(writes.lane, planned.read, wrong_rows, error)
        planned.decoded = True
        return len(wrong_rows.places)

    def _decode_parity(self, writes: LaneWrites, read: Read, error: RowError) -> None:
        """The same for parity rows of a read."""
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
        """The shards that a lane's rows cannot be read from, and this one: bool [shards]."""
        return self._shards.of(lane).unreadable | self._stored.placement.mask([shard])

    def _repair(self, lane: int, read: Read, wrong_rows: WrongRows, error: RowError) -> None:
        """Decode the wrong rows of a read alone, and write them where they belong; raises the error where what they follow from cannot be had."""
        sources = wrong_rows.reads
        self._exchange([(lane, source) for source in sources], [])
        if not all(self._shards.readable(lane, source.shard) and source.missing is None for source in sources):
            raise error
        self._exchange([], [(lane, write) for write in wrong_rows.put(self._stored, lane, read)])


# A batch has as many rows as one exchange takes so long for: fetches wait for it. Longer where fewer rows would take hardly less.
BATCH_SECONDS, MOST_BATCH_SECONDS = 0.05, 0.25
FEWEST_BATCH_ROWS = 64


@dataclass(slots=True)
class RoundStats:
    """What an exchange of a round did, for the counters.

    fetched: what is at hand now; written: the batches whose rows are acknowledged by every live shard; begun: lanes of whom the empty batch is
    with which an owner's begin.
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
    """The rounds of one traffic; its thread uses them.

    lanes: of the traffic. failover: for the shards of these rows; log: where the batches under way are held, needed with parity. on_action: the
    traffic's. on_stats: called once the rows that an exchange fetched are at hand, before the round goes on, so that who waits for them need not wait
    for the rest.
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
        self._code = Code.of(stored.placement)  # None without parity
        self.failover = failover
        self.checked = CheckedReads(stored, failover, self.exchange, on_action)
        self._size = AdaptiveSize(BATCH_ROWS, FEWEST_BATCH_ROWS, BATCH_ROWS, BATCH_SECONDS, MOST_BATCH_SECONDS)
        # Of each lane whose batch is in its parity phase: the markers that a shard may have.
        self._phase: dict[int, list[Marker]] = {}
        self._parity_took = 0.0  # seconds, of the batches that are pending

    def run(self, fetches: Sequence[PlannedFetch]) -> bool:
        """One round of these fetches and the next batch of each lane; False if there was nothing to exchange.

        Raises RowError for a row that is missing or not the one expected, and cannot be decoded, StoreError, RowsLost.
        """
        lanes = self._lanes.all
        self._begin([state for state in lanes if state.writes.first is not None and state.writes.staging.waiting])
        cut: list[tuple[LaneWrites, WriteBackBatch]] = []  # whose parity rows go before their rows
        for state in lanes:
            batch = state.writes.staging.cut(self._shards.of(state.lane).cursors, self._size.rows)
            if batch is not None and self._code is not None:
                cut.append((state.writes, batch))
            elif batch is not None:
                state.writes.send_next(batch)
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
        """Have no batch under way: what is then read or written meets none half written. Returns whether there was any.

        That is the data phase of all batches, as an exchange of its own; without parity no batch outlives its round.
        """
        sent = [state.writes for state in self._lanes.all if state.writes.pending is not None]
        if sent:
            self._on_stats(self._read_phase([], [], sent))
        return bool(sent)

    def see_to_shards(self) -> bool:
        """While not all shards are whole: data goes out by itself, and servers that are there again, or named instead, are taken back.

        Returns whether anything was sent for it. Raises as `run` does.
        """
        self.failover.lose_found()
        self.failover.move_replaced()
        if self._shards.whole:
            return False
        flushed = self.flush_pending()
        self.failover.take_back({state.lane: state.writes.last_batch for state in self._lanes.all})
        return flushed

    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]]) -> None:
        """Do what the live shards are asked, each item with its lane; what is left undone belongs to shards that are lost afterwards.

        Raises as `Failover.exchange` does.
        """
        self.failover.exchange(reads, writes, self._markers)

    def _begin(self, lanes: Sequence[LaneTraffic]) -> None:
        """Have the batches of these lanes' owner begin. With parity that is an empty batch: from then on each number follows the one before.

        Not before there is a batch to write: what an owner changed nothing of stays as it was found.
        """
        if self._code is None:
            # All markers change with each batch, so that of the first is enough.
            for state in lanes:
                state.writes.begin()
        elif lanes:
            self._write_empty(lanes)

    def _write_empty(self, lanes: Sequence[LaneTraffic]) -> None:
        """Write the empty batch with which an owner's begin."""
        assert self._log is not None
        out: list[tuple[int, Write]] = []
        for writes in (state.writes for state in lanes):
            lane, number = writes.lane, writes.first
            assert number is not None
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
        """The fetch of what a batch replaces and is not at hand, as after a takeover; it is decoded where a shard is lost, as any row is."""
        assert batch.baseless is not None
        who = batch.baseless.rows
        nowhere = Arrivals(*who.columns(), np.full(len(who), -1, np.int32), np.full(len(who), -1, np.int32))
        expected = Expected(*who.columns(), writes.lane)
        return PlannedFetch(writes, expected, EventStaging(nowhere, self._stored.shapes), np.arange(len(who)))

    def _read_phase(
        self, fetches: Sequence[PlannedFetch], cut: Sequence[tuple[LaneWrites, WriteBackBatch]], sent: Sequence[LaneWrites]
    ) -> RoundStats:
        """Read phase of these fetches and batches, with the data phase of what is pending in `sent`."""
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
        # Before anything is decoded: a shard that comes back without these rows now is not the one that acknowledged them.
        self._released(sent, stats)
        self.checked.take_parity(parity)
        stats.rows_decoded = self.checked.take_rows(fetches)
        stats.parity_rows_read = sum(len(read.fields) for _, read in parity)
        stats.bytes_read = sum(planned.read.rows.nbytes for _, planned in planned_reads)
        stats.bytes_read += sum(read.rows.nbytes for _, read in parity)
        if parity:
            self._on_action("parity rows read")
        return stats

    def _parity_reads(self, writes: LaneWrites, batch: WriteBackBatch) -> list[Read]:
        """The reads of the parity rows that a batch updates, in place: into the batch's own array."""
        parts = ((shard, *batch.updated_parity(shard)) for shard in self._stored.placement.live)
        return [
            Read(shard, self._stored.key(writes.lane, shard), fields, rows, any_length=True)
            for shard, fields, rows in parts
            if len(fields)
        ]

    def _data_writes(self, writes: LaneWrites) -> list[tuple[int, Write]]:
        """The rows of a lane's pending batch: every shard gets the marker, also where it has none of them."""
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
        """The rows of batches are acknowledged, after so many seconds; of an exchange with more to read that says nothing."""
        rows = [len(write.fields) for _, write in writes]
        few = sum(len(read.fields) for _, read in reads) <= sum(rows)
        self._size.note(max(self._parity_took, took if few else 0.0), max(rows))

    def _released(self, sent: Sequence[LaneWrites], stats: RoundStats) -> None:
        """The pending batches of these lanes are acknowledged."""
        for writes in sent:
            batch = writes.pending
            assert batch is not None
            writes.pending, writes.last_batch = None, batch.number
            stats.written.append((writes, batch))
            stats.bytes_written += batch.new.nbytes

    def _parity_phase(self, cut: Sequence[tuple[LaneWrites, WriteBackBatch]]) -> RoundStats:
        """Compute and log the parity rows of batches, then send them: every live shard gets the marker, also where it has none of them."""
        assert self._code is not None
        assert self._log is not None
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
            writes.send_next(batch)
        live = [write for _, write in out if write.shard not in self._shards.lost]
        return RoundStats(
            parity_rows_written=sum(len(write.fields) for write in live), bytes_written=sum(write.rows.nbytes for write in live)
        )

    def _marker(self, lane: int, shard: int, number: int) -> Marker:
        """The marker of a shard that has all of a batch, parity and data."""
        return Marker(number, number, self._shards.rebuilding(lane, shard))

    def _markers(self, lane: int) -> list[Marker]:
        """What the marker of a lane may be now on a store shard that has all of it."""
        if lane in self._phase:
            return self._phase[lane]
        writes = self._lanes[lane].writes
        if writes.pending is None:
            return [Marker(writes.last_batch, writes.last_batch)]
        # The reads go first, but a server may do them last.
        number = writes.pending.number
        parity = writes.last_batch if self._code is None else number
        return [Marker(parity, writes.last_batch), Marker(number, number)]
