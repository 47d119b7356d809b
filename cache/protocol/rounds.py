"""Rounds with the store: what is read and written for the lanes of an owner, and in which order. There are two kinds, behind one interface.

Without parity a round is one exchange with all shards (`plain_rounds`), with parity it has three phases (`parity_rounds`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from foreload.cache.client.store import Read, Write
from foreload.cache.errors import StoreError
from foreload.cache.protocol.adaptive_size import AdaptiveSize
from foreload.cache.protocol.batches import BATCH_ROWS, WriteBackBatch
from foreload.cache.protocol.lanes import Lanes, LaneTraffic, LaneWrites, PlannedFetch
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.reading import (
    StoredRows,
)

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


class Rounds(ABC):
    """The rounds of one traffic; its thread uses them.

    lanes: of the traffic. on_action: the traffic's. on_stats: called once the rows that an exchange fetched are at hand, before the round goes on,
    so that who waits for them need not wait for the rest. needs_base: whether batches must have the base of each row.
    """

    needs_base: ClassVar[bool]

    def __init__(
        self,
        stored: StoredRows,
        lanes: Lanes,
        check_tags: bool,
        on_action: Callable[[str], None],
        on_stats: Callable[[RoundStats], None],
    ) -> None:
        self._stored, self._shards, self._lanes = stored, stored.shards, lanes
        self._check_tags, self._on_action, self._on_stats = check_tags, on_action, on_stats
        self._size = AdaptiveSize(BATCH_ROWS, FEWEST_BATCH_ROWS, BATCH_ROWS, BATCH_SECONDS, MOST_BATCH_SECONDS)

    @abstractmethod
    def run(self, fetches: Sequence[PlannedFetch]) -> bool:
        """One round of these fetches and the next batch of each lane; False if there was nothing to exchange.

        Raises RowError for a row that is missing or not the one expected, and cannot be decoded, StoreError, RowsLost.
        """

    @abstractmethod
    def flush_pending(self) -> bool:
        """Have no batch under way: what is then read or written meets none half written. Returns whether there was any."""

    @abstractmethod
    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]]) -> None:
        """Do reads and writes, each with its lane, and check every marker and answer. Raises StoreError, RowsLost."""

    @abstractmethod
    def fail(self, shard: int, error: StoreError) -> None:
        """A shard does not do what it must: it is lost. Raises the error where its rows are nowhere else, and RowsLost."""

    @abstractmethod
    def forget(self, shard: int) -> None:
        """A shard is used no more, since its rows have moved away."""

    @abstractmethod
    def see_to_shards(self) -> bool:
        """Do what is to be done about shards before a round; returns whether anything was sent for it. Raises as `run` does."""

    @property
    @abstractmethod
    def all_whole(self) -> bool:
        """Whether every shard is whole, and none is to have another server; whoever holds the monitor may ask."""

    @abstractmethod
    def replace(self, shard: int, url: str) -> None:
        """Use another server in place of a shard's from now on; any thread may say so. Raises CacheError where its rows are nowhere else."""

    @abstractmethod
    def raise_term(self, term: int) -> None:
        """Fence as an owner of this term from now on."""

    @abstractmethod
    def close(self) -> None:
        """Stop whatever runs beside the rounds."""

    def _data_writes(self, writes: LaneWrites) -> list[tuple[int, Write]]:
        """The rows of a lane's pending batch: every shard gets the marker, also where it has none of them."""
        batch, lane = writes.pending, writes.lane
        assert batch is not None
        return [
            (
                lane,
                self._stored.write(
                    lane, shard, *batch.part(shard), self._marker(lane, shard, batch), int(batch.fresh.rows[shard])
                ),
            )
            for shard in self._stored.placement.live
        ]

    def _marker(self, lane: int, shard: int, batch: WriteBackBatch) -> Marker:
        """The marker of a shard that has all of a batch, parity and data."""
        return Marker(batch.number, batch.number, self._shards.rebuilding(lane, shard))

    def _note_exchange(
        self, took: float, writes: Sequence[tuple[int, Write]], reads: Sequence[Read], before: float = 0.0
    ) -> None:
        """The rows of batches are acknowledged, after so many seconds; of an exchange with more to read that says nothing. before: seconds that their
        parity took.
        """
        rows = [len(write.fields) for _, write in writes]
        few = sum(len(read.fields) for read in reads) <= sum(rows)
        self._size.note(max(before, took if few else 0.0), max(rows))

    def _released(self, sent: Sequence[LaneWrites], stats: RoundStats) -> None:
        """The pending batches of these lanes are acknowledged."""
        for writes in sent:
            batch = writes.pending
            assert batch is not None
            writes.pending, writes.last_batch = None, batch.number
            stats.written.append((writes, batch))
            stats.bytes_written += batch.new.nbytes
