"""The store shards as the owner of lanes sees them: which are live, which are lost, which are being rebuilt, and how each comes back.

A shard whose connection breaks is connected to again, for 200 ms: older connections are fenced first, then its identity and its markers must
be what they should. If they are not, or if the shard stays silent for the store's timeout, it is *lost*, and all goes on without it: what
is asked of it is decoded, what is meant for it is left out. A server that is there again, or another in its place, is adopted empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np

from foreload.cache.client.store import (
    NO_ROWS,
    Read,
    Store,
    Write,
)
from foreload.cache.client.url import parse_url
from foreload.cache.errors import (
    Fenced,
    RowsLost,
    ShardsRefuse,
    StoreBusy,
    StoreError,
    StoreSilent,
    StoreUnavailable,
)
from foreload.cache.parity.decoding import Survivors
from foreload.cache.parity.stripes import ALL_STRIPES
from foreload.cache.protocol.fence import Found, fence_all
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.ownership import Ownership
from foreload.cache.protocol.reading import StoredRows
from foreload.cache.protocol.server_probe import ServerProbe, ShardChange

RECONNECT = timedelta(milliseconds=200)
REFUSED, LONGEST_REFUSED = timedelta(milliseconds=200), timedelta(seconds=30)  # before a server that refused is looked for again

Markers = Callable[[int], Sequence[Marker]]


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
        self._kept: set[int] = set()  # lost, though their servers have their rows
        self._refused: dict[int, int] = {}  # how often in turn a shard was lost because its server refused
        self._probe = ServerProbe(stored, ownership, wake, on_change)
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
            failures: dict[int, StoreError] = self._stored.store.attempt(
                [read for _, read in reads], [write for _, write in writes]
            )
            for lane, write in writes:
                if write.shard in failures:
                    continue
                if write.surprise is not None:
                    why = f"store {self.urls[write.shard]}: lost rows of lane {lane}: {write.surprise}"
                    failures[write.shard] = StoreUnavailable(why)
                    self.lose(write.shard, why)
                    continue
                self._stored.note(lane, write)
            for lane, read in reads:
                if read.shard not in failures and not self._expected(lane, read.shard, Marker.parse(read.marker), markers):
                    failures[read.shard] = StoreUnavailable(
                        f"store {self.urls[read.shard]}: is stale: its marker for lane {lane} is {Marker.parse(read.marker)}, must be "
                        f"{self._allowed(lane, read.shard, markers)[0]}"
                    )
                    self.lose(read.shard, str(failures[read.shard]))
            again = {
                shard
                for shard, error in failures.items()
                if shard not in self.lost
                and self._reconnect(shard, error, markers, [one for one in writes if one[1].shard == shard])
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

    def covers(self, shard: int) -> bool:
        """Whether parity covers the loss of one shard more."""
        return all(self._stored.covers({shard, *self._unreadable(lane)}) for lane in self._lanes)

    def lose(self, shard: int, why: str, refused: bool = False) -> None:
        """Go on without a shard. refused: its server is there, with its rows, but does not do what it is asked; it is not asked again at once.

        Raises RowsLost where parity does not cover the loss, ShardsRefuse where it would cover those that have lost their rows.
        """
        whole = all(self.readable(lane, shard) for lane in self._lanes)
        self._stored.store.give_up(shard, why)
        self.lost[shard] = why
        for cursors in self.cursors.values():
            cursors[shard] = 0
        times = self._refused[shard] = self._refused.get(shard, 0) + 1 if refused else 0
        self._probe.want(shard, self.urls[shard], min(REFUSED * 2**times, LONGEST_REFUSED) if refused else timedelta())
        self._on_change(ShardChange(shard, "lost", self.urls[shard].plain, why))
        self._kept.discard(shard)
        if refused and whole:
            self._kept.add(shard)
        try:
            for lane in self._lanes:
                self.survivors(lane)
        except RowsLost as error:
            if not all(self._stored.covers(self._unreadable(lane) - self._kept) for lane in self._lanes):
                raise
            reasons = "; ".join(self.lost[one] for one in sorted(self._kept))
            raise ShardsRefuse(
                f"store shards {', '.join(map(str, error.shards))} take no part any more, and parity covers {error.covered}: {reasons}. "
                "They still have their rows"
            ) from error

    def _unreadable(self, lane: int) -> set[int]:
        return set(np.flatnonzero(self.cursors[lane] != ALL_STRIPES).tolist())

    def replace(self, shard: int, url: str) -> None:
        """Use another server in place of a shard's from now on."""
        other = parse_url(url)
        if shard not in self.lost:
            self.lose(shard, f"store {other}: takes the shard over")
        self.urls[shard] = other
        self._probe.want(shard, other)

    def _reconnect(self, shard: int, error: StoreError, markers: Markers, writes: Sequence[tuple[int, Write]]) -> bool:
        """Connect again to a shard whose connection broke; if it is not as it should be, it is lost. writes: what was under way there."""
        why = str(error)
        broken = isinstance(error, StoreUnavailable) and not isinstance(error, StoreSilent | StoreBusy)
        if broken and all(self.readable(lane, shard) for lane in self._lanes):
            try:
                fresh = Store([self.urls[shard]], RECONNECT, RECONNECT)
                try:
                    found = self._fenced(fresh, shard)
                    if found is not None and all(
                        self._as_it_was(lane, shard, there, markers, writes) for lane, there in found.items()
                    ):
                        self._adopt(shard, fresh, {lane: there.epoch for lane, there in found.items()})
                        for lane, write in writes:
                            if _done(write, found[lane]):
                                # It answered, but was not heard; sent again it brings nothing.
                                self._stored.note(lane, write)
                                write.new = range(1)
                        return True
                    why = f"store {self.urls[shard]}: came back without the run's last write-back batches, or without rows"
                finally:
                    fresh.close()
            except Fenced:
                raise
            except StoreError as failure:
                error, why = failure, str(failure)
        self.lose(shard, why, not isinstance(error, StoreUnavailable) or isinstance(error, StoreBusy))
        return False

    def _as_it_was(self, lane: int, shard: int, found: Found, markers: Markers, writes: Sequence[tuple[int, Write]]) -> bool:
        """Whether a shard with a new connection lacks nothing of a lane but what was under way."""
        if not self._expected(lane, shard, found.marker, markers):
            return False
        held = self._stored.held.get((lane, shard), -1)  # the marker is no row
        own = [write for of, write in writes if of == lane and write.new is not None]
        held += sum(write.new.start for write in own if write.new is not None and _done(write, found))
        lacking = sum(write.new.stop - 1 for write in own if write.new is not None and write.marker is None)
        return held - lacking <= found.rows - (not found.marked) <= held

    def _fenced(self, fresh: Store, shard: int) -> dict[int, Found] | None:
        """Fence all lanes; None if the server is not the run's."""
        if not self._ownership.has(fresh, self._stored.namespace, shard, 0):
            return None
        return self._fence(fresh, shard)

    def _fence(self, fresh: Store, shard: int) -> dict[int, Found]:
        known = {lane: self._stored.epochs.get((lane, shard), 0) for lane in self._lanes}
        return fence_all(fresh, 0, self._stored.namespace, self._lanes, self._ownership.term, known)

    def _adopt(self, shard: int, fresh: Store, epochs: Mapping[int, int]) -> None:
        self._stored.store.adopt(shard, fresh)
        for lane, epoch in epochs.items():
            self._stored.epochs[lane, shard] = epoch

    def take_back(self, last_batches: Mapping[int, int]) -> None:
        """Adopt the servers of lost shards that are there again, each emptied of the lanes; no write-back batch is under way.

        last_batches: of each lane the number of its last one.
        """
        for shard, fresh in self._probe.ready().items():
            try:
                try:
                    for lane, there in self._fence(fresh, shard).items():
                        self._stored.epochs[lane, shard] = there.epoch
                        self._stored.held.pop((lane, shard), None)
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
                self._probe.want(shard, self.urls[shard], REFUSED)
                continue
            del self.lost[shard]
            self._on_change(ShardChange(shard, "rebuilding", self.urls[shard].plain))

    def rebuilt(self, lane: int, shard: int) -> None:
        """A shard has all rows of a lane again, and its marker says so."""
        self.cursors[lane][shard] = ALL_STRIPES
        self._refused.pop(shard, None)
        if all(self.readable(each, shard) for each in self._lanes):
            self._on_change(ShardChange(shard, "ok", self.urls[shard].plain))

    def close(self) -> None:
        """Stop looking for lost shards."""
        self._probe.close()


def _done(write: Write, found: Found) -> bool:
    """Whether a write that was under way, with a marker, was done by a server whose marker is found."""
    return found.marked and write.marker is not None and Marker.parse(write.marker) == found.marker
