"""Compiled: the store shard of each stripe's rows, also while placement groups move, and where a write-back batch and its parity rows go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.hashing import key, mix
from foreload.cache.parity.placement import GROUPS, Placement
from foreload.cache.rows.row_bytes import PARITY_BIT, pack

_GROUPS = np.uint64(GROUPS)
NOT_MIGRATED = np.uint64(0)  # the cursor of a move of which nothing has come to pass


@nb.njit(nogil=True, cache=True)
def stripe_hash(prefix, table, stripe):  # type: ignore[no-untyped-def]
    """The hash of a stripe whose remainder is its placement group; prefix: key(lane)."""
    return mix(mix(prefix ^ np.uint64(table)) ^ np.uint64(stripe))


@nb.njit(nogil=True, cache=True)
def placement_group(hashed, name, moved):  # type: ignore[no-untyped-def]
    """The row of a stripe in its lane's table of placement groups: hashed is its `stripe_hash`, name `pack(table, stripe)`; moved as in `Places`."""
    group = hashed % _GROUPS
    return np.int64(group + _GROUPS if name < moved else group)


@dataclass(slots=True)
class Places:
    """Where the stripes of one lane are, at this moment; shared by all that know the lane's stripes.

    members: int32 [4096, k + r], the store shards of each placement group, the first k for rows; where groups move, [8192, k + r], where they are and
    then where they go to. migrated: uint64, the cursor of the move: stripes whose name, `pack(table, stripe)`, lies below it are where they go to.
    """

    members: np.ndarray
    migrated: np.uint64 = NOT_MIGRATED

    @classmethod
    def of(cls, placement: Placement) -> Places:
        """Those of a lane of which nothing has moved yet."""
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
    """The store shard of each row of a lane. table: int16 [n]; ordinal: int64 [n], not negative. Returns int32 [n].

    places: the lane's; None: nothing of it has moved.
    """
    out = np.empty(len(ordinal), np.int32)
    members, moved = (placement.members, NOT_MIGRATED) if places is None else (places.members, places.migrated)
    _shards(np.uint64(key(lane)), table, ordinal, members, moved, placement.k, out)
    return out


ALL_STRIPES = np.uint64(0xFFFFFFFFFFFFFFFF)  # the cursor of a store shard that has them all
_FIRST_ROOM = 1024  # ordinals of a table


@nb.njit(nogil=True, cache=True)
def _most(table, ordinal, most):  # type: ignore[no-untyped-def]
    """Raise most[table] (int64 [tables]) to one more than the highest ordinal of its rows."""
    for i in range(table.size):
        most[table[i]] = max(most[table[i]], ordinal[i] + 1)


@nb.njit(nogil=True, cache=True)
def _note(table, ordinal, flags, starts):  # type: ignore[no-untyped-def]
    for i in range(table.size):
        flags[starts[table[i]] + ordinal[i]] = 1


