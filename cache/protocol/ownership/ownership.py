"""Who owns lanes on the store, and what an owner, or a reader, finds there: each lane's fence epoch, and the shards that lack rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreload.cache.client.resp import MIGRATED
from foreload.cache.client.store import Store
from foreload.cache.errors import ForeignKey, StoreAuth, StoreError, StoreFull
from foreload.cache.protocol.ownership.interrupted_migration import finish_migration, stamp_of_nothing
from foreload.cache.protocol.ownership.verdict import Expect, Verdict, judge
from foreload.cache.protocol.shards.fence import Found, fence_everywhere, foreign_key, look_at
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import are_of, is_of
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
_REFUSALS = (ForeignKey, StoreFull, StoreAuth)  # of a shard that answers


@dataclass(frozen=True, slots=True)
class FoundLanes:
    """What lanes have on the store shards.

    lanes: by lane and shard. absent: why nothing is known of the other shards. failed: those of them that neither refused what they were asked, nor
    were down before, but stopped answering meanwhile.
    """

    lanes: Mapping[int, Mapping[int, Found]]
    absent: Mapping[int, StoreError]
    failed: Collection[int] = ()


def look(store: Store, namespace: str, lanes: Collection[int]) -> FoundLanes:
    """Look at lanes on every store shard, and change nothing. Raises StoreError for a shard that fails meanwhile."""
    found: dict[int, dict[int, Found]] = {lane: {} for lane in lanes}
    absent = store.down
    for shard in store.used:
        by_lane = {} if shard in absent else look_at(store, shard, namespace, list(lanes))
        if (foreign := foreign_key(by_lane)) is not None:
            absent[shard] = foreign
            store.give_up(shard, foreign)
            continue
        for lane, there in by_lane.items():
            found[lane][shard] = there
    return FoundLanes(found, absent)


def fence_lanes(stored: StoredRows, lanes: Collection[int], ownership: Ownership) -> FoundLanes:
    """Fence lanes on every store shard, on all shards at once. The shards must be noted as the run's. Raises Fenced, StoreError."""
    store, name, shards, down = stored.store, stored.namespace, stored.placement.live, stored.store.down
    absent: dict[int, StoreError] = {}
    if ownership.identity is not None:
        own = are_of(store, name, ownership.identity)
        absent = {
            shard: StoreError(f"store {stored.shards.urls[shard]}: is not shard {shard} of namespace {name}; check --store")
            for shard in shards
            if not own.get(shard, False)
        }
    absent |= store.down
    found = {}
    for lane in lanes:
        epochs = stored.shards.of(lane).epochs
        asked = {shard: epochs[shard] for shard in shards if shard not in absent}
        found[lane], failures = fence_everywhere(store, list(asked), name, lane, ownership.term, asked)
        absent |= failures
        for shard, there in found[lane].items():
            epochs[shard] = there.epoch
    failed = [shard for shard in store.down if shard not in down and not isinstance(absent[shard], _REFUSALS)]
    for shard, error in absent.items():
        if isinstance(error, ForeignKey):
            store.give_up(shard, error)
    known = {lane: {shard: there for shard, there in of_lane.items() if shard not in absent} for lane, of_lane in found.items()}
    return FoundLanes(known, absent, failed)


