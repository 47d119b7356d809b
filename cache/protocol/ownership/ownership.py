"""Who owns lanes on the store, and what an owner, or a reader, finds there: each lane's fence epoch, and the shards that lack rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from foreload.cache.client.resp import MIGRATED
from foreload.cache.client.store import Store
from foreload.cache.errors import ForeignKey, StoreAuth, StoreError, StoreFull, StoreUnavailable
from foreload.cache.protocol.ownership.interrupted_migration import Taking, agreed, finish_migration, stamp_of_nothing, strangers
from foreload.cache.protocol.shards.fence import Found, fence_all, foreign_key, look_at
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import is_of
from foreload.cache.protocol.shards.reading import StoredRows


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns the lanes: its term, and the identity that a server of the run has noted, None where none is noted."""

    term: int = 0
    identity: Mapping[str, Any] | None = None

    def has(self, store: Store, namespace: str, shard: int, at: int | None = None) -> bool:
        """Whether the store's shard (its number `at` of the Store, the same by default) is noted as shard `shard` of the owner's run."""
        return self.identity is None or is_of(store, namespace, self.identity, shard, at)


UNFENCED = Ownership()


def inspect_shards(
    store: Store,
    namespace: str,
    look: Callable[[int], Mapping[int, Found]],
    belongs: Callable[[int], bool] = lambda shard: True,
    may_lose: bool = False,
) -> Iterator[tuple[int, Mapping[int, Found] | None]]:
    """Each store shard with what `look` finds of its lanes; None for one that is down, or is none of the run's.

    One on which another program wrote a key of a lane, or the run's note, is given up, and counts as down.
    may_lose: one that refuses is given up, and counts as down. Raises StoreError.
    """
    for shard in store.used:
        by_lane = None
        try:
            if shard not in store.down and belongs(shard):
                by_lane = look(shard)
                if (foreign := foreign_key(by_lane)) is not None:
                    raise foreign
        except ForeignKey as error:
            store.give_up(shard, error)
            by_lane = None
        except (StoreFull, StoreAuth) as error:
            if not may_lose:
                raise
            store.give_up(shard, StoreUnavailable(str(error)))
        yield shard, by_lane


def take_over(stored: StoredRows, ownership: Ownership, last_batches: Mapping[int, int]) -> None:
    """Fence lanes on every store shard, and lose (in stored.shards) those that do not have all of their rows.

    stored must know the lanes' stripes. last_batches: of each lane the number of its last write-back batch. Raises Fenced, StoreError, and RowsLost
    where parity does not cover what is lost.
    """
    doubtful: dict[int, None] = {}  # shards with the right marker and another number of rows; a dict keeps them in order
    fenced_shards = inspect_shards(
        stored.store,
        stored.namespace,
        lambda shard: fence_all(stored.store, shard, stored.namespace, list(last_batches), ownership.term),
        lambda shard: ownership.has(stored.store, stored.namespace, shard),
        may_lose=bool(stored.placement.r),
    )
    found: dict[int, Mapping[int, Found]] = {}
    for shard, fenced in fenced_shards:
        if fenced is None and not stored.placement.r:
            raise stored.store.down.get(shard) or StoreError(
                f"store {stored.shards.urls[shard]}: is not shard {shard} of namespace {stored.namespace}; check --store"
            )
        if fenced is None:
            lose(stored, shard)
            continue
        for lane, there in fenced.items():
            stored.shards.of(lane).epochs[shard] = there.epoch
        found[shard] = fenced
    _finish_migrations(stored, found, last_batches, ownership.term)
    expected = {lane: stored.expected(lane) for lane in last_batches}
    for shard, fenced in found.items():
        for lane, there in fenced.items():
            own = stored.shards.of(lane)
            if not last_batches[lane] and (there.marked or there.rows):
                # Batch 0: nothing of this run is there. It is what an earlier owner wrote between the removal of its rows and the fence.
                stored.store.command(shard, "UNLINK", stored.key(lane, shard))
                own.migrated[shard] = None
                there = replace(there, marked=False, rows=0)
            if not last_batches[lane]:
                if stamp := stamp_of_nothing(stored, lane, ownership.term):
                    stored.store.command(shard, "HSET", stored.key(lane, shard), MIGRATED, stamp.stored())
                    own.migrated[shard] = stamp
                continue
            has_all = own.has_all(shard, there.rows, int(expected[lane][shard]), shard in stored.placement.keeping)
            must = int(expected[lane][shard] + own.leftover[shard])
            if there.marked:
                own.held[shard] = must
            if there.marker != Marker(last_batches[lane], last_batches[lane]):
                lose(stored, shard)
            elif not has_all:
                doubtful[shard] = None
            if not stored.placement.r and (shard in stored.shards.lost or shard in doubtful):
                raise StoreError(
                    f"store {stored.shards.urls[shard]}: lost rows of lane {lane}: has {there.rows} of {must}, up to write-back "
                    f"batch {there.marker} of {last_batches[lane]}; restore it and --resume, or start again with --overwrite"
                )
    stored.shards.check_covered()
    for shard in doubtful:
        # One that is too many is kept: the rows that it lacks are decoded when they are asked for.
        stored.lose(shard, _lacks_rows(stored, shard))


