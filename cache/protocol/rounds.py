"""The phases of a round with the store (docs/internals/cache.md, Parity): what is read, encoded, logged and written, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreload.cache.client.store import Read, Write
from foreload.cache.errors import RowError
from foreload.cache.parity.decoding import Decoding, plan_alone, plan_decoding
from foreload.cache.parity.stripes import PARITY_BIT, LaneStripes
from foreload.cache.protocol.batch_log import BatchLog, LoggedBatch
from foreload.cache.protocol.batches import WriteBackBatch, WriteBackStaging
from foreload.cache.protocol.failover import Failover
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.reading import (
    Expected,
    Request,
    StoredRows,
    WrongRows,
    accept,
    check_answer,
    check_marker,
    decode_wrong,
    missing_value,
    plan_reads,
)
from foreload.cache.rows.staging import Rows

_TABLE_SHIFT, _ORDINAL = np.uint64(48), np.uint64((1 << 48) - 1)  # of a field


@dataclass(slots=True)
class LaneWrites:
    """Where one lane's writes stand. last_batch: the number of the last batch that is released; pending: one whose parity, if there is any, is
    acknowledged, and whose rows are not. held: int64 [shards], how many rows and parity rows a shard has that lacks none."""

    lane: int
    stripes: LaneStripes
    staging: WriteBackStaging
    last_batch: int
    held: np.ndarray
    pending: WriteBackBatch | None = None


@dataclass(slots=True)
class PlannedFetch:
    """Rows to be fetched for a lane: what is expected, its reads, and where the rows go (places, int64 [n], of `into`)."""

    writes: LaneWrites
    expected: Expected
    into: Rows
    places: np.ndarray
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class RoundStats:
    """What a round stats, for the counters. written: the batches whose rows are acknowledged by every live shard."""

    parity_rows_read: int = 0
    parity_rows_written: int = 0
    rows_decoded: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    written: list[tuple[LaneWrites, WriteBackBatch]] = field(default_factory=list)


class Rounds:
    """Runs phases over the lanes of an owner. failover: None without parity, when every failure of a shard is an error; log: with parity only."""

    def __init__(
        self,
        stored: StoredRows,
        lanes: Sequence[LaneWrites],
        failover: Failover | None,
        log: BatchLog | None,
        check_tags: bool,
        on_action: Callable[[str], None],
    ) -> None:
        self._stored, self._shards, self._failover, self._log = stored, stored.shards, failover, log
        self._check_tags, self._on_action = check_tags, on_action
        self._code = stored.placement.code
        self._shard_count = stored.placement.shard_count
        self._writes = {writes.lane: writes for writes in lanes}
        self._phase: dict[int, list[Marker]] = {}

    def cut(self, writes: LaneWrites) -> WriteBackBatch | None:
        """The lane's next batch; without parity it is pending at once."""
        batch = writes.staging.cut(self._shards.of(writes.lane).cursors)
        if self._code is None and batch is not None:
            writes.pending = batch
            return None
        return batch

    def read_phase(
        self, fetches: Sequence[PlannedFetch], cut: Sequence[tuple[LaneWrites, WriteBackBatch]], sent: Sequence[LaneWrites]
    ) -> RoundStats:
        """Read phase of these fetches and batches, with the data phase of what is pending in `sent`.

        A shard that lacks a row, or has another in its place, is lost; where more are than parity covers, the row alone is decoded, and repaired.
        Raises RowError for a row that is missing or not the one expected, and cannot be decoded, StoreError, RowsLost.
        """
        for fetch in fetches:
            fetch.requests = plan_reads(self._stored, fetch.expected)
        reads = [(fetch.writes.lane, request.read) for fetch in fetches for request in fetch.requests]
        parity = [(writes.lane, read) for writes, batch in cut for read in self._parity_reads(writes, batch)]
        out = [(writes.lane, write) for writes in sent for write in self._data_writes(writes)]
        if out:
            self._on_action("data leaves")
        if reads:
            self._on_action("fetch leaves")
        if parity:
            self._on_action("parity rows asked for")
        self._exchange([*((lane, read) for lane, read in reads if self._readable(lane, read)), *parity], out)
        if out:
            self._on_action("data acknowledged")
        stats = RoundStats(written=[(writes, writes.pending) for writes in sent if writes.pending is not None])
        # Before anything is decoded: a shard that comes back without these rows now is not the one that acknowledged them.
        for writes, batch in stats.written:
            writes.pending, writes.last_batch = None, batch.number
            stats.bytes_written += batch.new.nbytes
        for lane, read in parity:
            if (
                read.missing is not None
                and self._live(read.shard)
                and not self._distrusted(read.shard, missing_value(self._stored, lane, read))
            ):
                self._decode_parity(lane, read)
        stats.rows_decoded = self._take_rows(fetches)
        stats.bytes_read += sum(request.read.rows.nbytes for fetch in fetches for request in fetch.requests)
        for _, read in parity:
            stats.parity_rows_read += len(read.fields)
            stats.bytes_read += read.rows.nbytes
        if parity:
            self._on_action("parity rows read")
        return stats

    def parity_phase(self, cut: Sequence[tuple[LaneWrites, WriteBackBatch]]) -> RoundStats:
        """Compute and log the parity rows of batches, then send them: every live shard gets the marker, also where it has none of them."""
        assert self._code is not None
        assert self._log is not None
        out: list[tuple[int, Write]] = []
        for writes, batch in cut:
            assert batch.old is not None
            batch.update(self._code)
            with_parity = writes.held + batch.fresh.all_parity_rows
            held = np.stack([writes.held, with_parity, with_parity + batch.fresh.all_rows], axis=1)
            self._log.hold(writes.lane, LoggedBatch(batch.number, batch.arrangement.row_fields, batch.old, batch.new, held))
            writes.held = held[:, 2]
            self._on_action("batch logged")
            self._phase[writes.lane] = [Marker(batch.number - 1, batch.number - 1), Marker(batch.number, batch.number - 1)]
            for shard in range(self._shard_count):
                marker = self._marker(writes.lane, shard, batch.number, batch.number - 1)
                fresh = int(batch.fresh.parity_rows[shard])
                out.append((writes.lane, self._stored.write(writes.lane, shard, *batch.parity_part(shard), marker, fresh)))
        self._on_action("parity leaves")
        self._exchange([], out)
        self._on_action("parity acknowledged")
        self._phase.clear()
        for writes, batch in cut:
            writes.stripes.written.note(batch.table, batch.ordinal)
            writes.pending = batch
        live = [write for _, write in out if self._live(write.shard)]
        return RoundStats(
            parity_rows_written=sum(len(write.fields) for write in live), bytes_written=sum(write.rows.nbytes for write in live)
        )

    def exchange_alone(self, reads: Sequence[tuple[int, Read]], out: Sequence[tuple[int, Write]]) -> None:
        """Reads or writes beside the phases, while no batch is under way."""
        self._exchange(reads, out)

    def lacking(self, reads: Sequence[tuple[int, Read]]) -> bool:
        """Whether a live shard lacks a row that it must have; it is lost then. Raises RowError where parity does not cover that."""
        found = False
        for lane, read in reads:
            if read.missing is not None and self._live(read.shard):
                error = missing_value(self._stored, lane, read)
                if not self._distrusted(read.shard, error):
                    raise error
                found = True
        return found

    def _exchange(self, reads: Sequence[tuple[int, Read]], out: Sequence[tuple[int, Write]]) -> None:
        if self._failover is not None:
            self._failover.exchange(reads, out, self._markers)
            return
        self._stored.store.exchange([read for _, read in reads], [write for _, write in out])
        for lane, read in reads:
            check_marker(self._stored, lane, read, self._markers(lane))
        for lane, write in out:
            check_answer(self._stored, lane, write)
            self._stored.note(lane, write)

    def _markers(self, lane: int) -> list[Marker]:
        """What the marker of a lane may be now on a store shard that has all of it."""
        if lane in self._phase:
            return self._phase[lane]
        writes = self._writes[lane]
        if writes.pending is None:
            return [Marker(writes.last_batch, writes.last_batch)]
        # The reads go first, but a server may do them last.
        number = writes.pending.number
        return [Marker(number if self._code is not None else writes.last_batch, writes.last_batch), Marker(number, number)]

    def _marker(self, lane: int, shard: int, parity: int, data: int) -> Marker:
        return Marker(parity, data, self._shards.rebuilding(lane, shard))

    def _live(self, shard: int) -> bool:
        return shard not in self._shards.lost

    def _readable(self, lane: int, read: Read) -> bool:
        return self._shards.readable(lane, read.shard)

    def _data_writes(self, writes: LaneWrites) -> list[Write]:
        batch = writes.pending
        assert batch is not None
        lane, number = writes.lane, batch.number
        return [
            self._stored.write(
                lane, shard, *batch.part(shard), self._marker(lane, shard, number, number), int(batch.fresh.rows[shard])
            )
            for shard in range(self._shard_count)
        ]

    def _parity_reads(self, writes: LaneWrites, batch: WriteBackBatch) -> list[Read]:
        parts = ((shard, *batch.updated_parity(shard)) for shard in range(self._shard_count))
        return [
            Read(shard, self._stored.key(writes.lane, shard), fields, rows, any_length=True)
            for shard, fields, rows in parts
            if len(fields)
        ]

    def _distrusted(self, shard: int, error: RowError) -> bool:
        """Whether a live shard, which lacks a row, can be lost, and so is."""
        if self._failover is None or not self._shards.covers(shard):
            return False
        self._failover.lose(shard, str(error))
        return True

    def _take_rows(self, fetches: Sequence[PlannedFetch]) -> int:
        """Check the rows that came, and put them where they go; returns how many were decoded."""
        left = [(fetch, request) for fetch in fetches for request in fetch.requests]
        decoded = 0
        while left:
            decoded += self._decode_lost(left)
            wanting: list[tuple[PlannedFetch, Request]] = []
            for fetch, request in left:
                lane, shard = fetch.writes.lane, request.read.shard
                try:
                    accept(self._stored, fetch.expected, request, fetch.into, fetch.places, self._check_tags)
                except RowError as error:
                    if self._failover is None or request.decoded:
                        raise
                    # Another read may have shown it already.
                    if self._shards.readable(lane, shard) and not self._distrusted(shard, error):
                        decoded += self._decode_alone(fetch, request, error)
                    wanting.append((fetch, request))
            left = wanting
        return decoded

    def _decode_alone(self, fetch: PlannedFetch, request: Request, error: RowError) -> int:
        """Decode the wrong rows of a read, and repair them, where more shards would be lost than parity covers. Raises the error if it must."""
        writes, read = fetch.writes, request.read
        lost = self._unreadable(writes.lane, read.shard)
        found = decode_wrong(self._stored, writes.stripes, fetch.expected, request, error, lost)
        self._read_alone(writes.lane, found.reads, error)
        self._exchange([], [(writes.lane, write) for write in found.put(self._stored, writes.lane, read)])
        request.decoded = True
        return len(found.places)

    def _decode_parity(self, lane: int, read: Read) -> None:
        """The same for parity rows that are missing, and are to be updated."""
        error = missing_value(self._stored, lane, read)
        assert read.missing is not None
        places, stripes = np.flatnonzero(read.missing), self._writes[lane].stripes
        names = read.fields[places]
        table, stripe = ((names & ~PARITY_BIT) >> _TABLE_SHIFT).astype(np.int16), (names & _ORDINAL).astype(np.int64)
        place = np.empty(len(names), np.int64)
        for one in np.unique(table).tolist():
            own = table == one
            place[own] = (stripes.shards(one, stripe[own]) == read.shard).argmax(axis=1)
        lost = self._unreadable(lane, read.shard)
        decoding = plan_alone(
            stripes, self._stored.placement, lost, (table, stripe, place), read.rows.shape[1], self._stored.keys(lane)
        )
        if decoding is None:
            raise error
        found = WrongRows(places, decoding)
        self._read_alone(lane, found.reads, error)
        self._exchange([], [(lane, write) for write in found.put(self._stored, lane, read)])

    def _unreadable(self, lane: int, shard: int) -> np.ndarray:
        return self._shards.of(lane).unreadable | self._stored.placement.mask([shard])

    def _read_alone(self, lane: int, reads: Sequence[Read], error: RowError) -> None:
        self._exchange([(lane, read) for read in reads], [])
        if not all(self._readable(lane, read) and read.missing is None for read in reads):
            raise error

    def _decode_lost(self, left: Sequence[tuple[PlannedFetch, Request]]) -> int:
        """Fill the reads of shards that cannot be read from what is left of their stripes; returns how many rows that were."""
        if self._shards.whole:
            return 0
        k = self._stored.placement.k
        while True:
            work: list[tuple[PlannedFetch, Request, Decoding]] = []
            for fetch, request in left:
                lane, stripes = fetch.writes.lane, fetch.writes.stripes
                if request.decoded or self._shards.readable(lane, request.read.shard):
                    continue
                ordinal = fetch.expected.ordinal[request.places]
                wanted = fetch.expected.table[request.places], ordinal // k, ordinal % k
                row_bytes = request.read.rows.shape[1]
                plan = plan_decoding(stripes, self._shards.survivors(lane), wanted, row_bytes, self._stored.keys(lane))
                work.append((fetch, request, plan))
            reads = [(fetch.writes.lane, read) for fetch, _, plan in work for read in plan.reads]
            self._exchange(reads, [])
            if all(self._shards.readable(lane, read.shard) for lane, read in reads) and not self.lacking(reads):
                break
        for _, request, plan in work:
            request.read.rows[:] = plan.decode()
            request.read.missing = None
            request.decoded = True
        if work:
            self._on_action("rows decoded")
        return sum(len(request.places) for _, request, _ in work)
