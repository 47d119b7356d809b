"""Counting what each store shard holds of a lane, from what was written and where it belongs; nothing is asked of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb
from foreload.cache.parity.places import placement_group, stripe_hash
from foreload.cache.parity.stripes import ALL_STRIPES, LaneStripes
from foreload.cache.rows.fields import pack
from foreload.cache.rows.layout import RowLayout


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