def _finish_migrations(
    stored: StoredRows, found: dict[int, Mapping[int, Found]], last_batches: Mapping[int, int], term: int
) -> None:
    """Where rows move, find how far each lane has, and bring its last chunk to its end. found: by shard and lane, brought up to date."""

    def fails(shard: int, error: StoreError) -> None:
        if not stored.placement.r:
            raise error
        stored.shards.lose(shard, str(error))

    for lane, number in last_batches.items():
        whole = Marker(number, number)
        of_lane = {shard: lanes[lane] for shard, lanes in found.items() if lanes[lane].marker in (whole, Marker(0, 0))}
        given = stored.stripes_of(lane).written.counts if stored.placement.migrating else np.zeros(0, np.int64)
        stale = finish_migration(stored, lane, of_lane, Taking(term, number, given), fails)
        for shard, there in of_lane.items():
            found[shard] = {**found[shard], lane: there}
        for shard in stale:
            fails(shard, StoreError(_lacks_rows(stored, shard)))
    for shard in stored.shards.lost.keys() & found.keys():
        del found[shard]


def lose(stored: StoredRows, shard: int) -> None:
    """Go on without a shard that does not answer, or lacks rows."""
    failure = stored.store.down.get(shard)
    stored.shards.lose(shard, _lacks_rows(stored, shard) if failure is None else str(failure))


def _lacks_rows(stored: StoredRows, shard: int) -> str:
    return f"store {stored.shards.urls[shard]}: lacks rows of the run"


def find_rows(stored: StoredRows, last_batches: Sequence[int]) -> None:
    """What `take_over` finds, for a reader, which fences nothing: each lane's fence epoch on every store shard; those that lack rows are lost.

    last_batches: as for `stale_shards`. Without parity a shard that lacks rows is noticed when it is read. Raises StoreError, RowsLost.
    """
    numbers = dict(enumerate(last_batches))
    found: dict[int, dict[int, Found]] = {lane: {} for lane in numbers}
    look = partial(look_at, stored.store, namespace=stored.namespace, lanes=list(numbers))
    for shard, lanes in inspect_shards(stored.store, stored.namespace, look):
        if lanes is None and not stored.placement.r:
            raise stored.store.down[shard]
        if lanes is None:
            lose(stored, shard)
            continue
        for lane, there in lanes.items():
            stored.shards.of(lane).epochs[shard] = there.epoch
            coming = shard in stored.placement.joining and not there.marked and not there.rows
            if stored.placement.r and there.marker != Marker(numbers[lane], numbers[lane]) and not coming:
                lose(stored, shard)
            else:
                found[lane][shard] = there
    for lane, of_lane in found.items():
        for shard in strangers(stored.placement, of_lane) if stored.placement.r and numbers[lane] else ():
            if not stored.placement.migrating:
                lose(stored, shard)
    if stored.placement.migrating:
        for lane, of_lane in found.items():
            at = agreed(stored.placement, of_lane, numbers[lane])
            stored.shards.of(lane).places.migrated = np.uint64(at.cursor)
            for shard in at.stale:
                stored.lose(shard, _lacks_rows(stored, shard))
    stored.shards.check_covered()


def stale_shards(store: Store, namespace: str, last_batches: Sequence[int]) -> list[int]:
    """The store shards that cannot be reached, or whose marker of a lane is not that of the lane's write-back batch `last_batches[lane]`."""
    whole = {lane: Marker(number, number) for lane, number in enumerate(last_batches)}
    inspected = inspect_shards(store, namespace, partial(look_at, store, namespace=namespace, lanes=list(whole)))
    return [
        shard for shard, lanes in inspected if lanes is None or {lane: there.marker for lane, there in lanes.items()} != whole
    ]
