"""Exchanges with store shards of which some may fail: what becomes of one that does, and how it comes back.

A shard whose connection breaks is connected to again, for 200 ms (`reconnection`). If that fails, or if the shard stays silent for the store's
timeout, it is *lost*, and all goes on without it: what is asked of it is decoded, what is meant for it is left out. Where more do not answer than
parity covers, none is lost before they were waited for. A server that is there again, or another in its place, is adopted empty. Without parity no
shard may be lost: what is wrong with one is an error.
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
UNREACHABLE = timedelta(seconds=5)  # after which a server that is looked for is said not to be there


@dataclass(slots=True)
class Wanted:
    """A server that is looked for, since when, and not before when (time.monotonic()), and whether it was said that it is not there."""

    url: StoreUrl
    since: float
    not_before: float
    reported: bool = False


class ServerProbe:
    """Tries, in a thread of its own, to reach the servers of lost shards, so that nobody waits for one that does not answer.

    found is called, by that thread, when there is one to be had from `ready`; on_unreachable with those that are not there for 5 s.
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
        self._noting = threading.Lock()  # held while a server is noted as a shard of the run
        self._wanted: dict[int, Wanted] = {}
        self._ready: dict[int, Store] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, shard: int, url: StoreUrl, pause: timedelta = timedelta()) -> None:
        """Look for the server of a shard at a URL from now on, or after a pause."""
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
        """Look for the server of a shard no more: from now on none is noted as that."""
        with self._noting, self._condition:
            self._wanted.pop(shard, None)
            found = self._ready.pop(shard, None)
        if found is not None:
            found.close()

    def ready(self) -> dict[int, Store]:
        """The shards whose server answers, each with a Store of its own; they are looked for no more."""
        with self._condition:
            answering, self._ready = self._ready, {}
            for shard in answering:
                self._wanted.pop(shard, None)
            return answering

    def close(self) -> None:
        """Stop looking."""
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
                    waited = isinstance(error, NamespaceInUse) or time.monotonic() - wanted.since >= UNREACHABLE.total_seconds()
                    if waited and not wanted.reported:
                        wanted.reported = True
                        self._on_unreachable(ServerUnreachable(shard, wanted.url.plain, str(error)))
                    continue
                with self._condition:
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
        """A Store of the one server, noted as this shard of the run, if it is still wanted. Raises StoreError, NamespaceInUse where it is noted as
        another.
        """
        store = Store([wanted.url], self._stored.store.timeout, timedelta())
        identity, namespace = self._ownership.identity, self._stored.namespace
        try:
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


REFUSED, LONGEST_REFUSED = timedelta(milliseconds=200), timedelta(seconds=30)  # before a server that refused is looked for again