@dataclass(slots=True)
class Written:
    """Which rows of a lane were ever written: what is not there is absent from the store by right, and counts as zeros.

    Made from counts (int64 [tables], all ordinals below which were written; later one more than the highest that was) and k, the rows of a
    stripe. flags: uint8, 1 for each written row, at starts[table] + ordinal; room: how many ordinals of each table have a place there, always
    whole stripes. starts, room: int64 [tables].
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
        self.starts = np.concatenate([[0], np.cumsum(self.room)[:-1]]).astype(np.int64)
        self.flags = np.zeros(int(self.room.sum()), np.uint8)

    def reserve(self, table: np.ndarray, ordinal: np.ndarray) -> None:
        """Have room for these rows (table int16 [n], ordinal int64 [n]) and for all members of their stripes."""
        most = self.counts.copy()
        _most(table, ordinal, most)
        most = -(-most // self.k) * self.k
        if (most <= self.room).all():
            return
        flags, starts, room = self.flags, self.starts, self.room
        self.room = np.where(most > room, 2 * most, room)
        self._lay_out()
        for own, start, other, count in zip(self.starts, starts, self.room, room, strict=True):
            self.flags[own : own + min(count, other)] = flags[start : start + min(count, other)]

    def note(self, table: np.ndarray, ordinal: np.ndarray) -> None:
        """These rows are written from now on; `reserve` made room for them."""
        _most(table, ordinal, self.counts)
        _note(table, ordinal, self.flags, self.starts)

    def forget(self, table: np.ndarray, ordinal: np.ndarray) -> None:
        """These rows, of ordinals below the counts, were never written."""
        self.flags[self.starts[table] + ordinal] = 0

    def has(self, table: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
        """Whether rows were ever written: bool [n]; any ordinal may be asked for."""
        written: np.ndarray = ordinal < self.counts[table]
        written[written] = self.flags[self.starts[table[written]] + ordinal[written]] == 1
        return written


class StripeMap(NamedTuple):
    """What kernels know of a lane's stripes: where they are, and which of their rows were written.

    prefix: uint64, what the lane's hashes begin with; members, migrated: of `Places`; flags uint8, starts and room int64 [tables]: of `Written`.
    """

    prefix: np.uint64
    members: np.ndarray
    migrated: np.uint64
    k: int
    flags: np.ndarray
    starts: np.ndarray
    room: np.ndarray


class BatchRows(NamedTuple):
    """Rows of a batch: table int16 [n], ordinal int64 [n]."""

    table: np.ndarray
    ordinal: np.ndarray


@nb.njit(nogil=True, cache=True)
def _room_for(stripes, batch, places, first, limit, rows, parities):  # type: ignore[no-untyped-def]
    """How many of places[first:] fit beside what rows and parities (int64 [shards]) count, so that none passes the limit."""
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
            # Counted as if no two rows shared a stripe: never fewer parity rows than the batch will have.
            if parities[members[group, j]] == limit:
                return i - first
        rows[shard] += 1
        for j in range(k, width):
            parities[members[group, j]] += 1
    return places.size - first


class Arrangement(NamedTuple):
    """Where the n rows of a batch, and the parity rows of their stripes (the *entries*), go. Both are put in the order of the store shards.

    Of rows as they came: position: int64 [n], the place among the rows by shard; stripe_of: int64 [n], which of the batch's stripes; member:
    uint8 [n], which row of that. Of rows by shard: row_fields: uint64 [n]; row_starts: int64 [shards + 2], where each shard's begin, those of no
    live shard last; updates: bool [n], whether the row's stripe is updated.
    Of stripes, in order of first occurrence: group_of: int64 [stripes], the placement group; entry_of: int64 [stripes, r], the entry of each
    parity row, -1 where its shard is not live. Of entries by shard: entry_fields: uint64 [entries]; entry_starts: int64 [2 * shards + 1], where
    shard s's entries that are updated begin (at 2 s), and those that are made anew (at 2 s + 1): a stripe all of whose stored rows are in the
    batch needs no parity row read.
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
        """Where a shard's rows lie."""
        return slice(int(self.row_starts[shard]), int(self.row_starts[shard + 1]))

    def updated_of(self, shard: int) -> slice:
        """Entries of a shard that are updated, and so read first."""
        return slice(int(self.entry_starts[2 * shard]), int(self.entry_starts[2 * shard + 1]))

    def entries_of(self, shard: int) -> slice:
        """All entries of a shard."""
        return slice(int(self.entry_starts[2 * shard]), int(self.entry_starts[2 * shard + 2]))


class _BatchStripes(NamedTuple):
    """The stripes of a batch, in order of first occurrence, and what is known of its rows in them.

    name: uint64 [stripes], table and number; group: int64 [stripes], of the placement; others: int64 [stripes], rows that the store has and
    the batch has not. Of the rows as they came: stripe_of int64 [n]; member uint8 [n]; shard_of int64 [n], where a row goes, the number of shards
    for one whose shard is not live.
    """

    name: np.ndarray
    group: np.ndarray
    others: np.ndarray
    stripe_of: np.ndarray
    member: np.ndarray
    shard_of: np.ndarray


