"""The store shards of a run as one process has them: where each is, which are live for which rows of which lane, and each lane's epoch there.

This is the one home of that. A ShardTable belongs to one thread at a time: to whoever takes lanes over or reads them, and then to the
traffic's thread, which alone changes it from there on. Everybody else looks at `snapshot`, which never changes once it is there.
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
    """The cursor of a shard that is live for all stripes before this one."""
    return table << NUMBER_BITS | stripe


def cursor_place(cursor: int) -> tuple[int, int]:
    """The table and the stripe at which a cursor stands."""
    return cursor >> NUMBER_BITS, cursor & ((1 << NUMBER_BITS) - 1)


@dataclass(slots=True)
class LaneShards:
    """What one lane has on every store shard.

    epochs: the lane's fence epoch there, 0 where none was set. held: how many rows and parity rows its hash has, if that has a marker; None for
    one that is not there. cursors: uint64 [shards], the shard is live for the lane's stripes (by table and number) below its cursor: for all of
    them, none, or those rebuilt so far. migrated: the last chunk of a move that its hash records. places: where the lane's stripes are. leftover:
    int64 [shards], how many rows and parity rows of a shard that all leave have moved away, and are in its hash still.
    """

    epochs: list[int]
    held: list[int | None]
    cursors: np.ndarray
    migrated: list[Migrated | None]
    places: Places
    leftover: np.ndarray

    def readable(self, shard: int) -> bool:
        """Whether a shard has all rows of the lane."""
        return bool(self.cursors[shard] == ALL_STRIPES)

    @property
    def unreadable(self) -> np.ndarray:
        """Which shards have not: bool [shards]."""
        mask: np.ndarray = self.cursors != ALL_STRIPES
        return mask

    def has_all(self, shard: int, rows: int, must: int, keeps: bool) -> bool:
        """Whether a shard has as many rows and parity rows as it must; where it keeps what moved away, there may be more, which is noted."""
        self.leftover[shard] = max(rows - must, 0) if keeps else 0
        return bool(rows == must + self.leftover[shard])

    def extend(self, count: int) -> None:
        """There are so many shards more, of which nothing is known."""
        self.epochs += [0] * count
        self.held += [None] * count
        self.migrated += [None] * count
        self.cursors = np.concatenate([self.cursors, np.full(count, ALL_STRIPES, np.uint64)])
        self.leftover = np.concatenate([self.leftover, np.zeros(count, np.int64)])


class ShardTable:
    """The state of every store shard for the lanes of one owner, or of one reader.

    urls: of the servers, with passwords; placement: of the run. lost: shard -> why. Liveness is asked of a lane (`of`), since a shard may be live
    for one and not, or only in part, for another.
    """

    def __init__(self, urls: Sequence[StoreUrl], placement: Placement) -> None:
        self.urls, self.placement = list(urls), placement
        self.lost: dict[int, str] = {}
        self._lanes: dict[int, LaneShards] = {}
        self._rebuilt = dict.fromkeys(range(len(self.urls)), 0.0)
        self._survivors: dict[bytes, Survivors] = {}
        self._migrated = 1.0  # of no lane there is nothing to move
        self.avoided: int | None = None  # rows are decoded rather than read from there, where they can be: it takes longer
        self._publish()

    # What others see.

    @property
    def snapshot(self) -> ShardSnapshot:
        """How the shards are; any thread may ask."""
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

    # What the thread that it belongs to asks.

    @property
    def lanes(self) -> Iterable[int]:
        """The lanes that it knows."""
        return self._lanes.keys()

    def of(self, lane: int) -> LaneShards:
        """What a lane has on every shard. One that it did not know has no epoch, and nothing on shards that are lost."""
        known = self._lanes.get(lane)
        if known is None:
            count = len(self.urls)
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
        """Whether a shard has all rows of every lane."""
        return shard not in self.lost and all(own.readable(shard) for own in self._lanes.values())

    def readable(self, lane: int, shard: int) -> bool:
        """Whether a shard has all rows of a lane."""
        return self.of(lane).readable(shard)

    def rebuilding(self, lane: int, shard: int) -> bool:
        """Whether a shard is there, but does not have all rows of a lane yet."""
        return shard not in self.lost and not self.readable(lane, shard)

    def survivors(self, lane: int) -> Survivors:
        """From what the lane's rows on shards that are not readable are decoded. Raises RowsLost where some group has lost too many shards."""
        return self._survivors_of(self.of(lane).unreadable)

    def read_from(self, lane: int, shard: int) -> bool:
        """Whether rows of a lane are read from a shard: it has them all, and is not one that is avoided."""
        return self.readable(lane, shard) and (self.avoided is None or not self._unread(lane)[shard])

    def sources(self, lane: int) -> Survivors:
        """From what the lane's rows are decoded that are on shards which they are not read from. Raises as `survivors` does."""
        return self._survivors_of(self._unread(lane))

    def _unread(self, lane: int) -> np.ndarray:
        unreadable = self.of(lane).unreadable
        if self.avoided is None:
            return unreadable
        avoiding = unreadable | self.placement.mask([self.avoided])
        return avoiding if self.covered(avoiding) else unreadable

    def without(self, shard: int) -> Survivors:
        """From what rows are decoded if one shard is not read; all others are. Raises RowsLost without parity."""
        return self._survivors_of(self.placement.mask([shard]))

    def _survivors_of(self, unreadable: np.ndarray) -> Survivors:
        key = unreadable.tobytes()
        survivors = self._survivors.get(key)
        if survivors is None:
            survivors = self._survivors[key] = Survivors.of(self.placement, unreadable)
        return survivors

    def check_covered(self) -> None:
        """Raise RowsLost where more shards of a stripe are lost than parity covers."""
        if self.lost:
            self._survivors_of(self.placement.mask(self.lost))

    def covers(self, shard: int) -> bool:
        """Whether parity covers the loss of one shard more."""
        return self.all_covered([shard])

    def all_covered(self, shards: Collection[int]) -> bool:
        """Whether parity covers the loss of these shards, too."""
        further, lanes = self.placement.mask(shards), [own.unreadable for own in self._lanes.values()]
        return all(self.covered(mask | further) for mask in (self.placement.mask(self.lost), *lanes))

    def covered(self, unreadable: np.ndarray) -> bool:
        """Whether parity covers the loss of these shards, bool [shards]."""
        if not self.placement.r:
            return not bool(unreadable.any())
        try:
            self._survivors_of(unreadable)
        except RowsLost:
            return False
        return True

    # What it changes.

    def avoid(self, shard: int) -> None:
        """Do not read rows from this shard where they can be decoded from others, since it takes longer, until rows move elsewhere."""
        self.avoided = shard

    def forget(self, lane: int) -> None:
        """A lane is no longer this one's."""
        self._lanes.pop(lane, None)
        self._publish()

    def lose(self, shard: int, why: str) -> None:
        """Go on without a shard from now on: no lane has anything there."""
        self.lost[shard] = why
        self._rebuilt[shard] = 0.0
        for own in self._lanes.values():
            own.cursors[shard] = own.leftover[shard] = 0
        self._publish()

    def bring_back(self, shard: int) -> None:
        """A lost shard is there again, empty, and is being rebuilt."""
        del self.lost[shard]
        self._publish()

    def advance(self, lane: int, shard: int, cursor: int | np.uint64) -> None:
        """A shard is live for a lane's stripes below a cursor."""
        self.of(lane).cursors[shard] = cursor
        self._publish()

    def note_rebuilt(self, shard: int, share: float) -> None:
        """How much of a shard is rebuilt, from 0 to 1, for others to see."""
        self._rebuilt[shard] = share
        self._publish()

    def place(self, placement: Placement, further: Sequence[StoreUrl] = ()) -> None:
        """Go by another placement from now on: rows begin to move, of no lane any yet, or all have moved. further: of shards that come in."""
        self.urls += further
        self.placement = placement
        self._rebuilt |= dict.fromkeys(range(len(self._rebuilt), len(self.urls)), 0.0)
        self._survivors.clear()
        self.avoided = None
        for shard in placement.removed:
            self.lost.pop(shard, None)
        for own in self._lanes.values():
            own.extend(len(further))
            own.cursors[list(placement.removed)] = ALL_STRIPES
            own.leftover[list(placement.removed)] = 0
            own.places.members, own.places.migrated = placement.table, NOT_MIGRATED
        self.note_migrated(0.0 if placement.migrating else 1.0)

    def note_migrated(self, share: float) -> None:
        """How much has moved, from 0 to 1, for others to see."""
        self._migrated = share
        self._publish()

    def replace_server(self, shard: int, url: StoreUrl) -> None:
        """Another server is to have a shard from now on; what it has is noted by `lose` and `bring_back`."""
        self.urls[shard] = url
        self._publish()
