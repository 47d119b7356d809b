"""Kernels that place the rows of a lane: the store shard of each row, also while groups migrate.

They also arrange write-back batches: on which shards the rows of a batch and their parity rows go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.hashing import key, mix
from foreload.cache.parity.placement import GROUPS, Placement
from foreload.cache.rows.row_bytes import PARITY_BIT, pack

_GROUPS = np.uint64(GROUPS)
# The cursor of a migration that has not migrated any stripe.
NOT_MIGRATED = np.uint64(0)


@nb.njit(nogil=True, cache=True)
def stripe_hash(prefix, table, stripe):  # type: ignore[no-untyped-def]
    """Return the hash of a stripe. Its remainder modulo GROUPS is the placement group.

    `prefix` is key(lane).
    """
    return mix(mix(prefix ^ np.uint64(table)) ^ np.uint64(stripe))


@nb.njit(nogil=True, cache=True)
def placement_group(hashed, name, moved):  # type: ignore[no-untyped-def]
    """Return the row of a stripe in its lane's table of placement groups.

    `hashed` is the stripe's `stripe_hash`, `name` is `pack(table, stripe)`, and `moved` is the
    cursor `migrated` of `Places`.
    """
    group = hashed % _GROUPS
    return np.int64(group + _GROUPS if name < moved else group)


@dataclass(slots=True)
class Places:
    """Where the stripes of one lane are now. All objects that know the lane's stripes share it.

    Attributes:
        members: int32 [4096, k + r], the store shards of each placement group, the first k for
            rows. While groups migrate, [8192, k + r]: where they are, then where they go.
        migrated: uint64, the cursor of the migration. Stripes whose name, `pack(table, stripe)`, is
            below it are where they go.
    """

    members: np.ndarray
    migrated: np.uint64 = NOT_MIGRATED

    @classmethod
    def of(cls, placement: Placement) -> Places:
        """Return the places of a lane before any of its stripes has migrated."""
        return cls(placement.table)


@nb.njit(nogil=True, cache=True)
def _shards(lane_prefix, table, ordinal, members, moved, k, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        stripe = ordinal[i] // k
        group = placement_group(stripe_hash(lane_prefix, table[i], stripe), pack(table[i], stripe), moved)
        out[i] = members[group, ordinal[i] - stripe * k]


def shards_of(
    placement: Placement, lane: int, table: np.ndarray, ordinal: np.ndarray, places: Places | None = None
) -> np.ndarray:
    """Return the store shard of each row of a lane.

    Args:
        table: int16 [n].
        ordinal: int64 [n], not negative.
        places: The lane's places. If None, no stripe of the lane has migrated.

    Returns:
        int32 [n].
    """
    out = np.empty(len(ordinal), np.int32)
    members, moved = (placement.members, NOT_MIGRATED) if places is None else (places.members, places.migrated)
    _shards(np.uint64(key(lane)), table, ordinal, members, moved, placement.k, out)
    return out


# The cursor of a store shard that has all stripes.
ALL_STRIPES = np.uint64(0xFFFFFFFFFFFFFFFF)
# The ordinals of a table for which there is room at first.
_FIRST_ROOM = 1024


@nb.njit(nogil=True, cache=True)
def _most(table, ordinal, most):  # type: ignore[no-untyped-def]
    """Raise most[table] to one more than the highest ordinal of the table's rows.

    `most` is int64 [tables].
    """
    for i in range(table.size):
        most[table[i]] = max(most[table[i]], ordinal[i] + 1)


@nb.njit(nogil=True, cache=True)
def _note(table, ordinal, flags, starts):  # type: ignore[no-untyped-def]
    for i in range(table.size):
        flags[starts[table[i]] + ordinal[i]] = 1


@dataclass(slots=True)
class Written:
    """Which rows of a lane were ever written.

    Any other row is absent from the store by right, and counts as zeros.

    Attributes:
        counts: int64 [tables]. At the start, all ordinals below it were written. Later it is one
            more than the highest ordinal that was.
        k: The number of rows in a stripe.
        flags: uint8, 1 for each written row, at starts[table] + ordinal.
        starts: int64 [tables], where each table begins in `flags`.
        room: int64 [tables], for how many ordinals of each table `flags` has room. Always whole
            stripes.
    """

    counts: np.ndarray
    k: int
    flags: np.ndarray = field(init=False)
    starts: np.ndarray = field(init=False)
    room: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.counts = self.counts.astype(np.int64)
        self.room = -(-np.maximum(_FIRST_ROOM, self.counts) // self.k) * self.k
        self._lay_out()
        for start, count in zip(self.starts, self.counts, strict=True):
            self.flags[start : start + count] = 1

    def _lay_out(self) -> None:
        self.starts = np.cumsum(self.room) - self.room
        self.flags = np.zeros(int(self.room.sum()), np.uint8)

    def reserve(self, table: np.ndarray, ordinal: np.ndarray) -> None:
        """Make room for these rows and for all members of their stripes.

        Args:
            table: int16 [n].
            ordinal: int64 [n].
        """
        most = self.counts.copy()
        _most(table, ordinal, most)
        most = -(-most // self.k) * self.k
        if (most <= self.room).all():
            return
        flags, starts, room = self.flags, self.starts, self.room
        # Doubling keeps the cost of copying low, however often rows are added.
        self.room = np.where(most > room, 2 * most, room)
        self._lay_out()
        for own, start, other, count in zip(self.starts, starts, self.room, room, strict=True):
            self.flags[own : own + min(count, other)] = flags[start : start + min(count, other)]

    def note(self, table: np.ndarray, ordinal: np.ndarray) -> None:
        """Record that these rows are written. `reserve` must have made room for them."""
        _most(table, ordinal, self.counts)
        _note(table, ordinal, self.flags, self.starts)

    def forget(self, table: np.ndarray, ordinal: np.ndarray) -> None:
        """Record that these rows were never written. Their ordinals must be below the counts."""
        self.flags[self.starts[table] + ordinal] = 0

    def has(self, table: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
        """Return whether rows were ever written: bool [n]. Any ordinal is allowed."""
        written: np.ndarray = ordinal < self.counts[table]
        written[written] = self.flags[self.starts[table[written]] + ordinal[written]] == 1
        return written


class StripeMap(NamedTuple):
    """What kernels need to know of a lane's stripes: where they are, and which rows were written.

    Attributes:
        prefix: uint64, the start of the lane's stripe hashes.
        members: As in `Places`.
        migrated: As in `Places`.
        k: The number of rows in a stripe.
        flags: uint8, as in `Written`.
        starts: int64 [tables], as in `Written`.
        room: int64 [tables], as in `Written`.
    """

    prefix: np.uint64
    members: np.ndarray
    migrated: np.uint64
    k: int
    flags: np.ndarray
    starts: np.ndarray
    room: np.ndarray


class BatchRows(NamedTuple):
    """The rows of a batch: table int16 [n], ordinal int64 [n]."""

    table: np.ndarray
    ordinal: np.ndarray


@nb.njit(nogil=True, cache=True)
def _room_for(stripes, batch, places, first, limit, rows, parities):  # type: ignore[no-untyped-def]
    """Count how many of places[first:] can be added to a batch before a shard exceeds the limit.

    `rows` and `parities` (int64 [shards] each) count what the batch has on each shard so far. The
    rows that fit are added to them.
    """
    members, k = stripes.members, stripes.k
    width = members.shape[1]
    for i in range(first, places.size):
        at = places[i]
        stripe = batch.ordinal[at] // k
        name = pack(batch.table[at], stripe)
        group = placement_group(stripe_hash(stripes.prefix, batch.table[at], stripe), name, stripes.migrated)
        shard = members[group, batch.ordinal[at] - stripe * k]
        if rows[shard] == limit:
            return i - first
        for j in range(k, width):
            # Parity rows are counted as if no two rows shared a stripe. So the batch never has more
            # parity rows than counted.
            if parities[members[group, j]] == limit:
                return i - first
        rows[shard] += 1
        for j in range(k, width):
            parities[members[group, j]] += 1
    return places.size - first


class Arrangement(NamedTuple):
    """Where the rows of a batch, and the parity rows of their stripes (the *entries*), go.

    Rows and entries are each sorted by store shard. n is the number of rows.

    Attributes:
        position: int64 [n], for each row in its original order, its place among the rows by shard.
        row_fields: uint64 [n], for each row by shard.
        row_starts: int64 [shards + 2], where each shard's rows begin. Rows whose shard is not live
            come last.
        stripe_of: int64 [n], for each row in its original order, its stripe among those of the
            batch.
        member: uint8 [n], for each row in its original order, its place in the stripe.
        entry_of: int64 [stripes, r], the entry of each parity row, or -1 if its shard is not live.
            Stripes are in order of first occurrence.
        entry_fields: uint64 [entries], for each entry by shard.
        entry_starts: int64 [2 * shards + 1]. Shard s's entries to update begin at entry_starts[2
            s], and those to make anew at entry_starts[2 s + 1]. If all stored rows of a stripe are
            in the batch, its parity rows are made anew, and none is read.
        updates: bool [n], for each row by shard, whether the parity of its stripe is updated.
        group_of: int64 [stripes], the placement group of each stripe.
    """

    position: np.ndarray
    row_fields: np.ndarray
    row_starts: np.ndarray
    stripe_of: np.ndarray
    member: np.ndarray
    entry_of: np.ndarray
    entry_fields: np.ndarray
    entry_starts: np.ndarray
    updates: np.ndarray
    group_of: np.ndarray

    def rows_of(self, shard: int) -> slice:
        """Return where a shard's rows are."""
        return slice(int(self.row_starts[shard]), int(self.row_starts[shard + 1]))

    def updated_of(self, shard: int) -> slice:
        """Return where a shard's entries are that are updated, and so must be read first."""
        return slice(int(self.entry_starts[2 * shard]), int(self.entry_starts[2 * shard + 1]))

    def entries_of(self, shard: int) -> slice:
        """Return where all entries of a shard are."""
        return slice(int(self.entry_starts[2 * shard]), int(self.entry_starts[2 * shard + 2]))


