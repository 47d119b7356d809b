"""Scrubbing lanes that are being trained, by their owner, a chunk at a time.

A chunk is read, and its repair written, while no batch is under way, as a chunk of a rebuild is: parity rows of a batch whose rows have not arrived
would not agree with these.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np

from foreload.cache.protocol.reading import StoredRows
from foreload.cache.protocol.rounds import LaneWrites, Rounds
from foreload.cache.repair.rebuild import SHARE
from foreload.cache.repair.scrub import (
    MUST,
    NEVER,
    Findings,
    StripeChunk,
    TableRows,
)

CHUNK_STRIPES = 1024


class ExpectedRows(Protocol):
    """What the schedule says of rows, whichever step they were last stored at."""

    def of(self, lane: int, table: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [count] and latest tags int32 [count] of the rows from ordinal `first` on, zeros beyond the last."""


class LiveScrub:
    """Scrubs all stripes of an owner's lanes once. throttled: no more than a quarter of the time goes into it.

    stripes: how many there were at the beginning; findings: so far. Rows on shards that are lost or being rebuilt are left out.
    """

    def __init__(self, stored: StoredRows, rounds: Rounds, lanes: Sequence[LaneWrites], known: ExpectedRows) -> None:
        self._stored, self._shards, self._rounds, self._known = stored, stored.shards, rounds, known
        self._left = deque((writes, table) for writes in lanes for table in range(len(stored.layouts)))
        self._first = 0
        self._not_before = 0.0
        self.throttled = True
        self.findings = Findings()
        self.stripes = sum(int((-(-writes.stripes.written.counts // writes.stripes.k)).sum()) for writes in lanes)

    @property
    def done(self) -> bool:
        """Whether all stripes were checked."""
        return not self._left

    def wait(self) -> timedelta:
        """How long the next chunk is to wait, if training is to come first."""
        return timedelta(seconds=max(self._not_before - time.monotonic(), 0.0) if self.throttled else 0.0)

    def chunk(self) -> Findings:
        """Check the next stripes, and repair them; no batch of any lane is under way. Raises RowsLost, StoreError."""
        begun = time.monotonic()
        writes, table = self._left[0]
        written, k = writes.stripes.written, writes.stripes.k
        count = min(CHUNK_STRIPES, -(-int(written.counts[table]) // k) - self._first)
        if count <= 0:
            self._left.popleft()
            self._first = 0
            return Findings()
        chunk = self._plan(writes, table, count)
        self._rounds.exchange_alone([(writes.lane, read) for read in chunk.reads], [])
        if not all(self._shards.readable(writes.lane, read.shard) for read in chunk.reads):
            return Findings()  # one more is lost; the next attempt goes without it
        found, repairs = chunk.judge()
        self._rounds.exchange_alone([], [(writes.lane, write) for write in repairs])
        self._first += count
        now = time.monotonic()
        self._not_before = now + (now - begun) * (1 / SHARE - 1)
        return found

    def _plan(self, writes: LaneWrites, table: int, count: int) -> StripeChunk:
        lane, k = writes.lane, writes.stripes.k
        ordinals = np.arange(self._first * k, (self._first + count) * k)
        written = writes.stripes.written.has(np.full(len(ordinals), table, np.int16), ordinals)
        ids, tags = self._known.of(lane, table, self._first * k, len(ordinals))
        presence = np.where(written, MUST, NEVER).astype(np.uint8)
        known = TableRows(table, presence, ids, tags, np.zeros(len(ordinals), bool))
        return StripeChunk.plan(self._stored, writes.stripes, self._first, known, self._shards.of(lane).unreadable)
