"""Kernels that compute the rows and parity rows of a lane that each store shard must have.

They select rows, count them, and find those that migrate.
"""

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

# Given as a shard to `_select`: the rows whose groups migrate.
_MIGRATING = -1


@nb.njit(nogil=True, cache=True)
def _select(stripes, table, first, end, shard, whether_written, most, out):  # type: ignore[no-untyped-def]
    """Select rows of stripes [first, end) of a table.

    If `shard` is _MIGRATING, it selects the rows that migrate to another shard. Otherwise it
    selects the rows that this shard must have, where rows are now. If `whether_written` is set,
    only rows that were written count, and the parity rows of stripes with such rows; otherwise all
    rows that may exist. A stripe is selected as a whole or not at all.

    Args:
        most: int64 [shards], how many rows each target may still get. It is counted down.
        out: int64 [4, m], filled with stripe, place, source and target.

    Returns:
        The number of rows, and the stripe after the last.
    """
    members, k = stripes.members, stripes.k
    start, room = stripes.starts[table], stripes.room[table]
    width, count, migrating = members.shape[1], 0, shard == _MIGRATING
    # For rows that migrate both source and target are needed, wherever the lane's cursor is.
    moved = np.uint64(0) if migrating else stripes.migrated
    for stripe in range(first, end):
        group = placement_group(stripe_hash(stripes.prefix, table, stripe), pack(table, stripe), moved)
        begin, before = stripe * k, count
        for place in range(width):
            source = members[group, place]
            target = members[GROUPS + group, place] if migrating else np.int32(shard)
            # Migrating: skip rows that stay. Otherwise: skip rows of other shards.
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
                # The stripe does not fit as a whole: take back its rows, and stop before it.
                for i in range(before, count):
                    most[out[3, i]] += 1
                return before, stripe
            most[target] -= 1
            out[0, count], out[1, count], out[2, count], out[3, count] = stripe, place, source, target
            count += 1
    return count, end


@dataclass(frozen=True, slots=True)
class Selected:
    """Rows and parity rows of one table that were selected.

    Attributes:
        fields: uint64 [n].
        stripe: int64 [n].
        place: int64 [n], the place in the stripe.
        source: int64 [n], the shard where the row is.
        target: int64 [n], the shard where it goes.
        end: The stripe after the last one that was looked at.
        whole: Whether the search has reached the end.
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
        """Return a selection without rows that has reached the end."""
        nothing = np.empty(0, np.int64)
        return cls(0, np.empty(0, np.uint64), nothing, nothing, nothing, nothing, 0, True)

    @property
    def stripe_places(self) -> StripePlaces:
        """The rows by their places in stripes, for decoding."""
        return StripePlaces(np.full(len(self.fields), self.table, np.int16), self.stripe, self.place)


def select_rows(
    stripes: LaneStripes, table: int, first: int, most: int, shards: int, shard: int | None = None, end: int | None = None
) -> Selected:
    """Select the next rows and parity rows of a table that go to store shards, from a stripe on.

    Args:
        first: The stripe to begin with.
        most: The most rows to select for one shard.
        shards: The number of store shards.
        shard: Select what this shard must have. If None, select what migrates to another shard.
        end: The stripe before which to stop; then all rows that may exist are selected. If None,
            the search stops at the end of the table, and only rows that were written are selected.
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
    """The number of rows and parity rows by table and store shard: int64 [tables, shards] each."""

    rows: np.ndarray
    parity_rows: np.ndarray

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(self.rows + other.rows, self.parity_rows + other.parity_rows)

    @property
    def fields(self) -> np.ndarray:
        """The rows and parity rows of all tables together: int64 [shards]."""
        totals: np.ndarray = (self.rows + self.parity_rows).sum(axis=0)
        return totals

    def row_bytes(self, layouts: Sequence[RowLayout]) -> np.ndarray:
        """Return the bytes of the rows and parity rows on each shard, int64 [shards].

        What Redis adds to them is not included.
        """
        widths = np.array([layout.row_bytes for layout in layouts], np.int64)
        sizes: np.ndarray = widths @ (self.rows + self.parity_rows)
        return sizes

    @classmethod
    def none(cls, tables: int, shards: int) -> RowCounts:
        """Return counts of zero."""
        return cls(np.zeros((tables, shards), np.int64), np.zeros((tables, shards), np.int64))


@nb.njit(nogil=True, cache=True)
def _count(stripes, table, count, cursors, rows, parity_rows):  # type: ignore[no-untyped-def]
    """Add the numbers of a table's rows and parity rows on each shard to `rows` and `parity_rows`.

    Both are int64 [shards]. Only ordinals below `count` are included.
    """
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
        # A stripe with any written row has all of its parity rows.
        if exists:
            for place in range(k, members.shape[1]):
                parity_rows[members[group, place]] += name < cursors[members[group, place]]


def count_rows(stripes: LaneStripes, tables: int, shards: int, cursors: np.ndarray | None = None) -> RowCounts:
    """Count what the shards hold of a lane.

    Args:
        tables: The number of tables.
        shards: The number of store shards.
        cursors: uint64 [shards]. A shard has the stripes below its cursor. If None, every shard has
            all stripes.
    """
    counts, written = RowCounts.none(tables, shards), stripes.written
    below = np.full(shards, ALL_STRIPES, np.uint64) if cursors is None else cursors
    for table in range(tables):
        _count(stripes.map, table, int(written.counts[table]), below, counts.rows[table], counts.parity_rows[table])
    return counts
