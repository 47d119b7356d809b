"""Reconnecting to store shards whose connection broke, or that stay silent, for the owner of lanes.

The server may be unchanged, and then nothing is lost. The owner therefore first fences older
connections. Then the server must be noted as the run's, and its markers and row counts must be
possible at this point. A request that was under way was either done or not, as the marker shows,
and is sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

from foreload.base.at_once import at_once, results_of
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import (
    Fenced,
    ForeignKey,
    NamespaceInUse,
    ShardsSilent,
    StoreBusy,
    StoreError,
    StoreSilent,
    StoreUnavailable,
)
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.fence import Found, fence_all
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import is_run, owner
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import Patience, ShardsAwaited

RECONNECT = timedelta(milliseconds=200)  # for a broken connection whose cause is unknown
_LONGEST_LOOK = timedelta(seconds=1)  # for one attempt to reach a server that was silent
_PAUSE = timedelta(milliseconds=50)  # between two attempts
# Extra time for the last shards, once parity covers them: shards that fell silent together also
# come back together.
_GRACE = timedelta(seconds=1)

Markers = Callable[[int], Sequence[Marker]]
Exchange = Callable[[Sequence[tuple[int, Read]], Sequence[tuple[int, Write]]], None]


@dataclass(slots=True)
class _Tried:
    """The outcome of reconnecting to shards that failed.

    Attributes:
        back: shards that answer as they must -> what the fence found there, by lane.
        away: shards that do not answer -> the error.
        wrong: shards that lack rows, or refuse -> the error.
    """

    back: dict[int, Mapping[int, Found]] = field(default_factory=dict)
    away: dict[int, StoreError] = field(default_factory=dict)
    wrong: dict[int, StoreError] = field(default_factory=dict)

    @property
    def failed(self) -> dict[int, StoreError]:
        """All shards that are not back."""
        return self.wrong | self.away


@dataclass(slots=True)
class Reconnection:
    """Reconnects to store shards for the owner of lanes.

    One thread uses a Reconnection: the one that changes `stored.shards`.

    Attributes:
        ownership: the term and identity to fence with.
        patience: how long to wait for shards that do not answer and that parity does not cover.
        given_up: returns whether to stop waiting.
        on_awaited: called with the shards that the owner waits for.
    """

    stored: StoredRows
    ownership: Ownership
    patience: Patience
    given_up: Callable[[], bool]
    on_awaited: Callable[[ShardsAwaited], None]

    def raise_term(self, term: int) -> None:
        """Fence as an owner of this term from now on."""
        self.ownership = replace(self.ownership, term=term)

    def _adopted(
        self, shard: int, fresh: Store, markers: Markers, writes: Sequence[tuple[int, Write]]
    ) -> Mapping[int, Found] | None:
        """Fence a shard over a new connection, and use that connection if the shard lacks nothing.

        Args:
            fresh: a Store of the one server.
            markers: returns the markers that a shard may have of a lane now.
            writes: the writes that were under way, each with its lane.

        Returns:
            What the fence found of each lane, or None if it is not what must be there.

        Raises:
            Fenced: another owner took over.
            StoreError: the server does not answer.
        """
        fenced = self._fenced(fresh, shard)
        own = [one for one in writes if one[1].shard == shard]
        if fenced is None or not all(self._as_it_was(lane, shard, there, markers, own) for lane, there in fenced.items()):
            return None
        self.stored.store.adopt(shard, fresh)
        for lane, there in fenced.items():
            self.stored.shards.of(lane).epochs[shard] = there.epoch
        return fenced

    def reconnect(
        self,
        failing: Mapping[int, StoreError],
        markers: Markers,
        writes: Sequence[tuple[int, Write]],
        covered: Callable[[Collection[int]], bool],
    ) -> tuple[dict[int, Mapping[int, Found]], dict[int, StoreError]]:
        """Reconnect to shards that failed.

        A broken connection is remade at once. If more shards do not answer than parity covers, this
        waits for them.

        Args:
            failing: shard -> its error.
            markers: returns the markers that a shard may have of a lane now.
            writes: the writes that were under way, each with its lane.
            covered: returns whether parity covers the loss of these shards.

        Returns:
            The shards that are back, each with what the fence found there by lane; and the error of
            each other shard.

        Raises:
            Fenced: another owner took over.
            ShardsSilent: the patience ended before parity covered the shards that do not answer.
        """
        tried = _Tried()
        for shard, error in failing.items():
            # A shard that is being rebuilt is not worth waiting for: its rebuild begins anew
            # anyway.
            whole = is_away(error) and self.stored.shards.complete(shard)
            (tried.away if whole else tried.wrong)[shard] = error
        self._try([shard for shard, error in tried.away.items() if is_broken(error)], tried, markers, writes, RECONNECT)
        if tried.away and not covered(tried.failed) and covered(tried.wrong):
            self.on_awaited(ShardsAwaited(tuple(tried.away), str(next(iter(tried.away.values())))))
            # The store waited for its timeout already before it called a shard silent.
            silent = any(isinstance(error, StoreSilent) for error in failing.values())
            waited = self.stored.store.timeout if silent else timedelta()
            self._wait(tried, markers, writes, covered, time.monotonic() + (self.patience.time - waited).total_seconds())
            if covered(tried.failed):
                self.on_awaited(ShardsAwaited((), ""))
        return tried.back, tried.failed

    def _try(
        self,
        shards: Sequence[int],
        tried: _Tried,
        markers: Markers,
        writes: Sequence[tuple[int, Write]],
        look: timedelta,
    ) -> None:
        """Reconnect to shards that are away, to all at once, and sort them by the outcome."""
        urls = self.stored.shards.urls
        opened = at_once({shard: partial(Store, [urls[shard]], look, look) for shard in shards})
        with ExitStack() as stack:
            for fresh in opened.values():
                if isinstance(fresh, Store):
                    stack.callback(fresh.close)
            for shard, fresh in opened.items():
                del tried.away[shard]
                try:
                    if isinstance(fresh, Exception):
                        raise fresh
                    there = self._adopted(shard, fresh, markers, writes)
                except Fenced:
                    raise
                except StoreError as error:
                    # Where a server that cannot be reached has died (`Patience.volatile`), its rows
                    # died with it.
                    died = self.patience.volatile and _is_gone(error)
                    (tried.away if is_away(error) and not died else tried.wrong)[shard] = error
                    continue
                if there is None:
                    what = "came back without the run's last write-back batches, or without some of its rows"
                    tried.wrong[shard] = StoreUnavailable(f"store {urls[shard]}: {what}")
                else:
                    tried.back[shard] = there

    def _wait(
        self,
        tried: _Tried,
        markers: Markers,
        writes: Sequence[tuple[int, Write]],
        covered: Callable[[Collection[int]], bool],
        deadline: float,
    ) -> None:
        """Retry the shards that do not answer until parity covers the ones left.

        The wait also ends when more shards lost their rows than parity covers.

        Raises:
            ShardsSilent: the deadline passed, or `given_up` says to stop waiting.
        """
        covered_since: float | None = None
        while tried.away and covered(tried.wrong):
            self._try(list(tried.away), tried, markers, writes, min(self.stored.store.timeout, _LONGEST_LOOK))
            now = time.monotonic()
            if covered(tried.failed):
                covered_since = now if covered_since is None else covered_since
                if now - covered_since >= _GRACE.total_seconds():
                    return
            elif covered(tried.wrong) and (now >= deadline or self.given_up()):
                raise silence(self.stored, tried.away)
            time.sleep(_PAUSE.total_seconds())

    def check_not_taken(self) -> None:
        """Check that no other run took the namespace.

        If another run took it, that is the reason why rows are missing, and no shard is lost.

        Raises:
            NamespaceInUse: another run has the namespace.
        """
        identity, namespace, shards = self.ownership.identity, self.stored.namespace, self.stored.placement.live
        if identity is None:
            return

        def check(shard: int) -> None:
            try:
                with Store([self.stored.shards.urls[shard]], RECONNECT, RECONNECT) as store:
                    note = owner(store, namespace, 0)
            except StoreError:
                return
            if note is not None and not is_run(note, identity):
                raise NamespaceInUse(
                    f"store {store.urls[0]}: namespace {namespace} now belongs to another run, which deleted this run's rows (--overwrite); this "
                    "run ends; give each run a --namespace of its own"
                )

        results_of(at_once({shard: partial(check, shard) for shard in shards}))

    def repeat(
        self,
        reads: Sequence[tuple[int, Read]],
        writes: Sequence[tuple[int, Write]],
        fenced: Mapping[int, Mapping[int, Found]],
        exchange: Exchange,
    ) -> None:
        """Send the requests of reconnected shards again, under the new fence epochs.

        Args:
            reads: the reads of the exchange that failed, each with its lane.
            writes: the writes of the exchange that failed, each with its lane.
            fenced: shard -> lane -> what the fence found there.
            exchange: performs the requests.
        """
        stored = self.stored
        repeated = [(lane, replace(read, key=stored.key(lane, read.shard)), read) for lane, read in reads if read.shard in fenced]
        written: list[tuple[int, Write]] = []
        for lane, write in writes:
            if write.shard in fenced:
                new = write.new
                if _done(write, fenced[write.shard][lane]):
                    # The server did the write, but its answer was lost. Sent again, the write adds
                    # no new field.
                    stored.note(lane, write)
                    new = range(1)
                written.append((lane, replace(write, key=stored.key(lane, write.shard), new=new, added=None)))
        exchange([(lane, twin) for lane, twin, _ in repeated], written)
        # A repeated read fills the same rows array. Its other results go to the original read.
        for _, twin, read in repeated:
            read.missing, read.marker = twin.missing, twin.marker

    def _fenced(self, fresh: Store, shard: int) -> dict[int, Found] | None:
        """Fence all lanes on the one server of a Store, if the server is noted as this shard.

        Returns what was found by lane, or None if the server is not noted as this shard.
        """
        if not self.ownership.has(fresh, self.stored.namespace, shard, 0):
            return None
        return self.fence(fresh, shard)

    def fence(self, fresh: Store, shard: int, empty: bool = False) -> dict[int, Found]:
        """Fence all lanes on the one server of a Store, whatever run or shard it is noted as.

        Args:
            fresh: a Store of the one server.
            empty: as `fence_everywhere` has it.
        """
        table = self.stored.shards
        known = {lane: table.of(lane).epochs[shard] for lane in table.lanes}
        return fence_all(fresh, 0, self.stored.namespace, list(known), self.ownership.term, known, empty)

    def _as_it_was(self, lane: int, shard: int, there: Found, markers: Markers, writes: Sequence[tuple[int, Write]]) -> bool:
        """Return whether a reconnected shard lacks nothing of a lane but the writes under way.

        Both sides count fields without the marker, so a hash that does not exist counts as -1.
        """
        # Chunks of a migration do not change the batch numbers, so the marker of a shard that lacks
        # the last chunk would look right. The shard's record of the last chunk is compared too.
        own = self.stored.shards.of(lane)
        if not self.expected(lane, shard, there.marker, markers) or there.migrated != own.migrated[shard]:
            return False
        before = own.held[shard]
        held = -1 if before is None else before
        of_lane = [write for of, write in writes if of == lane and write.new is not None]
        # Writes whose marker is there were done, so their new fields must be there too.
        held += sum(write.new.start for write in of_lane if write.new is not None and _done(write, there))
        # A repair carries no marker that would show whether it was done. As many rows as it adds
        # may therefore be missing.
        lacking = sum(write.new.stop - 1 for write in of_lane if write.new is not None and write.marker is None)
        return held - lacking <= there.rows - (not there.marked) <= held

    def expected(self, lane: int, shard: int, marker: Marker, markers: Markers) -> bool:
        """Return whether a shard may have this marker of a lane now."""
        return marker in self.allowed(lane, shard, markers)

    def allowed(self, lane: int, shard: int, markers: Markers) -> list[Marker]:
        """Return the markers that a shard may have of a lane now."""
        return [replace(marker, rebuilding=self.stored.shards.rebuilding(lane, shard)) for marker in markers(lane)]


def silence(stored: StoredRows, away: Mapping[int, StoreError]) -> StoreError:
    """Return the error that ends work which needs these shards.

    Args:
        away: shards that do not answer -> the error.
    """
    if not stored.placement.r:
        return next(iter(away.values()))
    without = ", ".join(map(str, sorted({*away, *stored.shards.lost})))
    reasons = "; ".join(str(error) for error in away.values())
    return ShardsSilent(
        f"store shards {without}: are lost or do not answer, but parity covers only {stored.placement.r}: {reasons}"
    )


def check_answered(stored: StoredRows, failing: Mapping[int, StoreError]) -> None:
    """Check that silent shards are not the reason why parity does not cover the failing shards.

    Args:
        failing: shard -> its error.

    Raises:
        ShardsSilent: parity does not cover the failing shards, but would cover them if the silent
            ones had their rows.
    """
    away = {shard: error for shard, error in failing.items() if is_away(error)}
    if stored.placement.r and not stored.shards.all_covered(failing) and stored.shards.all_covered(failing.keys() - away.keys()):
        raise silence(stored, away)


def is_away(error: StoreError) -> bool:
    """Return whether a shard does not answer, so that its server may be unchanged."""
    return isinstance(error, StoreUnavailable) and not isinstance(error, ForeignKey)


def _is_gone(error: BaseException | None) -> bool:
    """Return whether the error shows that nothing listens at the server's address."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_broken(error: StoreError) -> bool:
    """Return whether a shard failed because its connection broke.

    Its server may accept a new connection at once.
    """
    return is_away(error) and not isinstance(error, StoreSilent | StoreBusy)


def _done(write: Write, there: Found) -> bool:
    """Return whether a write that was under way was done: the shard has the marker of the write."""
    return there.marked and write.marker is not None and Marker.parse(write.marker) == there.marker