class Failover:
    """What the owner of lanes does about store shards that fail. One thread uses it, the one that changes `stored.shards`.

    monitor: of that thread, which is woken when a server is there again. on_news is called with what becomes of shards, by that thread or by
    the server probe's.
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
        self._seen_to: set[int] = set()  # lost shards whose server is looked for
        self._replaced: list[tuple[int, str]] = []  # belongs to whoever holds the monitor
        self._kept: set[int] = set()  # lost since their servers refused, which still have all their rows
        self._refused: dict[int, int] = {}  # how often in turn a shard was lost because its server refused
        self._probe = ServerProbe(stored, ownership, monitor.wake, on_news)

    def raise_term(self, term: int) -> None:
        """Fence as an owner of this term from now on."""
        self._reconnection.raise_term(term)

    def lose_found(self) -> None:
        """Go on without the shards that were found lost by who took lanes over. Raises as `lose` does."""
        for shard in sorted(self._table.lost.keys() - self._seen_to):
            self.lose(shard, StoreUnavailable(self._table.lost[shard]))

    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        """Do what the live shards are asked, each item with its lane; what is left undone belongs to shards that are lost afterwards.

        markers: those that a lane may have now. Raises RowsLost where too many shards are lost, ShardsSilent where they only do not answer,
        Fenced, and what else a server answers. Without parity no shard can be lost: whatever is wrong with one is raised.
        """
        try:
            self._exchange(reads, writes, markers)
        except StoreError:
            if not self._stored.placement.r:
                self._reconnection.check_not_taken()
            raise

    def _exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        table = self._table
        reads = [(lane, read) for lane, read in reads if read.shard not in table.lost]
        writes = [(lane, write) for lane, write in writes if write.shard not in table.lost]
        failures: dict[int, StoreError] = self._stored.store.attempt([read for _, read in reads], [write for _, write in writes])
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
        """Check what shards answered. Raises StoreError for one that is stale, or lost rows."""
        for lane, read in reads:
            check_marker(self._stored, lane, read, markers(lane))
        for lane, write in writes:
            check_answer(self._stored, lane, write)
            self._stored.note(lane, write)

    def _lose_wrong(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        """The same, but go on without such a shard. Raises as `lose` does."""
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
        """Go on without a shard, which does not do what it must; does nothing the second time.

        One that refuses what it is asked has its rows, but is not asked again at once. Raises the error without parity, RowsLost where that does not
        cover the loss, ShardsRefuse where it would cover those that have lost their rows.
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
                f"store shards {', '.join(map(str, lost.shards))} take no part any more, and parity covers {lost.covered}: {reasons}. "
                f"{whose} still have their rows"
            ) from lost

    def replace(self, shard: int, url: str) -> None:
        """Use another server in place of a shard's from now on; any thread may say so. Raises CacheError without parity."""
        if not self._stored.placement.r:
            raise CacheError(f"store shard {shard}: there is no parity, so its rows are nowhere else; restore them and --resume")
        with self._monitor:
            self._replaced.append((shard, url))
            self._monitor.signal()

    @property
    def all_whole(self) -> bool:
        """Whether all shards are whole, and none is to have another server; any thread that holds the monitor may ask."""
        return not self._replaced and self._table.snapshot.whole

    def move_replaced(self) -> None:
        """Use the servers that were named since; one for a shard that is not lost waits until all are whole."""
        with self._monitor:
            ready = [change for change in self._replaced if change[0] in self._table.lost]
            if not ready and self._replaced and self._table.whole:
                ready = self._replaced[:1]
        for shard, url in ready:
            other = parse_url(url)
            if shard not in self._table.lost:
                self.lose(shard, StoreUnavailable(f"store {other}: takes the shard over"))
            self._table.replace_server(shard, other)
            self._probe.want(shard, other)
        if ready:
            with self._monitor:
                self._replaced = [change for change in self._replaced if change not in ready]

    def take_back(self, last_batches: Mapping[int, int]) -> None:
        """Adopt the servers of lost shards that are there again, each emptied of the lanes; no write-back batch is under way.

        last_batches: of each lane that is served the number of its last one. A lane that was taken over a moment ago may not be among them yet: then
        they are adopted once it is.
        """
        if not last_batches.keys() >= set(self._table.lanes):
            return
        for shard, fresh in self._probe.ready().items():
            # It is emptied, so from here on it no longer keeps the rows that it had when it refused.
            self._kept.discard(shard)
            try:
                try:
                    for lane, there in self._reconnection.fence(fresh, shard, empty=True).items():
                        own = self._table.of(lane)
                        own.epochs[shard], own.held[shard], own.migrated[shard] = there.epoch, None, None
                        fresh.command(0, "UNLINK", self._stored.key(lane, shard))
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
        """A shard has all rows of a lane again, and its marker says so."""
        self._table.advance(lane, shard, ALL_STRIPES)
        self._refused.pop(shard, None)
        if self._table.complete(shard):
            self._on_news(self._table.snapshot)

    def forget(self, shard: int) -> None:
        """A shard is used no more: its server is not looked for, if it was lost."""
        self._probe.forget(shard)
        for shards in (self._seen_to, self._kept):
            shards.discard(shard)

    def close(self) -> None:
        """Stop looking for lost shards."""
        self._probe.close()


def connect_again(stored: StoredRows, lanes: Collection[int]) -> None:
    """Replace the connections that broke since they were last used, for an owner that serves no lanes over them but these, which it takes over.

    Such an owner expects nothing of a server yet that would have to be verified first: the fence finds out what is there. For others a broken
    connection is a lost shard here, since `Failover` alone knows what their lanes have there.
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
    """The same error with the rows of these lanes, by table, that are gone."""
    gone = stored.placement.mask(error.shards)
    counts: np.ndarray = np.zeros(len(stored.layouts), np.int64)
    for stripes in lanes:
        counts += lost_rows(stripes, len(counts), gone)
    rows = {layout.name: int(count) for layout, count in zip(stored.layouts, counts, strict=True)}
    return RowsLost(error.shards, error.covered, rows)
