"""Connecting again to store shards whose connection broke, or that stay silent, for the owner of lanes that has them served.

Its server may be as it was, and then nothing is lost. So older connections are fenced first; then the server must be the run's, and its markers and
counts of rows those that it can have now. What was under way there was done, or not, as its marker shows, and is sent again.
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

RECONNECT = timedelta(milliseconds=200)  # for a connection that broke, of which nothing more is known
_LONGEST_LOOK = timedelta(seconds=1)  # at a server that has been silent
_PAUSE = timedelta(milliseconds=50)  # between two looks
_GRACE = timedelta(seconds=1)  # for the last ones, once parity covers these: if all were silent at once, all come back at once

Markers = Callable[[int], Sequence[Marker]]
Exchange = Callable[[Sequence[tuple[int, Read]], Sequence[tuple[int, Write]]], None]


@dataclass(slots=True)
class _Tried:
    """What became of shards that failed: back, by lane what is there; away, those that do not answer; wrong, those that lack rows, or refuse."""

    back: dict[int, Mapping[int, Found]] = field(default_factory=dict)
    away: dict[int, StoreError] = field(default_factory=dict)
    wrong: dict[int, StoreError] = field(default_factory=dict)

    @property
    def failed(self) -> dict[int, StoreError]:
        """All that are not back."""
        return self.wrong | self.away


@dataclass(slots=True)
class Reconnection:
    """Of the owner of lanes; one thread uses it, the one that changes `stored.shards`.

    given_up: whether nobody waits any more; on_awaited: called with what is waited for.
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
        """Go on with a shard over a new connection: what is there of each lane; None where that is not what must be there.

        markers: those that a lane may have now; writes: what was under way, each with its lane. Raises Fenced, and StoreError where the server does
        not answer.
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
        """Connect again to shards that failed: what is there of those that are as they must be, and what is wrong with the others.

        At once where a connection broke. Where more do not answer than parity covers, they are waited for. covered: whether these may be lost. Raises
        Fenced, and ShardsSilent where the patience is over.
        """
        tried = _Tried()
        for shard, error in failing.items():
            # One that is being rebuilt has nothing that would be worth it.
            whole = is_away(error) and self.stored.shards.complete(shard)
            (tried.away if whole else tried.wrong)[shard] = error
        self._try([shard for shard, error in tried.away.items() if is_broken(error)], tried, markers, writes, RECONNECT)
        if tried.away and not covered(tried.failed) and covered(tried.wrong):
            self.on_awaited(ShardsAwaited(tuple(tried.away), str(next(iter(tried.away.values())))))
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
        """Connect again to shards that are away, to all at once, and note what came of it."""
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
                    died = self.patience.volatile and _is_gone(error)
                    (tried.away if is_away(error) and not died else tried.wrong)[shard] = error
                    continue
                if there is None:
                    what = "came back without the run's last write-back batches, or without rows"
                    tried.wrong[shard] = StoreUnavailable(f"store {urls[shard]}: {what}")
                else:
                    tried.back[shard] = there

    def _wait(
        self, tried: _Tried, markers: Markers, writes: Sequence[tuple[int, Write]], covered: Callable[[Collection[int]], bool], deadline: float
    ) -> None:  # fmt: skip
        """Try shards that do not answer until parity covers those that are left, or more have lost their rows than it covers."""
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
        """Raise NamespaceInUse where another run has the namespace by now: then that, and no loss, is why rows are gone."""
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
                    f"store {store.urls[0]}: namespace {namespace} is another run's by now, which deleted this one's rows (--overwrite); this "
                    "one ends; give each run a --namespace of its own"
                )

        results_of(at_once({shard: partial(check, shard) for shard in shards}))

    def repeat(
        self,
        reads: Sequence[tuple[int, Read]],
        writes: Sequence[tuple[int, Write]],
        fenced: Mapping[int, Mapping[int, Found]],
        exchange: Exchange,
    ) -> None:
        """Ask shards with a new connection once more, under the new epochs. fenced: by shard and lane, what was found there."""
        stored = self.stored
        repeated = [(lane, replace(read, key=stored.key(lane, read.shard)), read) for lane, read in reads if read.shard in fenced]
        written: list[tuple[int, Write]] = []
        for lane, write in writes:
            if write.shard in fenced:
                new = write.new
                if _done(write, fenced[write.shard][lane]):
                    # It answered, but was not heard; sent again it brings nothing.
                    stored.note(lane, write)
                    new = range(1)
                written.append((lane, replace(write, key=stored.key(lane, write.shard), new=new, added=None)))
        exchange([(lane, twin) for lane, twin, _ in repeated], written)
        # A twin fills the same rows; what else was found must be passed to the read that was asked for.
        for _, twin, read in repeated:
            read.missing, read.marker = twin.missing, twin.marker

    def _fenced(self, fresh: Store, shard: int) -> dict[int, Found] | None:
        """Fence all lanes on the one server of a Store; None if that is not noted as this shard of the run."""
        if not self.ownership.has(fresh, self.stored.namespace, shard, 0):
            return None
        return self.fence(fresh, shard)

    def fence(self, fresh: Store, shard: int, empty: bool = False) -> dict[int, Found]:
        """The same, whatever is noted there. empty: as `fence` has it."""
        table = self.stored.shards
        known = {lane: table.of(lane).epochs[shard] for lane in table.lanes}
        return fence_all(fresh, 0, self.stored.namespace, list(known), self.ownership.term, known, empty)

    def _as_it_was(self, lane: int, shard: int, there: Found, markers: Markers, writes: Sequence[tuple[int, Write]]) -> bool:
        """Whether a shard with a new connection lacks nothing of a lane but what was under way.

        Fields are counted less the marker, on both sides, so a hash that is not there counts as -1.
        """
        # Chunks of a move change no number, so one that lacks the last would look right.
        own = self.stored.shards.of(lane)
        if not self.expected(lane, shard, there.marker, markers) or there.migrated != own.migrated[shard]:
            return False
        before = own.held[shard]
        held = -1 if before is None else before
        of_lane = [write for of, write in writes if of == lane and write.new is not None]
        held += sum(write.new.start for write in of_lane if write.new is not None and _done(write, there))
        # A repair has no marker to say whether it was done, so as many rows as it brings may be missing.
        lacking = sum(write.new.stop - 1 for write in of_lane if write.new is not None and write.marker is None)
        return held - lacking <= there.rows - (not there.marked) <= held

    def expected(self, lane: int, shard: int, marker: Marker, markers: Markers) -> bool:
        """Whether a shard may have this marker of a lane now."""
        return marker in self.allowed(lane, shard, markers)

    def allowed(self, lane: int, shard: int, markers: Markers) -> list[Marker]:
        """The markers that a shard may have of a lane now."""
        return [replace(marker, rebuilding=self.stored.shards.rebuilding(lane, shard)) for marker in markers(lane)]


def silence(stored: StoredRows, away: Mapping[int, StoreError]) -> StoreError:
    """The error with which work ends for which these shards would have to answer."""
    if not stored.placement.r:
        return next(iter(away.values()))
    without = ", ".join(map(str, sorted({*away, *stored.shards.lost})))
    reasons = "; ".join(str(error) for error in away.values())
    return ShardsSilent(f"store shards {without}: lost, or without an answer, and parity covers {stored.placement.r}: {reasons}")


def check_answered(stored: StoredRows, failing: Mapping[int, StoreError]) -> None:
    """Raise ShardsSilent where parity does not cover the loss of these shards, and would if those had their rows that do not answer."""
    away = {shard: error for shard, error in failing.items() if is_away(error)}
    if stored.placement.r and not stored.shards.all_covered(failing) and stored.shards.all_covered(failing.keys() - away.keys()):
        raise silence(stored, away)


def is_away(error: StoreError) -> bool:
    """Whether a shard does not answer, so that its server may be as it was."""
    return isinstance(error, StoreUnavailable) and not isinstance(error, ForeignKey)


def _is_gone(error: BaseException | None) -> bool:
    """Whether nobody listens where a server was to be reached."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_broken(error: StoreError) -> bool:
    """Whether a shard failed since its connection broke: its server may take another one at once."""
    return is_away(error) and not isinstance(error, StoreSilent | StoreBusy)


def _done(write: Write, there: Found) -> bool:
    """Whether a write that was under way was done, as the marker that is there now shows: that of the write."""
    return there.marked and write.marker is not None and Marker.parse(write.marker) == there.marker
