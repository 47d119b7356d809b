"""What an LRU cache would do with a lane's rows, for any number of slots at once, beside what was compiled.

An LRU cache of more slots holds all that one of fewer holds, so one pass over the uses shows for each of them from how many slots on it is a hit
(Mattson et al. 1970, Evaluation techniques for storage hierarchies).
"""

from __future__ import annotations

import numpy as np

from foreload.base.compiled import nb
from foreload.pipelines.compiler.other_slots import LaneUses

NEVER = int(np.iinfo(np.int32).max)
"""The depth of a row's first use: it arrives, however many slots there are."""


def lru_depths(uses: LaneUses) -> np.ndarray:
    """Of each use, how many rows were used later than this one before the step began: int32 [accesses]. With more slots it is a hit.

    Rows of one step count as used in the order in which the schedule has them; all of a step are in slots at once. 12 bytes a use, while it works.
    """
    depths = np.empty(len(uses.rows), np.int32)
    _depths(uses.rows, uses.starts, np.full(len(uses.new), -1, np.int32), np.zeros(len(uses.rows) + 1, np.int32), depths)
    return depths


def lru_arrivals(uses: LaneUses, depths: np.ndarray, slots: int) -> np.ndarray:
    """How many rows arrive at each step in an LRU cache that begins empty: int64 [steps]. depths: of `lru_depths`; slots: at least
    those of the largest step.
    """
    before = np.concatenate([[0], np.cumsum(depths >= slots)])
    return np.asarray(before[uses.starts[1:]] - before[uses.starts[:-1]], np.int64)


@nb.njit(nogil=True, cache=True)
def _depths(rows: np.ndarray, starts: np.ndarray, last: np.ndarray, tree: np.ndarray, depths: np.ndarray) -> None:
    """Fill depths. last: int32 [rows], -1: the place of each row's last use; tree: int32 [accesses + 1], zeros: a Fenwick tree over places, of which
    those that are the last use of a row count.
    """
    size, distinct = len(rows), 0
    for step in range(len(starts) - 1):
        for k in range(starts[step], starts[step + 1]):
            before = last[rows[k]]
            if before < 0:
                depths[k] = NEVER
                continue
            # Up to this place, itself included; all others were used later.
            place, earlier = before + 1, 0
            while place > 0:
                earlier += tree[place]
                place -= place & -place
            depths[k] = distinct - earlier
        for k in range(starts[step], starts[step + 1]):
            before = last[rows[k]]
            if before < 0:
                distinct += 1
            else:
                place = before + 1
                while place <= size:
                    tree[place] -= 1
                    place += place & -place
            last[rows[k]] = k
            place = k + 1
            while place <= size:
                tree[place] += 1
                place += place & -place
