"""Where the stripes of a lane are: by the placement groups as they are, and, while groups move, as they will be."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np

from foreload.pipelines.base.hashing import mix

GROUPS = 4096  # of a placement
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
