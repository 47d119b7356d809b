"""Compiled: the rows and parity rows of a lane that each store shard must have: which they are, how many, and which of them move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb
from foreload.cache.parity.decoding import StripePlaces
from foreload.cache.parity.placement import GROUPS
from foreload.cache.parity.stripes import ALL_STRIPES, LaneStripes, placement_group, stripe_hash
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import PARITY_BIT, fields, pack

_MIGRATING = -1  # in the place of a shard: rows whose groups move


@nb.njit(nogil=True, cache=True)
def _select(stripes, table, first, end, shard, whether_written, most, out):  # type: ignore[no-untyped-def]
    """Rows of stripes [first, end) of a table: (how many, the stripe after the last). out: int64 [4, m]: stripe, place, source, target.

    shard: select what it must have where rows are now; or _MIGRATING. A stripe is taken whole or not at all; no shard gets more than `most`
    (int64 [shards], counted down). whether_written: only rows that were written, and the parity rows of stripes that have such; else all that
    there may be.
    """
    members, k = stripes.members, stripes.k
    start, room = stripes.starts[table], stripes.room[table]
    width, count, migrating = members.shape[1], 0, shard == _MIGRATING
    # Of rows that move both places are wanted, wherever the lane's cursor stands.
    moved = np.uint64(0) if migrating else stripes.migrated
    for stripe in range(first, end):
        group = placement_group(stripe_hash(stripes.prefix, table, stripe), pack(table, stripe), moved)
        begin, before = stripe * k, count
        for place in range(width):
            source = members[group, place]
            target = members[GROUPS + group, place] if migrating else np.int32(shard)
            if (source == target) == migrating:
                continue
            if whether_written:
                low, high = (begin + place, begin + place + 1) if place < k else (begin, begin + k)
                there = False
                for j in range(low, min(high, room)):
                    there |= stripes.flags[start + j] == 1
                if not there:
                    continue
            if most[target] == 0 or count == out.shape[1]:
                for i in range(before, count):
                    most[out[3, i]] += 1
                return before, stripe
            most[target] -= 1
            out[0, count], out[1, count], out[2, count], out[3, count] = stripe, place, source, target
            count += 1
    return count, end


@dataclass(frozen=True, slots=True)
class Selected:
    """Rows and parity rows of one table, each with its field (uint64 [n]), stripe and place in that, source and target shard (int64 [n]).

    end: the stripe after the last that was looked at; whole: whether that is the table's end.
    """

    table: int
    fields: np.ndarray
    stripe: np.ndarray
    place: np.ndarray
    source: np.ndarray
    target: np.ndarray
    end: int
    whole: bool

    @classmethod
    def none(cls) -> Selected:
        """No rows of a table that ends."""
        nothing = np.empty(0, np.int64)
        return cls(0, np.empty(0, np.uint64), nothing, nothing, nothing, nothing, 0, True)

    @property
    def stripe_places(self) -> StripePlaces:
        """The same for what decodes them."""
        return StripePlaces(np.full(len(self.fields), self.table, np.int16), self.stripe, self.place)


def select_rows(
    stripes: LaneStripes, table: int, first: int, most: int, shards: int, shard: int | None = None, end: int | None = None
) -> Selected:
    """Return the next rows and parity rows of a table that go to store shards, of stripes from `first` on, at most `most` to a shard.

    Args:
        shards: how many store shards there are.
        shard: select what this shard must have. If None, select what moves to another shard.
        end: the stripe before which to stop; then all rows that there may be are selected. If None, the search stops at the end of the table, and
            only rows that were written are selected.
    """
    stop = -(-int(stripes.written.counts[table]) // stripes.k)
    last = stop if end is None else min(end, stop)
    targets = shards if shard is None else 1
    room = np.full(shards, most, np.int64)
    out = np.empty((4, min(most * targets, max(last - first, 0) * stripes.members.shape[1])), np.int64)
    count, after = _select(stripes.map, table, first, last, _MIGRATING if shard is None else shard, end is None, room, out)
    stripe, place, source, target = out[:, :count]
    is_row = place < stripes.k
    packed = fields(table, np.where(is_row, stripe * stripes.k + place, stripe))
    names = np.where(is_row, packed, packed | PARITY_BIT)
    return Selected(table, names, stripe, place, source, target, int(after), int(after) >= last)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows and parity rows by table and store shard: int64 [tables, shards] each."""

    rows: np.ndarray
    parity_rows: np.ndarray

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(self.rows + other.rows, self.parity_rows + other.parity_rows)

    @property
    def fields(self) -> np.ndarray:
        """Rows and parity rows of all tables together: int64 [shards]."""
        totals: np.ndarray = (self.rows + self.parity_rows).sum(axis=0)
        return totals

    def row_bytes(self, layouts: Sequence[RowLayout]) -> np.ndarray:
        """Bytes of the rows and parity rows on each shard, without what Redis adds: int64 [shards]."""
        widths = np.array([layout.row_bytes for layout in layouts], np.int64)
        sizes: np.ndarray = widths @ (self.rows + self.parity_rows)
        return sizes

    @classmethod
    def none(cls, tables: int, shards: int) -> RowCounts:
        """Nothing at all."""
        return cls(np.zeros((tables, shards), np.int64), np.zeros((tables, shards), np.int64))


@nb.njit(nogil=True, cache=True)
def _count(stripes, table, count, cursors, rows, parity_rows):  # type: ignore[no-untyped-def]
    """Add one table's rows (ordinals below count) and parity rows to rows and parity_rows, int64 [shards] each."""
    members, k, start = stripes.members, stripes.k, stripes.starts[table]
    for stripe in range((count + k - 1) // k):
        name = pack(table, stripe)
        group = placement_group(stripe_hash(stripes.prefix, table, stripe), name, stripes.migrated)
        exists = False
        for place in range(k):
            ordinal = stripe * k + place
            if ordinal < count and stripes.flags[start + ordinal]:
                exists = True
                rows[members[group, place]] += name < cursors[members[group, place]]
        if exists:
            for place in range(k, members.shape[1]):
                parity_rows[members[group, place]] += name < cursors[members[group, place]]


def count_rows(stripes: LaneStripes, tables: int, shards: int, cursors: np.ndarray | None = None) -> RowCounts:
    """What the shards hold of a lane. cursors: uint64 [shards], a shard has the stripes below its cursor; None: all have all."""
    counts, written = RowCounts.none(tables, shards), stripes.written
    below = np.full(shards, ALL_STRIPES, np.uint64) if cursors is None else cursors
    for table in range(tables):
        _count(stripes.map, table, int(written.counts[table]), below, counts.rows[table], counts.parity_rows[table])
    return counts
