"""Store shards that do not have all of their rows, beside the traffic and between its rounds: noticed, replaced, taken back, rebuilt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np

from foreload.cache.errors import RowsLost
from foreload.cache.parity.decoding import lost_rows
from foreload.cache.protocol.failover import Failover
from foreload.cache.protocol.lanes import LaneTraffic
from foreload.cache.protocol.monitor import Monitor
from foreload.cache.protocol.reading import StoredRows
from foreload.cache.protocol.rounds import Rounds
from foreload.cache.repair.rebuild import Rebuild

_POLL = timedelta(milliseconds=50)


class ShardRepair:
    """Of the shards of one traffic with parity. rows_rebuilt: so far, with parity rows; on_action: the traffic's."""

    def __init__(
        self,
        stored: StoredRows,
        failover: Failover,
        rounds: Rounds,
        lanes: Sequence[LaneTraffic],
        monitor: Monitor,
        on_action: Callable[[str], None],
    ) -> None:
        self._stored, self._shards, self._failover, self._monitor = stored, stored.shards, failover, monitor
        self._on_action = on_action
        self._lanes = [state.writes for state in lanes]
        self._rebuild = Rebuild(stored, failover, rounds, self._lanes)
        self._replaced: list[tuple[int, str]] = []
        self.rows_rebuilt = 0

    # The trainer's side.

    def replace(self, shard: int, url: str) -> None:
        """Use another server in place of a shard's from now on."""
        with self._monitor:
            self._replaced.append((shard, url))
            self._monitor.signal()

    def finish(self, patience: timedelta) -> list[int]:
        """Wait until every shard is whole, as fast as can be, but no longer than `patience`; returns those that are lost."""
        self._rebuild.throttled = False
        deadline = time.monotonic() + patience.total_seconds()
        with self._monitor:
            self._monitor.wait_until(
                lambda: (not self._replaced and self._shards.snapshot.whole) or time.monotonic() >= deadline, _POLL
            )
            return self._shards.snapshot.lost

    # The traffic's thread.

    def patience(self) -> float | None:
        """Seconds after which the next chunk of a rebuild is due; None if there is none."""
        return self._rebuild.wait().total_seconds() if self._rebuild.wanted() is not None else None

    def work(self, flush_pending: Callable[[], bool]) -> bool:
        """While not all shards are whole: take back those that are there again, and rebuild, a chunk; False if there was nothing to do.

        flush_pending: sends the rows of all batches under way, and says whether there were any.
        """
        for shard, url in self._replacements():
            self._failover.replace(shard, url)
        if self._shards.whole:
            return False
        flushed = flush_pending()
        self._failover.take_back({writes.lane: writes.last_batch for writes in self._lanes})
        wanted = self._rebuild.wanted()
        if wanted is None or self._rebuild.wait():
            return flushed
        rows = self._rebuild.chunk(*wanted)
        with self._monitor:
            self.rows_rebuilt += rows
            self._monitor.notify_all()
        self._on_action("rows rebuilt")
        return True

    def described(self, error: RowsLost) -> RowsLost:
        """The same error with the rows, by table, that are gone."""
        gone = self._stored.placement.mask(error.shards)
        counts: np.ndarray = np.zeros(len(self._stored.layouts), np.int64)
        for writes in self._lanes:
            counts += lost_rows(writes.stripes, len(counts), gone)
        rows = {layout.name: int(count) for layout, count in zip(self._stored.layouts, counts, strict=True)}
        return RowsLost(error.shards, error.covered, rows)

    def _replacements(self) -> list[tuple[int, str]]:
        """The servers to be used from now on; one for a shard that is not lost waits until all are whole."""
        with self._monitor:
            ready = [change for change in self._replaced if change[0] in self._shards.lost]
            if not ready and self._replaced and self._shards.whole:
                ready = self._replaced[:1]
            self._replaced = [change for change in self._replaced if change not in ready]
            return ready
