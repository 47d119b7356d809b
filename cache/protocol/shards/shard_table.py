"""The state of a run's store shards, as one process knows it.

For each shard: its server, the rows of each lane for which it is live, and each lane's fence epoch
there. A ShardTable is the only place where a process keeps this.

One thread at a time uses a ShardTable: first the thread that takes lanes over or reads them, then
the traffic's thread, which alone changes it from then on. All other threads use `snapshot`, which
is immutable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.url import StoreUrl
from foreload.cache.errors import RowsLost
from foreload.cache.parity.decoding import Survivors
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import ALL_STRIPES, NOT_MIGRATED, Places
from foreload.cache.protocol.shards.marker import Migrated
from foreload.cache.protocol.shards.shard_status import LOST, REBUILDING, REMOVED, ShardSnapshot, ShardStatus
from foreload.cache.rows.row_bytes import NUMBER_BITS


def cursor_at(table: int, stripe: int) -> int:
    """Return the cursor of a shard that is live for all stripes before this one."""
    return table << NUMBER_BITS | stripe


def cursor_place(cursor: int) -> tuple[int, int]:
    """Return the table and the stripe at which a cursor stands."""
    return cursor >> NUMBER_BITS, cursor & ((1 << NUMBER_BITS) - 1)


@dataclass(slots=True)
class LaneShards:
    """What one lane has on every store shard.

    Attributes:
        epochs: The lane's fence epoch on each shard, 0 where none was set.
        held: The number of rows and parity rows in the lane's hash, or None if the hash has no
            marker.
        cursors: uint64 [shards]. A shard is live for the lane's stripes (by table and number) below
            its cursor: for all, for none, or for those rebuilt so far.
        migrated: The migration record of the lane's hash, or None.
        places: Where the lane's stripes are.
        leftover: int64 [shards], the rows and parity rows that have migrated away from a shard that
            all rows leave, but that are still in its hash.
    """

    epochs: list[int]
    held: list[int | None]
    cursors: np.ndarray
    migrated: list[Migrated | None]
    places: Places
    leftover: np.ndarray

    def readable(self, shard: int) -> bool:
        """Return whether a shard has all rows of the lane."""
        return bool(self.cursors[shard] == ALL_STRIPES)

    @property
    def unreadable(self) -> np.ndarray:
        """The shards that do not have all rows of the lane: bool [shards]."""
        mask: np.ndarray = self.cursors != ALL_STRIPES
        return mask

    def has_all(self, shard: int, rows: int, must: int, keeps: bool) -> bool:
        """Return whether a shard has as many rows and parity rows as it must have.

        Args:
            rows: How many it has.
            must: How many it must have.
            keeps: Whether the shard keeps rows that have migrated away. If so, it may have more
                rows than `must`, and `leftover` records how many.
        """
        self.leftover[shard] = max(rows - must, 0) if keeps else 0
        return bool(rows == must + self.leftover[shard])

    def extend(self, count: int) -> None:
        """Add `count` shards that have nothing of the lane so far."""
        self.epochs += [0] * count
        self.held += [None] * count
        self.migrated += [None] * count
        # No stripe of the lane is there yet, so the new shards lack nothing.
        self.cursors = np.concatenate([self.cursors, np.full(count, ALL_STRIPES, np.uint64)])
        self.leftover = np.concatenate([self.leftover, np.zeros(count, np.int64)])


class ShardTable:
    """The state of every store shard for the lanes of one owner or one reader.

    A shard may be live for one lane and not, or only in part, for another, so liveness is a
    question about a lane (`of`).

    Attributes:
        urls: The servers' URLs, with passwords.
        placement: The run's placement.
        lost: The lost shards, each with the reason.
        avoided: A shard that answers slowly, or None. Its rows are decoded instead of read where
            parity allows that.
    """

    def __init__(self, urls: Sequence[StoreUrl], placement: Placement) -> None:
        self.urls, self.placement = list(urls), placement
        self.lost: dict[int, str] = {}
        self._lanes: dict[int, LaneShards] = {}
        self._rebuilt = dict.fromkeys(range(len(self.urls)), 0.0)
        # Cached by the mask of unreadable shards.
        self._survivors: dict[bytes, Survivors] = {}
        # Without lanes, nothing is left to migrate.
        self._migrated = 1.0
        self.avoided: int | None = None
        self._publish()

    # For all threads.

    @property
    def snapshot(self) -> ShardSnapshot:
        """The status of all shards. Any thread may read it."""
        return self._snapshot

    def _publish(self) -> None:
        shards = tuple(self._status(shard) for shard in range(len(self.urls)))
        self._snapshot = ShardSnapshot(shards, self.placement.version, self._migrated)

    def _status(self, shard: int) -> ShardStatus:
        if shard in self.placement.removed:
            return ShardStatus("", REMOVED)
        url = self.urls[shard].plain
        if shard in self.lost:
            return ShardStatus(url, LOST, self.lost[shard], 0.0)
        if self.complete(shard):
            return ShardStatus(url)
        return ShardStatus(url, REBUILDING, "", self._rebuilt[shard])

    # Queries, for the thread that uses the table.

    @property
    def lanes(self) -> Iterable[int]:
        """The lanes in the table."""
        return self._lanes.keys()

    def of(self, lane: int) -> LaneShards:
        """Return what a lane has on every shard.

        A lane that the table does not know is added. It has no epochs, and nothing on lost shards.
        """
        known = self._lanes.get(lane)
        if known is None:
            count = len(self.urls)
            # A shard that is not lost counts as readable until the markers show otherwise.
            cursors = np.full(count, ALL_STRIPES, np.uint64)
            cursors[list(self.lost)] = 0
            known = self._lanes[lane] = LaneShards(
                [0] * count, [None] * count, cursors, [None] * count, Places.of(self.placement), np.zeros(count, np.int64)
            )
        return known

    @property
    def whole(self) -> bool:
        """Whether every shard has all rows of every lane."""
        return self._snapshot.whole

    def complete(self, shard: int) -> bool:
        """Return whether a shard has all rows of every lane."""
        return shard not in self.lost and all(own.readable(shard) for own in self._lanes.values())

    def readable(self, lane: int, shard: int) -> bool:
        """Return whether a shard has all rows of a lane."""
        return self.of(lane).readable(shard)

    def rebuilding(self, lane: int, shard: int) -> bool:
        """Return whether a shard is not lost, but does not have all rows of a lane yet."""
        return shard not in self.lost and not self.readable(lane, shard)

    def survivors(self, lane: int) -> Survivors:
        """Return what to decode a lane's rows from, for rows on shards that are not readable.

        Raises:
            RowsLost: A placement group has lost more shards than parity covers.
        """
        return self._survivors_of(self.of(lane).unreadable)

    def read_from(self, lane: int, shard: int) -> bool:
        """Return whether rows of a lane are read from a shard.

        They are if the shard has all of them and is not avoided.
        """
        return self.readable(lane, shard) and (self.avoided is None or not self._unread(lane)[shard])

    def sources(self, lane: int) -> Survivors:
        """Return what to decode a lane's rows from, for rows on shards that are not read.

        These are the shards for which `read_from` is False. Raises as `survivors` does.
        """
        return self._survivors_of(self._unread(lane))

    def _unread(self, lane: int) -> np.ndarray:
        unreadable = self.of(lane).unreadable
        if self.avoided is None:
            return unreadable
        # Avoiding a slow shard must not cost coverage: it is read after all if its rows cannot be
        # decoded.
        avoiding = unreadable | self.placement.mask([self.avoided])
        return avoiding if self.covered(avoiding) else unreadable

    def without(self, shard: int) -> Survivors:
        """Return what to decode rows from if only this shard is not read. Needs parity."""
        return self._survivors_of(self.placement.mask([shard]))

    def _survivors_of(self, unreadable: np.ndarray) -> Survivors:
        key = unreadable.tobytes()
        survivors = self._survivors.get(key)
        if survivors is None:
            survivors = self._survivors[key] = Survivors.of(self.placement, unreadable)
        return survivors

    def check_covered(self) -> None:
        """Raise RowsLost if a placement group has lost more shards than parity covers."""
        if self.lost:
            self._survivors_of(self.placement.mask(self.lost))

    def covers(self, shard: int) -> bool:
        """Return whether parity covers the loss of one more shard."""
        return self.all_covered([shard])

    def all_covered(self, shards: Collection[int]) -> bool:
        """Return whether parity covers the loss of these shards, too."""
        further, lanes = self.placement.mask(shards), [own.unreadable for own in self._lanes.values()]
        # A shard may be lost as a whole, or only for some lanes, so each lane's own mask counts,
        # too.
        return all(self.covered(mask | further) for mask in (self.placement.mask(self.lost), *lanes))

    def covered(self, unreadable: np.ndarray) -> bool:
        """Return whether parity covers the loss of exactly these shards, bool [shards]."""
        if not self.placement.r:
            return not bool(unreadable.any())
        try:
            self._survivors_of(unreadable)
        except RowsLost:
            return False
        return True

    # Changes, for the thread that uses the table. What others can see of them is published at once.

    def avoid(self, shard: int) -> None:
        """Decode rows instead of reading them from this slow shard, until the placement changes.

        Rows that cannot be decoded are read from it all the same.
        """
        self.avoided = shard

    def forget(self, lane: int) -> None:
        """Drop a lane that this process no longer owns."""
        self._lanes.pop(lane, None)
        self._publish()

    def lose(self, shard: int, why: str) -> None:
        """Count a shard as lost: no lane has anything there."""
        self.lost[shard] = why
        self._rebuilt[shard] = 0.0
        for own in self._lanes.values():
            own.cursors[shard] = own.leftover[shard] = 0
        self._publish()

    def bring_back(self, shard: int) -> None:
        """Count a lost shard as being rebuilt. Its server is empty."""
        del self.lost[shard]
        self._publish()

    def advance(self, lane: int, shard: int, cursor: int | np.uint64) -> None:
        """Set the cursor of a shard for a lane: the shard is live for the stripes below it."""
        self.of(lane).cursors[shard] = cursor
        self._publish()

    def note_rebuilt(self, shard: int, share: float) -> None:
        """Publish the share of a shard that is rebuilt, from 0 to 1."""
        self._rebuilt[shard] = share
        self._publish()

    def place(self, placement: Placement, further: Sequence[StoreUrl] = ()) -> None:
        """Switch to another placement, because a migration begins or has finished.

        When a migration begins, no row of any lane has migrated yet.

        Args:
            further: The URLs of the shards that join.
        """
        self.urls += further
        self.placement = placement
        self._rebuilt |= dict.fromkeys(range(len(self._rebuilt), len(self.urls)), 0.0)
        # What to decode from depends on the placement.
        self._survivors.clear()
        self.avoided = None
        # Removed shards have no rows, so nothing is missing there: they are neither lost nor
        # unreadable.
        for shard in placement.removed:
            self.lost.pop(shard, None)
        for own in self._lanes.values():
            own.extend(len(further))
            own.cursors[list(placement.removed)] = ALL_STRIPES
            own.leftover[list(placement.removed)] = 0
            # The new migration begins where the one before ended, so the cursor starts at 0 again.
            own.places.members, own.places.migrated = placement.table, NOT_MIGRATED
        self.note_migrated(0.0 if placement.migrating else 1.0)

    def note_migrated(self, share: float) -> None:
        """Publish the share that has migrated, from 0 to 1."""
        self._migrated = share
        self._publish()

    def replace_server(self, shard: int, url: StoreUrl) -> None:
        """Set another server for a shard. `lose` and `bring_back` record what the server has."""
        self.urls[shard] = url
        self._publish()
