"""The step from which a trainer continues, and the rows that the store has by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes


@dataclass(frozen=True, slots=True)
class Start:
    """Where a trainer begins.

    Attributes:
        step: the last step trained before.
        last_batches: for each lane, the number of its last write-back batch.
    """

    step: int
    last_batches: tuple[int, ...]


def written_stripes(placement: Placement, ordinals: Callable[[], np.ndarray]) -> Callable[[int], LaneStripes]:
    """Return a function that gives the stripes of each lane when all its rows are written back.

    Args:
        ordinals: returns how many ordinals were given, int64 [lanes, tables]. It is called once,
            when stripes are first needed, since only decoding needs them and this may read the
            whole schedule.
    """
    known = cache(ordinals)

    @cache
    def of(lane: int) -> LaneStripes:
        return LaneStripes.of(placement, lane, known()[lane])

    return of