class _BatchStripes(NamedTuple):
    """The stripes of a batch, in order of first occurrence, and where its rows are in them.

    Attributes:
        name: uint64 [stripes], table and number.
        group: int64 [stripes], the placement group.
        others: int64 [stripes], how many rows the store has that are not in the batch.
        stripe_of: int64 [n], for each row in its original order.
        member: uint8 [n], for each row in its original order.
        shard_of: int64 [n], the shard that each row goes to. If that is not live, the number of
            shards.
    """

    name: np.ndarray
    group: np.ndarray
    others: np.ndarray
    stripe_of: np.ndarray
    member: np.ndarray
    shard_of: np.ndarray


@nb.njit(nogil=True, cache=True)
def _stripes_of(stripes, batch, cursors):  # type: ignore[no-untyped-def]
    """Find the stripes of a batch. The batch's rows must be distinct.

    Uses an open-addressed table with at least 2 n places. Afterwards a stripe's `others` is the
    number of its rows that are flagged as written, minus those of them that are in the batch. If it
    is 0, the batch has every stored row of the stripe, so the parity follows from the new values
    alone.
    """
    table, ordinal, members, k = batch.table, batch.ordinal, stripes.members, stripes.k
    n, shards, r = table.size, cursors.size, members.shape[1] - k
    size = 16
    while size < 2 * n:
        size *= 2
    heads = np.full(size, -1, np.int64)
    stripe_of, member, shard_of = np.empty(n, np.int64), np.empty(n, np.uint8), np.empty(n, np.int64)
    names, group_of = np.empty(n, np.uint64), np.empty(n, np.int64)
    others = np.zeros(n, np.int64)
    count = 0
    for i in range(n):
        stripe = ordinal[i] // k
        hashed = stripe_hash(stripes.prefix, table[i], stripe)
        name = pack(table[i], stripe)
        group = placement_group(hashed, name, stripes.migrated)
        # Linear probing. At most half of the places are ever taken, so the search ends.
        at = np.int64(hashed >> np.uint64(20)) & (size - 1)
        while heads[at] >= 0 and names[heads[at]] != name:
            at = (at + 1) & (size - 1)
        if heads[at] < 0:
            heads[at] = count
            names[count] = name
            group_of[count] = group
            if r > 0:
                begin = stripes.starts[table[i]] + stripe * k
                for j in range(begin, begin + k):
                    others[count] += stripes.flags[j]
            count += 1
        if r > 0:
            others[heads[at]] -= stripes.flags[stripes.starts[table[i]] + ordinal[i]]
        stripe_of[i] = heads[at]
        member[i] = ordinal[i] - stripe * k
        # A shard is live for the stripe if the stripe is below its cursor.
        shard = members[group, member[i]]
        shard_of[i] = shard if name < cursors[shard] else shards
    return _BatchStripes(names[:count], group_of[:count], others[:count], stripe_of, member, shard_of)