def take_over(stored: StoredRows, ownership: Ownership, last_batches: Mapping[int, int]) -> None:
    """Fence lanes of a stopped run on every store shard, and lose (in stored.shards) those that do not have all of their rows.

    stored must know the lanes' stripes. last_batches: of each lane the number of its last write-back batch. Raises Fenced, StoreError, and RowsLost
    where parity does not cover what is lost.
    """
    found = fence_lanes(stored, last_batches, ownership)
    lose_absent(stored, found)
    verdicts = {}
    for lane, number in last_batches.items():
        verdict = verdicts[lane] = judge(stored.placement, found.lanes[lane], Expect.stopped(number))
        finish_migration(stored, lane, verdict, ownership.term, stored.stripes_of(lane).written.counts)
        for shard in verdict.stale:
            stored.go_without(shard, StoreError(_lacks_rows(stored, shard)))
    doubtful: dict[int, None] = {}  # shards with the right marker and another number of rows; a dict keeps them in order
    for lane, verdict in verdicts.items():
        known = {**found.lanes[lane], **verdict.trusted}
        there = {shard: one for shard, one in known.items() if shard not in stored.shards.lost}
        if verdict.expect.number:
            doubtful |= dict.fromkeys(_count(stored, lane, verdict, there))
        else:
            _empty(stored, lane, there, ownership.term)
    stored.shards.check_covered()
    for shard in doubtful:
        # One that is too many is kept: the rows that it lacks are decoded when they are asked for.
        stored.lose(shard, _lacks_rows(stored, shard))


def _count(stored: StoredRows, lane: int, verdict: Verdict, found: Mapping[int, Found]) -> list[int]:
    """Lose the shards that are not trusted with a lane, and compare how many rows the others have with how many a stopped run must have there.

    found: what there is, by shard. Returns the shards with another number. Without parity, raises StoreError for these, too.
    """
    own, expected, number, doubtful = stored.shards.of(lane), stored.expected(lane), verdict.expect.number, []
    for shard, there in found.items():
        has_all = own.has_all(shard, there.rows, int(expected[shard]), shard in stored.placement.keeping)
        must = int(expected[shard] + own.leftover[shard])
        if there.marked:
            own.held[shard] = must
        if not stored.placement.r and not (has_all and shard in verdict.trusted):
            raise StoreError(
                f"store {stored.shards.urls[shard]}: lost rows of lane {lane}: has {there.rows} of {must}, up to write-back "
                f"batch {there.marker} of {number}; restore it and --resume, or start again with --overwrite"
            )
        if shard not in verdict.trusted:
            lose(stored, shard)
        elif not has_all:
            doubtful.append(shard)
    return doubtful


def _empty(stored: StoredRows, lane: int, found: Mapping[int, Found], term: int) -> None:
    """Begin with a lane that has no batch yet: what is there, an earlier owner wrote between the removal of its rows and the fence."""
    own, stamp = stored.shards.of(lane), stamp_of_nothing(stored, lane, term)
    for shard, there in found.items():
        if there.marked or there.rows:
            stored.store.command(shard, "UNLINK", stored.key(lane, shard))
            own.migrated[shard] = None
        if stamp is not None:
            stored.store.command(shard, "HSET", stored.key(lane, shard), MIGRATED, stamp.stored())
            own.migrated[shard] = stamp


def lose_absent(stored: StoredRows, found: FoundLanes) -> None:
    """Go on without the shards of which nothing is known. Raises the error of one that stopped answering; without parity, of any."""
    for shard, error in found.absent.items():
        if shard in found.failed or not stored.placement.r:
            raise error
        lose(stored, shard)


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
    found = look(stored.store, stored.namespace, range(len(last_batches)))
    lose_absent(stored, found)
    for lane, number in enumerate(last_batches):
        own = stored.shards.of(lane)
        for shard, there in found.lanes[lane].items():
            own.epochs[shard] = there.epoch
        verdict = judge(stored.placement, found.lanes[lane], Expect.stopped(number))
        if verdict.move is not None:
            own.places.migrated = np.uint64(verdict.move.cursor)
        for shard in [*verdict.refused, *verdict.stale] if stored.placement.r else ():
            lose(stored, shard)
    stored.shards.check_covered()


def stale_shards(store: Store, namespace: str, last_batches: Sequence[int]) -> list[int]:
    """The store shards that cannot be reached, or whose marker of a lane is not that of the lane's write-back batch `last_batches[lane]`."""
    found = look(store, namespace, range(len(last_batches)))
    wrong = {
        shard
        for lane, number in enumerate(last_batches)
        for shard, there in found.lanes[lane].items()
        if there.marker != Marker(number, number)
    }
    return sorted(wrong | found.absent.keys())
