"""The store shards as the owner of lanes sees them: which are live, which are lost, which are being rebuilt, and how each comes back.

A shard whose connection breaks is connected to again, for 200 ms: older connections are fenced first, then its identity and its markers must
be what they should. If they are not, or if the shard stays silent for the store's timeout, it is *lost*, and all goes on without it: what
is asked of it is decoded, what is meant for it is left out. A server that is there again, or another in its place, is adopted empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from cache.decoding import Survivors
from cache.errors import Fenced, NamespaceInUse, StoreError, StoreSilent, StoreUnavailable
from cache.fence import fence_all, read_epochs
from cache.marker import Marker
from cache.namespace import is_of, join
from cache.reading import StoredRows
from cache.resp import MARKER
from cache.store import NO_ROWS, Read, Store, Write
from cache.stripes import ALL_STRIPES
from cache.url import StoreUrl, parse_url

RECONNECT = timedelta(milliseconds=200)
REJOIN_PAUSE = timedelta(milliseconds=200)

UNREACHABLE = timedelta(seconds=5)  # after which a server that is looked for is said not to be there

Markers = Callable[[int], Sequence[Marker]]


@dataclass(frozen=True, slots=True)
class ShardChange:
    """What became of a store shard. url: of its server, without password; why: where something is wrong.

    what: "lost"; "unreachable": its server, or the one to take its place, is not there for 5 s, or is of no use; "rebuilding"; "ok".
    """

    shard: int
    what: str
    url: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns the lanes: its term, and the identity that a server of the run has noted, None where none is noted."""

    term: int = 0
    identity: Mapping[str, Any] | None = None


ALONE = Ownership()


def take_over(stored: StoredRows, ownership: Ownership, batches: Mapping[int, int]) -> None:
    """Fence lanes on every store shard, and note in stored.lost the shards that do not have all of their rows.

    batches: of each lane the number of its last write-back batch. Raises Fenced, StoreError, RowsLost where parity does not cover what is lost.
    """
    for shard in range(stored.placement.shard_count):
        if shard in stored.store.down:
            stored.lost.add(shard)
            continue
        if ownership.identity is not None and not is_of(stored.store, stored.namespace, ownership.identity, shard):
            stored.lost.add(shard)
            continue
        found = fence_all(stored.store, shard, stored.namespace, list(batches), ownership.term)
        for lane, (epoch, marker) in found.items():
            stored.epochs[lane, shard] = epoch
            if marker != Marker(batches[lane], batches[lane]):
                stored.lost.add(shard)
    check_covered(stored)


def find_rows(stored: StoredRows, batches: Sequence[int]) -> None:
    """The same for a reader: find each lane's fence epoch on every store shard, and note in stored.lost the shards that lack rows."""
    for shard in range(stored.placement.shard_count):
        if shard in stored.store.down:
            stored.lost.add(shard)
            continue
        for lane, epoch in enumerate(read_epochs(stored.store, shard, stored.namespace, len(batches))):
            stored.epochs[lane, shard] = int(epoch)
            found = stored.store.command(shard, "HGET", stored.key(lane, shard), MARKER)
            assert found is None or isinstance(found, bytes)
            if Marker.parse(found) != Marker(batches[lane], batches[lane]):
                stored.lost.add(shard)
    check_covered(stored)


def check_covered(stored: StoredRows) -> None:
    """Raise RowsLost where more shards of a stripe are lost than parity covers."""
    if stored.lost:
        gone = np.zeros(stored.placement.shard_count, bool)
        gone[list(stored.lost)] = True
        Survivors.of(stored.placement, gone)


@dataclass(slots=True)
class Wanted:
    """A server that is looked for, since when (time.monotonic()), and whether it was said that it is not there."""

    url: StoreUrl
    since: float
    told: bool = False