@nb.njit(nogil=True, cache=True)
def _arrange(stripes, batch, cursors):  # type: ignore[no-untyped-def]
    """Arrange a batch by two counting sorts by shard, neither of which moves a row itself.

    Before: `stripes.flags` says of each member of the batch's stripes whether it is stored
    (`LaneStripes.arrange` has made room for them). Afterwards rows are sorted by shard, in their
    original order within a shard, and rows whose shard is not live come last. Entries are sorted by
    shard, and within a shard those that must be read and updated come before those that are made
    from the batch alone. An entry whose shard is not live has no place (-1).
    """
    batch_stripes = _stripes_of(stripes, batch, cursors)
    members, k = stripes.members, stripes.k
    n, shards, r, count = batch.table.size, cursors.size, members.shape[1] - k, batch_stripes.name.size
    row_starts = np.zeros(shards + 2, np.int64)
    for i in range(n):
        row_starts[batch_stripes.shard_of[i] + 1] += 1
    for shard in range(shards + 1):
        row_starts[shard + 1] += row_starts[shard]
    position, next_rows = np.empty(n, np.int64), row_starts.copy()
    row_fields, updates = np.empty(n, np.uint64), np.empty(n, np.bool_)
    for i in range(n):
        position[i] = next_rows[batch_stripes.shard_of[i]]
        next_rows[batch_stripes.shard_of[i]] += 1
        row_fields[position[i]] = pack(batch.table[i], batch.ordinal[i])
        updates[position[i]] = batch_stripes.others[batch_stripes.stripe_of[i]] > 0
    # Two buckets per shard: entries to update, then entries to make anew.
    entry_starts = np.zeros(2 * shards + 1, np.int64)
    for t in range(count):
        for j in range(r):
            shard = members[batch_stripes.group[t], k + j]
            if batch_stripes.name[t] < cursors[shard]:
                entry_starts[2 * shard + (batch_stripes.others[t] == 0) + 1] += 1
    for bucket in range(2 * shards):
        entry_starts[bucket + 1] += entry_starts[bucket]
    entry_of, next_entries = np.full((count, r), -1, np.int64), entry_starts.copy()
    entry_fields = np.empty(entry_starts[2 * shards], np.uint64)
    for t in range(count):
        for j in range(r):
            shard = members[batch_stripes.group[t], k + j]
            if batch_stripes.name[t] < cursors[shard]:
                bucket = 2 * shard + (batch_stripes.others[t] == 0)
                entry_of[t, j] = next_entries[bucket]
                entry_fields[next_entries[bucket]] = batch_stripes.name[t] | PARITY_BIT
                next_entries[bucket] += 1
    return Arrangement(
        position,
        row_fields,
        row_starts,
        batch_stripes.stripe_of,
        batch_stripes.member,
        entry_of,
        entry_fields,
        entry_starts,
        updates,
        batch_stripes.group,
    )