@nb.njit(nogil=True, cache=True)
def _stripes_of(stripes, batch, cursors):  # type: ignore[no-untyped-def]
    """Find the stripes of a batch, whose rows are distinct, by an open-addressed table of at least 2 n places.

    Afterwards a stripe's `others` is how many of its rows are flagged as written less those among them that are in the batch: 0 where the batch has
    all that is stored of it, so that its parity follows from the new values alone.
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
        shard = members[group, member[i]]
        shard_of[i] = shard if name < cursors[shard] else shards
    return _BatchStripes(names[:count], group_of[:count], others[:count], stripe_of, member, shard_of)


@nb.njit(nogil=True, cache=True)
def _arrange(stripes, batch, cursors):  # type: ignore[no-untyped-def]
    """Where the rows of a batch, and the parity rows of their stripes, go: two counting sorts by shard, neither of which moves a row itself.

    Before: every row's stripe is batch_stripes, and `flags` says of each member whether it is stored (`LaneStripes.arrange` made room for them).
    Afterwards rows stand by shard in the order in which they came, those for no live shard last; parity rows stand by shard, in each first those
    that must be read and updated, then those that are made from the batch alone; a parity row whose shard is not live has no place (-1).
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
    """How many rows and parity rows of a batch were never written before, by the store shard where they belong: int64 [shards] each.

    rows, parity_rows: on shards that are live for them; all_rows, all_parity_rows: on all.
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
    """The stripes of one lane: where they are, which rows were written, and the arrangement of batches. k: rows of a stripe."""

    lane: int
    k: int
    places: Places
    written: Written

    @classmethod
    def of(cls, placement: Placement, lane: int, written: np.ndarray) -> LaneStripes:
        """Those of a lane of which nothing has moved. written: int64 [tables], all ordinals below which the store has."""
        return cls(lane, placement.k, Places.of(placement), Written(written, placement.k))

    @property
    def members(self) -> np.ndarray:
        """The placement groups, as in `Places`."""
        return self.places.members

    @property
    def prefix(self) -> np.uint64:
        """What the lane's hashes begin with."""
        return np.uint64(key(self.lane))

    @property
    def map(self) -> StripeMap:
        """The same for kernels, as it is now: `written` may get other arrays when it grows."""
        written = self.written
        places = self.places
        return StripeMap(self.prefix, places.members, places.migrated, self.k, written.flags, written.starts, written.room)

    def arrange(self, table: np.ndarray, ordinal: np.ndarray, cursors: np.ndarray) -> Arrangement:
        """Arrange a batch. table int16 [n], ordinal int64 [n]; cursors: uint64 [shards], a shard is live for stripes below its cursor."""
        self.written.reserve(table, ordinal)
        arrangement: Arrangement = _arrange(self.map, BatchRows(table, ordinal), cursors)
        return arrangement

    def fresh(self, placed: Arrangement, stored: np.ndarray, shards: int) -> Fresh:
        """What of an arranged batch the store has not. stored: bool [n], of the rows as they came, whether they were written before."""
        # A stripe has parity rows already if a row of the batch was written before, or if it is updated, for then it has written rows besides.
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
        """How many of the rows at places[first:] fit into a batch, of which counts are the rows and parity rows so far (int64 [shards] each).

        No shard gets more than `limit` of either; the counts go up by those that fit.
        """
        return int(_room_for(self.map, BatchRows(table, ordinal), places, first, limit, *counts))

    def shards(self, table: int, stripe: np.ndarray) -> np.ndarray:
        """The store shards of stripes (int64 [n]) of a table, members first: int32 [n, k + r]."""
        group = np.empty(len(stripe), np.int64)
        _groups(self.prefix, table, stripe, self.places.migrated, group)
        return self.members[group]
