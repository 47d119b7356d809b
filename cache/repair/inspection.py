"""Inspection of lanes during training: scrub them, count their rows, and read their markers.

The traffic thread does this between its rounds. A scrub reads a chunk, and writes its repair, while
no batch is under way, as a rebuild does: the parity rows of a batch whose rows have not arrived
would not agree with the rows.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from foreload.cache.client.store import NO_ROWS, Read
from foreload.cache.errors import CacheError
from foreload.cache.parity.shard_contents import RowCounts, count_rows
from foreload.cache.protocol.rounds.background import Background, Task
from foreload.cache.protocol.rounds.lanes import Lanes, LaneWrites
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import Lag
from foreload.cache.repair.findings import Findings, Scrubbed
from foreload.cache.repair.scrub import MUST, NEVER, StripeChunk, TableRows

CHUNK_STRIPES = 1024  # fewer than in a scrub of a stopped run, because a round waits for a chunk


class ExpectedRows(Protocol):
    """The ids and tags that the schedule gives to rows, at whichever step they were stored last."""

    def of(self, lane: int, table: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, int64 [count], and the latest tags, int32 [count], of rows of a table.

        Args:
            first: the ordinal of the first row.
            count: how many rows. Those beyond the last row are zeros.
        """


class LiveScrub(Task):
    """Scrubs all stripes of an owner's lanes once.

    Rows on shards that are lost or being rebuilt are left out, and so are lanes that are released
    during the scrub.

    Attributes:
        stripes: how many stripes there were at the beginning.
        findings: the findings so far, guarded by the monitor.
    """

    def __init__(self, stored: StoredRows, rounds: Rounds, lanes: Lanes, monitor: Monitor, known: ExpectedRows) -> None:
        super().__init__()
        self._stored, self._shards, self._rounds, self._known = stored, stored.shards, rounds, known
        self._lanes, self._monitor = lanes, monitor
        states = lanes.all
        self._left = deque((state.writes, table) for state in states for table in range(len(stored.layouts)))
        self._first = 0  # the next stripe of the first (lane, table) that is left
        self.findings = Findings()
        counts = [state.writes.stripes.written.counts for state in states]
        self.stripes = sum(int((-(-count // stored.placement.k)).sum()) for count in counts)

    @property
    def wanted(self) -> bool:
        """Whether stripes are left to check."""
        return bool(self._left)

    def chunk(self) -> None:
        """Check the next stripes, and repair them.

        Raises:
            RowsLost: more shards are lost than parity covers.
            StoreError: a server failed.
        """
        findings = self._chunk()
        with self._monitor:
            self.findings.add(findings)
            self._monitor.notify_all()

    def _chunk(self) -> Findings:
        writes, table = self._left[0]
        # The lane was released since the scrub began, so its stripes are left out.
        if not self._lanes.serves(writes):
            self._left.popleft()
            self._first = 0
            return Findings()
        written, k = writes.stripes.written, writes.stripes.k
        count = min(CHUNK_STRIPES, -(-int(written.counts[table]) // k) - self._first)
        if count <= 0:
            self._left.popleft()
            self._first = 0
            return Findings()
        chunk = self._plan(writes, table, count)
        self._rounds.exchange([(writes.lane, read) for read in chunk.reads], [])
        # If a shard was lost during the reads, the next attempt leaves it out.
        if not all(self._shards.readable(writes.lane, read.shard) for read in chunk.reads):
            return Findings()
        findings, repairs = chunk.judge()
        self._rounds.exchange([], [(writes.lane, write) for write in repairs])
        self._first += count
        return findings

    def _plan(self, writes: LaneWrites, table: int, count: int) -> StripeChunk:
        """Return the next `count` stripes of a table.

        The owner knows which rows were written, but of each tag only the latest value that it may
        have.
        """
        lane, k = writes.lane, writes.stripes.k
        ordinals = np.arange(self._first * k, (self._first + count) * k)
        written = writes.stripes.written.has(np.full(len(ordinals), table, np.int16), ordinals)
        ids, tags = self._known.of(lane, table, self._first * k, len(ordinals))
        presence = np.where(written, MUST, NEVER).astype(np.uint8)
        known = TableRows(table, presence, ids, tags, np.zeros(len(ordinals), bool))
        return StripeChunk.plan(self._stored, writes.stripes, self._first, known, self._shards.of(lane).unreadable)


class Inspection:
    """The inspections of one traffic's lanes that can be requested during training."""

    def __init__(self, stored: StoredRows, rounds: Rounds, lanes: Lanes, background: Background, monitor: Monitor) -> None:
        self._stored, self._rounds, self._lanes, self._monitor = stored, rounds, lanes, monitor
        self._background = background
        self._scrub: LiveScrub | None = None
        self._row_counts: RowCounts | None = None

    def probe(self) -> None:
        """Read the markers of every shard, to notice now which shards failed since the last round.

        A shard that lost its markers is noticed too. Raises as the traffic does.
        """
        self._monitor.ask(self.ask_all)

    def begin_scrub(self, known: ExpectedRows) -> None:
        """Start to check every stripe of the lanes once, beside the training.

        A scrub that is under way ends.

        Args:
            known: the ids and tags that rows may have.

        Raises:
            CacheError: there is no parity.
        """
        if not self._stored.placement.r:
            raise CacheError("scrub: there is no parity to check rows against")
        with self._monitor:
            if self._scrub is not None:
                self._background.remove(self._scrub)
            self._scrub = LiveScrub(self._stored, self._rounds, self._lanes, self._monitor, known)
            self._background.add(self._scrub)

    def scrubbed(self, finish: bool = False) -> Scrubbed | None:
        """Return the progress of the last scrub, or None if there was none.

        Args:
            finish: whether to wait for the end of the scrub, at full speed.
        """
        with self._monitor:
            scrub = self._scrub
            if scrub is None:
                return None
            if finish:
                scrub.throttled = False
                self._monitor.signal()
                self._monitor.wait_until(lambda: not scrub.wanted)
            so_far = Findings()
            so_far.add(scrub.findings)
            return Scrubbed(scrub.stripes, so_far, not scrub.wanted)

    def begin_row_counts(self) -> None:
        """Start to count, by arithmetic, the rows of the lanes on the live shards.

        `row_counts` returns the counts later.
        """
        with self._monitor:
            self._row_counts = None
        self._monitor.post(self._count)

    def row_counts(self) -> RowCounts | None:
        """Return the counted rows, or None while the count is not done."""
        with self._monitor:
            return self._row_counts

    def lag(self) -> Lag:
        """Return how much the store still lacks."""
        with self._monitor:
            batches = sum(state.batches_under_way for state in self._lanes.all)
            boundaries = sum(len(state.boundaries) for state in self._lanes.all)
            return Lag(batches, boundaries, sum(state.unwritten_rows for state in self._lanes.all))

    # Called by the traffic thread.

    def ask_all(self) -> None:
        """Read the markers of every shard.

        Raises as the rounds do.
        """
        lanes = [state.lane for state in self._lanes.all]
        reads = [
            (lane, Read(shard, self._stored.key(lane, shard), *NO_ROWS))
            for lane in lanes
            for shard in self._stored.placement.live
        ]
        self._rounds.exchange(reads, [])

    def _count(self) -> None:
        tables, shards = len(self._stored.layouts), self._stored.placement.shard_count
        counts = RowCounts.none(tables, shards)
        for state in self._lanes.all:
            counts += count_rows(state.writes.stripes, tables, shards, self._stored.shards.of(state.lane).cursors)
        with self._monitor:
            self._row_counts = counts
            self._monitor.notify_all()
