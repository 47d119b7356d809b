"""Where the stripes of a lane are: by the placement groups as they are, and, while groups move, as they will be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb
from foreload.base.hashing import key, mix
from foreload.cache.parity.limits import GROUPS
from foreload.cache.parity.placement import Placement
from foreload.cache.rows.fields import pack

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
