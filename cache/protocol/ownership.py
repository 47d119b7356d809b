"""Who owns lanes on the store, and what an owner, or a reader, finds there: each lane's fence epoch, and the shards that lack rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.errors import StoreAuth, StoreError, StoreFull
from foreload.cache.protocol.fence import fence_all, read_epochs
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.namespace import is_of, lane_key
from foreload.cache.protocol.reading import StoredRows


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns the lanes: its term, and the identity that a server of the run has noted, None where none is noted."""

    term: int = 0
    identity: Mapping[str, Any] | None = None

    def has(self, store: Store, namespace: str, shard: int, at: int | None = None) -> bool:
        """Whether the store's shard (its number `at` of the Store, the same by default) is noted as shard `shard` of the owner's run."""
        return self.identity is None or is_of(store, namespace, self.identity, shard, at)


UNFENCED = Ownership()


def take_over(stored: StoredRows, ownership: Ownership, last_batches: Mapping[int, int]) -> None:
    """Fence lanes on every store shard, and lose (in stored.shards) those that do not have all of their rows.

    last_batches: of each lane the number of its last write-back batch. Raises Fenced, StoreError, RowsLost where parity does not cover what is lost.
    """
    doubtful: dict[int, None] = {}
    expected = {lane: stored.expected(lane) for lane in last_batches}
    for shard in range(stored.placement.shard_count):
        try:
            there = shard not in stored.store.down and ownership.has(stored.store, stored.namespace, shard)
            fenced = fence_all(stored.store, shard, stored.namespace, list(last_batches), ownership.term) if there else {}
        except (StoreFull, StoreAuth) as error:
            if not stored.placement.r:
                raise
            there = False
            stored.store.give_up(shard, str(error))
        if not there and not stored.placement.r:
            raise StoreError(
                f"store {stored.shards.urls[shard]}: is not shard {shard} of namespace {stored.namespace}; check --store"
            )
        if not there:
            lose(stored, shard)
            continue
        for lane, found in fenced.items():
            own = stored.shards.of(lane)
            own.epochs[shard] = found.epoch
            if not last_batches[lane] and (found.marked or found.rows):
                # What an earlier owner wrote between the removal of its rows and the fence.
                stored.store.command(shard, "UNLINK", stored.key(lane, shard))
                continue
            if found.marked:
                own.held[shard] = int(expected[lane][shard])
            if found.marker != Marker(last_batches[lane], last_batches[lane]):
                lose(stored, shard)
            elif found.rows != expected[lane][shard]:
                doubtful[shard] = None
            if not stored.placement.r and (shard in stored.shards.lost or shard in doubtful):
                raise StoreError(
                    f"store {stored.shards.urls[shard]}: lost rows of lane {lane}: has {found.rows} of {expected[lane][shard]}, up to write-back "
                    f"batch {found.marker} of {last_batches[lane]}; restore it and --resume, or start again with --overwrite"
                )
    stored.shards.check_covered()
    for shard in doubtful:
        # One that is too many is kept: the rows that it lacks are decoded when they are asked for.
        stored.lose(shard, _lacks_rows(stored, shard))


def lose(stored: StoredRows, shard: int) -> None:
    """Go on without a shard that does not answer, or lacks rows."""
    failure = stored.store.down.get(shard)
    stored.shards.lose(shard, _lacks_rows(stored, shard) if failure is None else str(failure))


def _lacks_rows(stored: StoredRows, shard: int) -> str:
    return f"store {stored.shards.urls[shard]}: lacks rows of the run"


def find_rows(stored: StoredRows, last_batches: Sequence[int]) -> None:
    """The same for a reader: find each lane's fence epoch on every store shard, and lose those that lack rows.

    Without parity these are noticed when they are read.
    """
    for shard in range(stored.placement.shard_count):
        if shard in stored.store.down:
            lose(stored, shard)
            continue
        for lane, epoch in enumerate(read_epochs(stored.store, shard, stored.namespace, len(last_batches))):
            stored.shards.of(lane).epochs[shard] = int(epoch)
            if not stored.placement.r:
                continue
            found = stored.store.command(shard, "HGET", stored.key(lane, shard), MARKER)
            assert found is None or isinstance(found, bytes)
            if Marker.parse(found) != Marker(last_batches[lane], last_batches[lane]):
                lose(stored, shard)
    stored.shards.check_covered()


def stale_shards(store: Store, namespace: str, last_batches: Sequence[int]) -> list[int]:
    """The store shards that cannot be reached, or whose marker of a lane is not that of the lane's write-back batch `last_batches[lane]`."""
    stale = []
    for shard in range(store.shards):
        if shard not in store.down:
            epochs = read_epochs(store, shard, namespace, len(last_batches))
            keys = [lane_key(namespace, lane, int(epoch)) for lane, epoch in enumerate(epochs)]
            found = [store.command(shard, "HGET", key, MARKER) for key in keys]
            markers = [Marker.parse(value if isinstance(value, bytes) else None) for value in found]
            if markers == [Marker(number, number) for number in last_batches]:
                continue
        stale.append(shard)
    return stale
