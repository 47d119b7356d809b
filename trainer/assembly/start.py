"""Where a trainer begins, and which rows the store has by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes


@dataclass(frozen=True, slots=True)
class Start:
    """Where a trainer begins: the last step trained before, and per lane the number of its last write-back batch."""

    step: int
    last_batches: tuple[int, ...]


def written_stripes(placement: Placement, ordinals: Callable[[], np.ndarray]) -> Callable[[int], LaneStripes]:
    """The stripes of each lane when so many ordinals were given, int64 [lanes, tables], and all rows were written back.

    ordinals: called once, when a stripe is first asked for, since only decoding needs it and it may read the whole schedule.
    """
    known = cache(ordinals)

    @cache
    def of(lane: int) -> LaneStripes:
        return LaneStripes.of(placement, lane, known()[lane])

    return of
