"""The rows that a round's reads brought: each is checked, and what is missing, wrong or on a shard that is not read is decoded from its stripe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from foreload.cache.client.store import Read
from foreload.cache.errors import RowError, StoreUnavailable
from foreload.cache.parity.decoding import Decoding, StripePlaces, plan_alone, plan_decoding
from foreload.cache.protocol.rounds.failover import Failover
from foreload.cache.protocol.rounds.lanes import LaneWrites, PlannedFetch
from foreload.cache.protocol.rounds.reconnection import Exchange
from foreload.cache.protocol.shards.reading import PlannedRead, StoredRows, WrongRows, accept, decode_wrong, missing_value
from foreload.cache.rows.fields import unpack


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
