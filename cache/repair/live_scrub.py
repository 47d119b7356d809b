"""Scrubbing lanes that are being trained, by their owner, a chunk at a time.

A chunk is read, and its repair written, while no batch is under way, as a chunk of a rebuild is: parity rows of a batch whose rows have not arrived
would not agree with these.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from foreload.cache.protocol.rounds.background import Task
from foreload.cache.protocol.rounds.lanes import Lanes, LaneWrites
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.repair.findings import Findings
from foreload.cache.repair.scrub import MUST, NEVER, StripeChunk, TableRows

CHUNK_STRIPES = 1024  # fewer than of lanes at rest: a round waits for a chunk


class ExpectedRows(Protocol):
    """What the schedule says of rows, whichever step they were last stored at."""

    def of(self, lane: int, table: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [count] and latest tags int32 [count] of the rows from ordinal `first` on, zeros beyond the last."""


class LiveScrub(Task):
    """Scrubs all stripes of an owner's lanes once.

    stripes: how many there were at the beginning; findings: so far, with the monitor held. Rows on shards that are lost or being rebuilt are left
    out, and those of lanes that are released meanwhile.
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
        """Whether there are stripes left to be checked."""
        return bool(self._left)

    def chunk(self) -> None:
        """Check the next stripes, and repair them. Raises RowsLost, StoreError."""
        findings = self._chunk()
        with self._monitor:
            self.findings.add(findings)
            self._monitor.notify_all()

    def _chunk(self) -> Findings:
        writes, table = self._left[0]
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
        if not all(self._shards.readable(writes.lane, read.shard) for read in chunk.reads):
            return Findings()  # one more is lost; the next attempt goes without it
        findings, repairs = chunk.judge()
        self._rounds.exchange([], [(writes.lane, write) for write in repairs])
        self._first += count
        return findings

    def _plan(self, writes: LaneWrites, table: int, count: int) -> StripeChunk:
        """The next `count` stripes of a table. Which rows were written is known here; of a tag only the latest that it may be."""
        lane, k = writes.lane, writes.stripes.k
        ordinals = np.arange(self._first * k, (self._first + count) * k)
        written = writes.stripes.written.has(np.full(len(ordinals), table, np.int16), ordinals)
        ids, tags = self._known.of(lane, table, self._first * k, len(ordinals))
        presence = np.where(written, MUST, NEVER).astype(np.uint8)
        known = TableRows(table, presence, ids, tags, np.zeros(len(ordinals), bool))
        return StripeChunk.plan(self._stored, writes.stripes, self._first, known, self._shards.of(lane).unreadable)
