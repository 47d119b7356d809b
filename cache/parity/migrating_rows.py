"""Compiled: which rows and parity rows of a lane go to other store shards where placement groups move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb
from foreload.cache.parity.limits import GROUPS
from foreload.cache.parity.places import placement_group, stripe_hash
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.rows.fields import PARITY_BIT, fields, pack


@nb.njit(nogil=True, cache=True)
def _migrating(stripes, table, first, end, whether_written, most, out):  # type: ignore[no-untyped-def]
    """Those of stripes [first, end) of a table: (how many, the stripe after the last). out: int64 [4, m]: stripe, place, source, target.

    A stripe is taken whole or not at all; no shard gets more than `most` (int64 [shards], counted down). whether_written: only rows that were
    written, and the parity rows of stripes that have such; else all that there may be.
    """
    members, k = stripes.members, stripes.k
    start, room = stripes.starts[table], stripes.room[table]
    width, count = members.shape[1], 0
    for stripe in range(first, end):
        # Not by the cursor: both places are wanted, wherever it stands.
        group = placement_group(stripe_hash(stripes.prefix, table, stripe), pack(table, stripe), np.uint64(0))
        begin = stripe * k
        exists = False
        for j in range(begin, min(begin + k, room)):
            exists |= stripes.flags[start + j] == 1
        if whether_written and not exists:
            continue
        before = count
        for place in range(width):
            source, target = members[group, place], members[GROUPS + group, place]
            if source == target:
                continue
            if whether_written and place < k and not (begin + place < room and stripes.flags[start + begin + place] == 1):
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
class MigratingRows:
    """Rows and parity rows of one table that move, each with its field (uint64 [n]), stripe and place in that, source and target shard (int64 [n]).

    end: the stripe after the last that was looked at; whole: whether that is the table's end.
    """

    fields: np.ndarray
    stripe: np.ndarray
    place: np.ndarray
    source: np.ndarray
    target: np.ndarray
    end: int
    whole: bool


def migrating_rows(stripes: LaneStripes, table: int, first: int, most: int, shards: int, end: int | None = None) -> MigratingRows:
    """The next rows that move, of stripes from `first` on, at most `most` to a shard; those that were written.

    end: the stripe before which to stop, and of all rows that there may be; None: at the end of the table.
    """
    stop = -(-int(stripes.written.counts[table]) // stripes.k)
    last = stop if end is None else min(end, stop)
    width = stripes.members.shape[1]
    room = np.full(shards, most, np.int64)
    out = np.empty((4, min(most * shards, max(last - first, 0) * width)), np.int64)
    count, after = _migrating(stripes.map, table, first, last, end is None, room, out)
    stripe, place, source, target = out[:, :count]
    is_row = place < stripes.k
    packed = fields(table, np.where(is_row, stripe * stripes.k + place, stripe))
    return MigratingRows(
        np.where(is_row, packed, packed | PARITY_BIT), stripe, place, source, target, int(after), int(after) >= last
    )