class Rejoining:
    """Tries, in a thread of its own, to reach the servers of lost shards, so that nobody waits for one that does not answer.

    found is called when there is one, on_change with those that are unreachable for 5 s.
    """

    def __init__(
        self, stored: StoredRows, ownership: Ownership, found: Callable[[], None], on_change: Callable[[ShardChange], None]
    ) -> None:
        self._stored, self._ownership, self._found, self._on_change = stored, ownership, found, on_change
        self._condition = threading.Condition()
        self._wanted: dict[int, Wanted] = {}
        self._ready: dict[int, Store] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, shard: int, url: StoreUrl) -> None:
        """Look for the server of a shard at a URL from now on."""
        with self._condition:
            self._wanted[shard] = Wanted(url, time.monotonic())
            stale = self._ready.pop(shard, None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="rejoining", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        if stale is not None:
            stale.close()

    def ready(self) -> dict[int, Store]:
        """The shards whose server answers, each with a Store of its own; they are looked for no more."""
        with self._condition:
            found, self._ready = self._ready, {}
            for shard in found:
                self._wanted.pop(shard, None)
            return found

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
                everyone = {shard: wanted for shard, wanted in self._wanted.items() if shard not in self._ready}
            for shard, wanted in everyone.items():
                try:
                    store = self._reach(shard, wanted.url)
                except StoreError as error:
                    waited = isinstance(error, NamespaceInUse) or time.monotonic() - wanted.since >= UNREACHABLE.total_seconds()
                    if waited and not wanted.told:
                        wanted.told = True
                        self._on_change(ShardChange(shard, "unreachable", wanted.url.plain, str(error)))
                    continue
                with self._condition:
                    current = self._wanted.get(shard) is wanted
                    if current:
                        self._ready[shard] = store
                if current:
                    self._found()
                else:
                    store.close()
            with self._condition:
                if not self._closed:
                    self._condition.wait(REJOIN_PAUSE.total_seconds())

    def _reach(self, shard: int, url: StoreUrl) -> Store:
        store = Store([url], self._stored.store.timeout, timedelta())
        identity, namespace = self._ownership.identity, self._stored.namespace
        try:
            if identity is not None and not join(store, namespace, identity, shard, self._stored.placement.shard_count):
                raise NamespaceInUse(f"store {url}: namespace {namespace} belongs to another run there, or to another shard")
        except StoreError:
            store.close()
            raise
        return store


class Shards:
    """The state of every store shard for the lanes of one owner. One thread uses it.

    cursors: per lane uint64 [shards]; a shard is live for the lane's stripes below its cursor: all, none (lost), or those rebuilt so far.
    lost: shard -> why. on_change is told what becomes of a shard, by this thread or the one that looks for servers.
    """

    def __init__(
        self,
        stored: StoredRows,
        lanes: Sequence[int],
        ownership: Ownership,
        wake: Callable[[], None],
        on_change: Callable[[ShardChange], None],
    ) -> None:
        self._stored, self._ownership, self._on_change = stored, ownership, on_change
        self._lanes = list(lanes)
        count = stored.placement.shard_count
        self.urls = list(stored.store.urls)
        self.cursors = {lane: np.full(count, ALL_STRIPES, np.uint64) for lane in lanes}
        self.lost: dict[int, str] = {}
        self._rejoining = Rejoining(stored, ownership, wake, on_change)
        self._survivors: dict[bytes, Survivors] = {}

    def begin(self) -> None:
        """Go on without the shards that were found lost at the start."""
        for shard in sorted(self._stored.lost):
            self.lose(shard, str(self._stored.store.down.get(shard, f"store {self.urls[shard]}: lacks rows of the run")))

    @property
    def whole(self) -> bool:
        """Whether every shard has all rows of every lane."""
        return not self.lost and all((cursors == ALL_STRIPES).all() for cursors in self.cursors.values())

    def readable(self, lane: int, shard: int) -> bool:
        """Whether a shard has all rows of a lane."""
        return bool(self.cursors[lane][shard] == ALL_STRIPES)

    def rebuilding(self, lane: int, shard: int) -> bool:
        """Whether a shard is there, but does not have all rows of a lane yet."""
        return shard not in self.lost and not self.readable(lane, shard)

    def survivors(self, lane: int) -> Survivors:
        """From what the lane's rows on shards that are not readable are decoded. Raises RowsLost where they cannot be."""
        lost = self.cursors[lane] != ALL_STRIPES
        found = self._survivors.get(lost.tobytes())
        if found is None:
            found = self._survivors[lost.tobytes()] = Survivors.of(self._stored.placement, lost)
        return found

    def exchange(self, reads: Sequence[tuple[int, Read]], writes: Sequence[tuple[int, Write]], markers: Markers) -> None:
        """Do what the live shards are asked, each item with its lane; what is left undone belongs to shards that are lost afterwards.

        markers: those that a lane may have now. Raises RowsLost where too many shards are lost, Fenced, and what else a server answers.
        """
        while True:
            reads = [(lane, read) for lane, read in reads if read.shard not in self.lost]
            writes = [(lane, write) for lane, write in writes if write.shard not in self.lost]
            failures = self._stored.store.attempt([read for _, read in reads], [write for _, write in writes])
            for lane, read in reads:
                if read.shard not in failures and not self._expected(lane, read.shard, Marker.parse(read.marker), markers):
                    failures[read.shard] = StoreUnavailable(
                        f"store {self.urls[read.shard]}: is stale: its marker for lane {lane} is {Marker.parse(read.marker)}, must be "
                        f"{self._allowed(lane, read.shard, markers)[0]}"
                    )
                    self.lose(read.shard, str(failures[read.shard]))
            again = {
                shard for shard, error in failures.items() if shard not in self.lost and self._reconnect(shard, error, markers)
            }
            if not again:
                return
            reads = [(lane, read) for lane, read in reads if read.shard in again]
            writes = [(lane, write) for lane, write in writes if write.shard in again]
            for lane, read in reads:
                read.key = self._stored.key(lane, read.shard)
            for lane, write in writes:
                write.key = self._stored.key(lane, write.shard)

    def _expected(self, lane: int, shard: int, marker: Marker, markers: Markers) -> bool:
        return marker in self._allowed(lane, shard, markers)

    def _allowed(self, lane: int, shard: int, markers: Markers) -> list[Marker]:
        return [replace(allowed, rebuilding=self.rebuilding(lane, shard)) for allowed in markers(lane)]

    def lose(self, shard: int, why: str) -> None:
        """Go on without a shard. Raises RowsLost where parity does not cover that."""
        self._stored.store.give_up(shard, why)
        self.lost[shard] = why
        for cursors in self.cursors.values():
            cursors[shard] = 0
        self._rejoining.want(shard, self.urls[shard])
        self._on_change(ShardChange(shard, "lost", self.urls[shard].plain, why))
        for lane in self._lanes:
            self.survivors(lane)

    def replace(self, shard: int, url: str) -> None:
        """Use another server in place of a shard's from now on."""
        other = parse_url(url)
        if shard not in self.lost:
            self.lose(shard, f"store {other}: takes the shard over")
        self.urls[shard] = other
        self._rejoining.want(shard, other)

    def _reconnect(self, shard: int, error: StoreUnavailable, markers: Markers) -> bool:
        """Connect again to a shard whose connection broke; if it is not as it should be, it is lost."""
        why = str(error)
        if not isinstance(error, StoreSilent) and all(self.readable(lane, shard) for lane in self._lanes):
            try:
                fresh = Store([self.urls[shard]], RECONNECT, RECONNECT)
                try:
                    found = self._fenced(fresh, shard)
                    if found is not None and all(
                        self._expected(lane, shard, marker, markers) for lane, (_, marker) in found.items()
                    ):
                        self._adopt(shard, fresh, {lane: epoch for lane, (epoch, _) in found.items()})
                        return True
                    why = f"store {self.urls[shard]}: came back without the run's last write-back batches"
                finally:
                    fresh.close()
            except Fenced:
                raise
            except StoreError as failure:
                why = str(failure)
        self.lose(shard, why)
        return False

    def _fenced(self, fresh: Store, shard: int) -> dict[int, tuple[int, Marker]] | None:
        """Fence all lanes; None if the server is not the run's."""
        if self._ownership.identity is not None and not is_of(fresh, self._stored.namespace, self._ownership.identity, shard, 0):
            return None
        return fence_all(fresh, 0, self._stored.namespace, self._lanes, self._ownership.term)

    def _adopt(self, shard: int, fresh: Store, epochs: Mapping[int, int]) -> None:
        self._stored.store.adopt(shard, fresh)
        for lane, epoch in epochs.items():
            self._stored.epochs[lane, shard] = epoch

    def take_back(self, batches: Mapping[int, int]) -> None:
        """Adopt the servers of lost shards that are there again, each emptied of the lanes; no write-back batch is under way.

        batches: of each lane the number of its last one.
        """
        for shard, fresh in self._rejoining.ready().items():
            try:
                try:
                    found = fence_all(fresh, 0, self._stored.namespace, self._lanes, self._ownership.term)
                    self._stored.epochs.update({(lane, shard): epoch for lane, (epoch, _) in found.items()})
                    for lane in self._lanes:
                        number, key = batches[lane], self._stored.key(lane, shard)
                        fresh.command(0, "UNLINK", key)
                        fresh.exchange([], [Write(0, key, *NO_ROWS, Marker(number, number, rebuilding=True).stored())])
                    self._stored.store.adopt(shard, fresh)
                finally:
                    fresh.close()
            except Fenced:
                raise
            except StoreError:
                self._rejoining.want(shard, self.urls[shard])
                continue
            del self.lost[shard]
            self._on_change(ShardChange(shard, "rebuilding", self.urls[shard].plain))

    def rebuilt(self, lane: int, shard: int) -> None:
        """A shard has all rows of a lane again, and its marker says so."""
        self.cursors[lane][shard] = ALL_STRIPES
        if all(self.readable(each, shard) for each in self._lanes):
            self._on_change(ShardChange(shard, "ok", self.urls[shard].plain))

    def close(self) -> None:
        """Stop looking for lost shards."""
        self._rejoining.close()
