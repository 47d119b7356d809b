"""Exchanges with store shards that may fail: how an owner loses a shard, and how it takes one back.

The owner reconnects for 200 ms to a shard whose connection broke (`reconnection`). If that fails,
or if the shard stays silent for the store's timeout, the shard is *lost*, and training continues
without it: its rows are decoded from parity, and writes meant for it are left out. If more shards
do not answer than parity covers, the owner waits for them before it declares any of them lost. When
the server is back, or another server takes its place, the owner adopts it empty. Without parity no
shard may be lost, so every failure is an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np

from foreload.cache.client.store import (
    NO_ROWS,
    Read,
    Store,
    Write,
)
from foreload.cache.client.url import StoreUrl, parse_url
from foreload.cache.errors import (
    CacheError,
    Fenced,
    NamespaceInUse,
    RowsLost,
    ShardsRefuse,
    StoreBusy,
    StoreError,
    StoreUnavailable,
)
from foreload.cache.parity.decoding import lost_rows
from foreload.cache.parity.stripes import ALL_STRIPES, LaneStripes
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.rounds.reconnection import RECONNECT, Markers, Reconnection, is_broken
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import join
from foreload.cache.protocol.shards.reading import StoredRows, check_answer, check_marker
from foreload.cache.protocol.shards.shard_status import Patience, ServerUnreachable, ShardNews

PROBE_PAUSE = timedelta(milliseconds=200)
UNREACHABLE = timedelta(seconds=5)  # of looking, after which a server is reported as unreachable


@dataclass(slots=True)
class Wanted:
    """A server that the probe looks for.

    Attributes:
        since: when the search began, as time.monotonic().
        not_before: when the probe may first try the server, as time.monotonic().
        reported: whether the server was reported as unreachable.
    """

    url: StoreUrl
    since: float
    not_before: float
    reported: bool = False


class ServerProbe:
    """Tries to reach the servers of lost shards in a thread of its own.

    No other thread waits for a server that does not answer.

    Args:
        found: called by the probe's thread when `ready` has a new server.
        on_unreachable: called by the probe's thread with each server that could not be reached for
            5 s, or that belongs to another run or shard.
    """

    def __init__(
        self,
        stored: StoredRows,
        ownership: Ownership,
        found: Callable[[], None],
        on_unreachable: Callable[[ServerUnreachable], None],
    ) -> None:
        self._stored, self._ownership, self._found, self._on_unreachable = stored, ownership, found, on_unreachable
        self._condition = threading.Condition()
        self._noting = threading.Lock()  # held while the run's note is written to a server
        self._wanted: dict[int, Wanted] = {}
        self._ready: dict[int, Store] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, shard: int, url: StoreUrl, pause: timedelta = timedelta()) -> None:
        """Look for the server of a shard at a URL, from now on or after a pause."""
        with self._condition:
            now = time.monotonic()
            self._wanted[shard] = Wanted(url, now, now + pause.total_seconds())
            stale = self._ready.pop(shard, None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="server-probe", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        if stale is not None:
            stale.close()

    def forget(self, shard: int) -> None:
        """Stop looking for the server of a shard.

        On return, the probe notes no further server as that shard.
        """
        with self._noting, self._condition:
            self._wanted.pop(shard, None)
            found = self._ready.pop(shard, None)
        if found is not None:
            found.close()

    def ready(self) -> dict[int, Store]:
        """Return the shards whose server answers, each with a Store of its own.

        The probe stops looking for these shards. The caller closes the Stores.
        """
        with self._condition:
            answering, self._ready = self._ready, {}
            for shard in answering:
                self._wanted.pop(shard, None)
            return answering

    def close(self) -> None:
        """Stop looking, and end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        for store in self._ready.values():
            store.close()

    def _look(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                now = time.monotonic()
                everyone = {
                    shard: wanted
                    for shard, wanted in self._wanted.items()
                    if shard not in self._ready and wanted.not_before <= now
                }
            for shard, wanted in everyone.items():
                try:
                    store = self._reach(shard, wanted)
                except StoreError as error:
                    # A server of another run will not change by waiting, so it is reported at once.
                    waited = isinstance(error, NamespaceInUse) or time.monotonic() - wanted.since >= UNREACHABLE.total_seconds()
                    if waited and not wanted.reported:
                        wanted.reported = True
                        self._on_unreachable(ServerUnreachable(shard, wanted.url.plain, str(error)))
                    continue
                with self._condition:
                    # The shard may have been forgotten, or given another URL, while the probe
                    # connected.
                    current = self._is_wanted(shard, wanted)
                    if current:
                        self._ready[shard] = store
                if current:
                    self._found()
                else:
                    store.close()
            with self._condition:
                if not self._closed:
                    self._condition.wait(PROBE_PAUSE.total_seconds())

    def _is_wanted(self, shard: int, wanted: Wanted) -> bool:
        return self._wanted.get(shard) is wanted

    def _reach(self, shard: int, wanted: Wanted) -> Store:
        """Connect to one server, and note it as this shard of the run if the shard is still wanted.

        Raises:
            NamespaceInUse: the server is noted as another run's, or as another shard.
            StoreError: the server cannot be used.
        """
        store = Store([wanted.url], self._stored.store.timeout, timedelta())
        identity, namespace = self._ownership.identity, self._stored.namespace
        try:
            # `forget` takes this lock too, so no server is noted after its shard was forgotten.
            with self._noting:
                if (
                    identity is not None
                    and self._is_wanted(shard, wanted)
                    and not join(store, namespace, identity, shard, self._stored.placement.shard_count)
                ):
                    raise NamespaceInUse(
                        f"store {wanted.url}: namespace {namespace} belongs to another run there, or to another shard"
                    )
        except StoreError:
            store.close()
            raise
        return store


# Pause before a server that refused is tried again: at first, and at most.
REFUSED, LONGEST_REFUSED = timedelta(milliseconds=200), timedelta(seconds=30)


class Failover:
    """Handles failing store shards for the owner of lanes.

    One thread uses a Failover: the one that changes `stored.shards`.

    Args:
        monitor: the monitor of that thread, which is woken when a server is back.
        on_news: called with each change of the shards' status, by that thread or by the server
            probe's.
    """

    def __init__(
        self,
        stored: StoredRows,
        ownership: Ownership,
        monitor: Monitor,
        on_news: Callable[[ShardNews], None],
        patience: Patience,
    ) -> None:
        self._stored, self._monitor, self._on_news = stored, monitor, on_news
        self._reconnection = Reconnection(stored, ownership, patience, lambda: monitor.stopping, on_news)
        self._table = stored.shards
        self._seen_to: set[int] = set()  # lost shards whose server the probe looks for
        self._replaced: list[tuple[int, str]] = []  # guarded by the monitor
        # Shards that are lost because their servers refused, and that still have all their rows.
        self._kept: set[int] = set()
        # How many times in a row each shard was lost because its server refused.
        self._refused: dict[int, int] = {}
        self._probe = ServerProbe(stored, ownership, monitor.wake, on_news)

    def raise_term(self, term: int) -> None:
        """Fence as an owner of this term from now on."""
        self._reconnection.raise_term(term)

    def lose_found(self) -> None:
        """Continue without the shards that a takeover of lanes found lost.

        Raises:
            CacheError: as `lose` does.
        """
        for shard in sorted(self._table.lost.keys() - self._seen_to):
            self.lose(shard, StoreUnavailable(self._table.lost[shard]))

    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        """Perform reads and writes on the live shards, each item given with its lane.

        On return, an item that was not done belongs to a shard that is lost now. Without parity no
        shard can be lost, so every failure is raised.

        Args:
            reads: reads with their lanes; reads of lost shards are left out.
            writes: writes with their lanes; writes to lost shards are left out.
            markers: returns the markers that a shard may have of a lane now.

        Raises:
            RowsLost: more shards are lost than parity covers.
            ShardsSilent: more shards do not answer than parity covers, but their rows may exist.
            Fenced: another owner took over.
            StoreError: any other error of a server.
        """
        try:
            self._exchange(reads, writes, markers)
        except StoreError:
            # If another run took the namespace, that explains the failure better than the error
            # does.
            if not self._stored.placement.r:
                self._reconnection.check_not_taken()
            raise

    def _exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        table = self._table
        reads = [(lane, read) for lane, read in reads if read.shard not in table.lost]
        writes = [(lane, write) for lane, write in writes if write.shard not in table.lost]
        failures: dict[int, StoreError] = self._stored.store.attempt([read for _, read in reads], [write for _, write in writes])
        # An answer may show that a shard lost rows although its connection works.
        answered = [one for one in reads if one[1].shard not in failures], [one for one in writes if one[1].shard not in failures]
        if self._stored.placement.r:
            self._lose_wrong(*answered, markers)
        else:
            self._check(*answered, markers)
        failing = {shard: error for shard, error in failures.items() if shard not in table.lost}
        if not failing:
            return
        again, left = self._reconnection.reconnect(failing, markers, writes, table.all_covered)
        for shard, error in left.items():
            self.lose(shard, error)
        if again:
            self._reconnection.repeat(reads, writes, again, lambda reads, writes: self.exchange(reads, writes, markers))

    def _check(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        """Check the answers of the shards.

        Raises:
            StoreError: a shard is stale or lost rows.
        """
        for lane, read in reads:
            check_marker(self._stored, lane, read, markers(lane))
        for lane, write in writes:
            check_answer(self._stored, lane, write)
            self._stored.note(lane, write)

    def _lose_wrong(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        """Check the answers of the shards, and lose each shard that is stale or lost rows.

        Raises as `lose` does.
        """
        table = self._table
        for lane, write in writes:
            if write.surprise is not None:
                why = f"store {table.urls[write.shard]}: lost rows of lane {lane}: {write.surprise}"
                self.lose(write.shard, StoreUnavailable(why))
            elif write.shard not in table.lost:
                self._stored.note(lane, write)
        for lane, read in reads:
            marker = Marker.parse(read.marker)
            if read.shard not in table.lost and not self._reconnection.expected(lane, read.shard, marker, markers):
                must = self._reconnection.allowed(lane, read.shard, markers)[0]
                why = f"store {table.urls[read.shard]}: is stale: its marker for lane {lane} is {marker}, must be {must}"
                self.lose(read.shard, StoreUnavailable(why))

    def lose(self, shard: int, error: StoreError) -> None:
        """Continue without a shard that failed. A second call for the same shard does nothing.

        A shard whose server refuses requests still has its rows. The probe waits before it tries
        that server again, longer with each refusal in a row.

        Raises:
            StoreError: the given error, if there is no parity.
            RowsLost: parity does not cover the loss.
            ShardsRefuse: parity does not cover the loss, but would cover the shards that lost their
                rows; the other lost shards only refuse.
        """
        if not self._stored.placement.r:
            raise error
        if shard in self._seen_to:
            return
        table, why = self._table, str(error)
        whole, refused = table.complete(shard), not isinstance(error, StoreUnavailable) or isinstance(error, StoreBusy)
        self._stored.store.give_up(shard, StoreUnavailable(why))
        table.lose(shard, why)
        self._seen_to.add(shard)
        times = self._refused[shard] = self._refused.get(shard, 0) + 1 if refused else 0
        self._probe.want(shard, table.urls[shard], min(REFUSED * 2**times, LONGEST_REFUSED) if refused else timedelta())
        self._on_news(table.snapshot)
        # A shard keeps its rows only if it had all of them before its server refused.
        self._kept.discard(shard)
        if refused and whole:
            self._kept.add(shard)
        try:
            for lane in table.lanes:
                table.survivors(lane)
        except RowsLost as lost:
            self._reconnection.check_not_taken()
            kept = table.placement.mask(self._kept)
            if not all(table.covered(table.of(lane).unreadable & ~kept) for lane in table.lanes):
                raise
            reasons = "; ".join(table.lost[one] for one in sorted(self._kept))
            whose = "They" if self._kept == set(lost.shards) else f"Of these, {', '.join(map(str, sorted(self._kept)))}"
            raise ShardsRefuse(
                f"store shards {', '.join(map(str, lost.shards))} no longer take part, but parity covers only {lost.covered}: {reasons}. "
                f"{whose} still have their rows"
            ) from lost

    def replace(self, shard: int, url: str) -> None:
        """Use another server in place of a shard's server from now on. Any thread may call this.

        Raises:
            CacheError: there is no parity, so the rows cannot be rebuilt on another server.
        """
        if not self._stored.placement.r:
            raise CacheError(
                f"store shard {shard}: there is no parity, so its rows exist nowhere else; restore them and --resume"
            )
        with self._monitor:
            self._replaced.append((shard, url))
            self._monitor.signal()

    @property
    def all_whole(self) -> bool:
        """Whether all shards are whole and no replacement of a server is pending.

        Any thread that holds the monitor may read this.
        """
        return not self._replaced and self._table.snapshot.whole

    def move_replaced(self) -> None:
        """Switch to the servers that `replace` named since the last call.

        The replacement for a shard that is not lost waits until all shards are whole.
        """
        with self._monitor:
            ready = [change for change in self._replaced if change[0] in self._table.lost]
            # A replacement makes its shard lost until the rebuild, so take one at a time and only
            # while parity is complete.
            if not ready and self._replaced and self._table.whole:
                ready = self._replaced[:1]
        for shard, url in ready:
            other = parse_url(url)
            if shard not in self._table.lost:
                self.lose(shard, StoreUnavailable(f"store {other}: replaces the shard's server"))
            self._table.replace_server(shard, other)
            self._probe.want(shard, other)
        if ready:
            with self._monitor:
                self._replaced = [change for change in self._replaced if change not in ready]

    def take_back(self, last_batches: Mapping[int, int]) -> None:
        """Adopt the servers of lost shards that the probe reached, emptied of the lanes.

        The caller ensures that no write-back batch is under way.

        Args:
            last_batches: lane -> number of its last write-back batch, for each lane that is served.
                A lane that was taken over a moment ago may be missing; then the servers are adopted
                in a later call.
        """
        if not last_batches.keys() >= set(self._table.lanes):
            return
        for shard, fresh in self._probe.ready().items():
            # The server is emptied below, so it no longer keeps the rows that it had when it
            # refused.
            self._kept.discard(shard)
            try:
                try:
                    for lane, there in self._reconnection.fence(fresh, shard, empty=True).items():
                        own = self._table.of(lane)
                        own.epochs[shard], own.held[shard], own.migrated[shard] = there.epoch, None, None
                        fresh.command(0, "UNLINK", self._stored.key(lane, shard))
                        # The marker says `rebuilding`, so a new owner does not trust the shard
                        # before the rebuild.
                        begun = self._stored.write(
                            lane, shard, *NO_ROWS, Marker(last_batches[lane], last_batches[lane], rebuilding=True), 0
                        )
                        fresh.exchange([], [replace(begun, shard=0)])
                        self._stored.note(lane, begun)
                    self._stored.store.adopt(shard, fresh)
                finally:
                    fresh.close()
            except Fenced:
                raise
            except StoreError:
                self._probe.want(shard, self._table.urls[shard], REFUSED)
                continue
            self._table.bring_back(shard)
            self._seen_to.discard(shard)
            self._on_news(self._table.snapshot)

    def rebuilt(self, lane: int, shard: int) -> None:
        """Record that a shard has all rows of a lane again. The caller has written its marker."""
        self._table.advance(lane, shard, ALL_STRIPES)
        self._refused.pop(shard, None)
        if self._table.complete(shard):
            self._on_news(self._table.snapshot)

    def forget(self, shard: int) -> None:
        """Stop looking for the server of a shard that the placement no longer uses."""
        self._probe.forget(shard)
        for shards in (self._seen_to, self._kept):
            shards.discard(shard)

    def close(self) -> None:
        """Stop looking for lost shards."""
        self._probe.close()


def connect_again(stored: StoredRows, lanes: Collection[int]) -> None:
    """Replace broken connections before a takeover, if the owner serves no other lanes.

    Such an owner does not yet expect anything of a server that would have to be verified first: the
    fence finds out what the server has. If the owner serves other lanes, this does nothing, because
    only `Failover` knows what those lanes have on a shard. A broken connection then counts as a
    lost shard.

    Args:
        lanes: the lanes that are taken over.
    """
    if set(stored.shards.lanes) - set(lanes):
        return
    down = stored.store.down
    _, failed = stored.store.ask({shard: [("PING",)] for shard in stored.placement.live if shard not in down})
    for shard, error in failed.items():
        if is_broken(error):
            with contextlib.suppress(StoreError):
                stored.store.adopt(shard, Store([stored.shards.urls[shard]], RECONNECT, RECONNECT))


def counted(error: RowsLost, stored: StoredRows, lanes: Sequence[LaneStripes]) -> RowsLost:
    """Return the same error with the number of lost rows of these lanes in each table.

    Args:
        error: the error of the lost shards.
        lanes: the stripes of each lane to count.
    """
    gone = stored.placement.mask(error.shards)
    counts: np.ndarray = np.zeros(len(stored.layouts), np.int64)
    for stripes in lanes:
        counts += lost_rows(stripes, len(counts), gone)
    rows = {layout.name: int(count) for layout, count in zip(stored.layouts, counts, strict=True)}
    return RowsLost(error.shards, error.covered, rows)
