"""What is looked at beside the traffic, in its thread and between its rounds, when somebody asks: a scrub, a count, the lag, the markers."""

from __future__ import annotations

from foreload.cache.client.store import NO_ROWS, Read
from foreload.cache.errors import CacheError
from foreload.cache.parity.row_counts import RowCounts, count_rows
from foreload.cache.protocol.rounds.background import Background
from foreload.cache.protocol.rounds.lanes import Lanes
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import Lag
from foreload.cache.repair.findings import Findings, Scrubbed
from foreload.cache.repair.live_scrub import ExpectedRows, LiveScrub


class Inspection:
    """What can be asked of one traffic about its lanes while they are trained."""

    def __init__(self, stored: StoredRows, rounds: Rounds, lanes: Lanes, background: Background, monitor: Monitor) -> None:
        self._stored, self._rounds, self._lanes, self._monitor = stored, rounds, lanes, monitor
        self._background = background
        self._scrub: LiveScrub | None = None
        self._row_counts: RowCounts | None = None

    def probe(self) -> None:
        """Ask every shard for its markers, so that one that died since the last round, or lost them, is noticed now. Raises as the traffic does."""
        self._monitor.ask(self.ask_all)

    def begin_scrub(self, known: ExpectedRows) -> None:
        """Check every stripe of the lanes once from now on, beside the training; a scrub before is over. Raises CacheError without parity.

        known: the ids and tags that rows may have.
        """
        if not self._stored.placement.r:
            raise CacheError("scrub: there is no parity to check rows against")
        with self._monitor:
            if self._scrub is not None:
                self._background.remove(self._scrub)
            self._scrub = LiveScrub(self._stored, self._rounds, self._lanes, self._monitor, known)
            self._background.add(self._scrub)

    def scrubbed(self, finish: bool = False) -> Scrubbed | None:
        """How far the last scrub is; None if there was none. finish: wait for its end, at full speed."""
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
        """Have counted, by arithmetic, what the live shards hold of the lanes; `row_counts` gives it later."""
        with self._monitor:
            self._row_counts = None
        self._monitor.post(self._count)

    def row_counts(self) -> RowCounts | None:
        """What was counted; None until it is."""
        with self._monitor:
            return self._row_counts

    def lag(self) -> Lag:
        """What the store still lacks."""
        with self._monitor:
            batches = sum(state.batches_under_way for state in self._lanes.all)
            boundaries = sum(len(state.boundaries) for state in self._lanes.all)
            return Lag(batches, boundaries, sum(state.unwritten_rows for state in self._lanes.all))

    # The traffic's thread.

    def ask_all(self) -> None:
        """Ask every shard for its markers. Raises as the rounds do."""
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