@dataclass(frozen=True, slots=True)
class Fresh:
    """How many rows and parity rows of a batch were never written before: int64 [shards] each.

    Rows are counted on the shard where they belong.

    Attributes:
        rows: Rows on shards that are live for them.
        parity_rows: Parity rows on shards that are live for them.
        all_rows: Rows on all shards.
        all_parity_rows: Parity rows on all shards.
    """

    rows: np.ndarray
    parity_rows: np.ndarray
    all_rows: np.ndarray
    all_parity_rows: np.ndarray


@nb.njit(nogil=True, cache=True)
def _groups(prefix, table, stripe, moved, out):  # type: ignore[no-untyped-def]
    for i in range(stripe.size):
        out[i] = placement_group(stripe_hash(prefix, table, stripe[i]), pack(table, stripe[i]), moved)


@dataclass(slots=True)
class LaneStripes:
    """The stripes of one lane: where they are, and which of their rows were written.

    Attributes:
        k: The number of rows in a stripe.
    """

    lane: int
    k: int
    places: Places
    written: Written

    @classmethod
    def of(cls, placement: Placement, lane: int, written: np.ndarray) -> LaneStripes:
        """Return the stripes of a lane before any of them has migrated.

        Args:
            written: int64 [tables], all ordinals below which the store has.
        """
        return cls(lane, placement.k, Places.of(placement), Written(written, placement.k))

    @property
    def members(self) -> np.ndarray:
        """The placement groups, as in `Places`."""
        return self.places.members

    @property
    def prefix(self) -> np.uint64:
        """The start of the lane's stripe hashes."""
        return np.uint64(key(self.lane))

    @property
    def map(self) -> StripeMap:
        """The stripes for kernels, as they are now.

        `written` may replace its arrays when it grows, so a map must not be kept.
        """
        written = self.written
        places = self.places
        return StripeMap(self.prefix, places.members, places.migrated, self.k, written.flags, written.starts, written.room)

    def arrange(self, table: np.ndarray, ordinal: np.ndarray, cursors: np.ndarray) -> Arrangement:
        """Arrange a batch.

        Args:
            table: int16 [n].
            ordinal: int64 [n].
            cursors: uint64 [shards]. A shard is live for the stripes below its cursor.
        """
        self.written.reserve(table, ordinal)
        arrangement: Arrangement = _arrange(self.map, BatchRows(table, ordinal), cursors)
        return arrangement

    def fresh(self, placed: Arrangement, stored: np.ndarray, shards: int) -> Fresh:
        """Count the rows and parity rows of an arranged batch that the store does not have.

        Args:
            stored: bool [n], for each row in its original order, whether it was written before.
            shards: The number of store shards.
        """
        # A stripe already has parity rows if a row of the batch was written before, or if the
        # stripe is updated, for then it has other written rows.
        home = self.members[placed.group_of[placed.stripe_of], placed.member]
        live = placed.position < placed.row_starts[shards]
        before = np.zeros(len(placed.group_of), bool)
        before[placed.stripe_of[stored | placed.updates[placed.position]]] = True
        parity_home, parity_live = self.members[placed.group_of[~before], self.k :], placed.entry_of[~before] >= 0
        of = (home[~stored & live], parity_home[parity_live], home[~stored], parity_home.reshape(-1))
        return Fresh(*(np.bincount(one, minlength=shards) for one in of))

    def room_for(
        self,
        table: np.ndarray,
        ordinal: np.ndarray,
        places: np.ndarray,
        first: int,
        limit: int,
        counts: tuple[np.ndarray, np.ndarray],
    ) -> int:
        """Count how many of the rows at places[first:] can be added to a batch.

        Args:
            table: int16, of the rows that `places` names.
            ordinal: int64, like `table`.
            places: int64, the rows that may be added, in this order.
            limit: The most rows, and the most parity rows, of the batch on one shard.
            counts: The batch's rows and parity rows so far, int64 [shards] each. Those of the rows
                that fit are added to them.
        """
        return int(_room_for(self.map, BatchRows(table, ordinal), places, first, limit, *counts))

    def shards(self, table: int, stripe: np.ndarray) -> np.ndarray:
        """Return the store shards of stripes of a table, members first: int32 [n, k + r].

        Args:
            stripe: int64 [n].
        """
        group = np.empty(len(stripe), np.int64)
        _groups(self.prefix, table, stripe, self.places.migrated, group)
        return self.members[group]
