"""The exact number of rows and parity rows on each store shard after each step of a schedule.

The numbers are per lane, as each lane has a hash of its own on a shard. The schedule determines
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from foreload.cache.parity.placement import Placement
from foreload.cache.parity.shard_contents import RowCounts, count_rows
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import LaneMoves

_MOST_MOMENTS = 4096
_MOST_COUNTS = 1 << 22  # of all moments together
_FEWEST_MOMENTS = 128
_STORED = -1


def sizes_of(layouts: Sequence[RowLayout]) -> list[int]:
    """Return the distinct sizes of the rows of these layouts, in bytes, ascending."""
    return sorted({layout.row_bytes for layout in layouts})


def counts_of(placement: Placement, ordinals: np.ndarray, layouts: Sequence[RowLayout]) -> np.ndarray:
    """Return the rows and parity rows on each shard once the given ordinals are written.

    Args:
        ordinals: int64 [lanes, tables], the number of ordinals given so far.
        layouts: the layout of each table's rows.

    Returns:
        int64 [lanes, shards, sizes], with the sizes of `sizes_of`.
    """
    shards, sizes = placement.shard_count, sizes_of(layouts)
    counts = np.zeros((len(ordinals), shards, len(sizes)), np.int64)
    for lane, given in enumerate(ordinals):
        held = row_counts(placement, lane, given)
        for table, layout in enumerate(layouts):
            counts[lane, :, sizes.index(layout.row_bytes)] += held.rows[table] + held.parity_rows[table]
    return counts


def row_counts(placement: Placement, lane: int, given: np.ndarray) -> RowCounts:
    """Return what every shard holds of a lane once the given ordinals are written.

    Args:
        given: int64 [tables], the number of ordinals given so far.
    """
    return count_rows(LaneStripes.of(placement, lane, given), len(given), placement.shard_count)


@dataclass(slots=True)
class _LaneState:
    """The state of a lane during the walk over the schedule.

    Attributes:
        held: int64 [slots], ordinal * tables + table of a row that was never stored; _STORED for a
            stored row or an empty slot.
        protected: by table, bool [stripes], whether the stripe has parity rows.
    """

    stripes: LaneStripes
    held: np.ndarray
    protected: list[np.ndarray]


@dataclass(slots=True)
class RowTimeline:
    """The number of rows on the store shards over the steps of a schedule.

    It begins after `start_step`, when every row that has an ordinal is stored.

    Attributes:
        ordinals: int64 [lanes, tables], the number of ordinals given by `start_step`.
        steps: int64 [moments], ascending; the counts are those after these steps.
        before: int64 [lanes, shards, sizes], the counts after `start_step`.
        given: int64 [moments, lanes, shards, sizes], if all rows with an ordinal are stored, as
            after a clean stop. Parity rows are included. Moments that are not known yet are 0.
        stored: as `given`, if only rows whose residency has ended are stored, as while training
            goes on.
        work: int64 [moments, lanes], rows read, or written again, since `start_step`.
        known: the number of moments whose counts are complete.
    """

    schedule: Schedule
    placement: Placement
    layouts: Sequence[RowLayout]
    start_step: int
    ordinals: np.ndarray
    steps: np.ndarray = field(init=False)
    before: np.ndarray = field(init=False)
    given: np.ndarray = field(init=False)
    stored: np.ndarray = field(init=False)
    work: np.ndarray = field(init=False)
    known: int = field(init=False, default=0)
    _segment: int = field(init=False, default=0)
    _lanes: list[_LaneState] = field(init=False)
    _size_of: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        header, sizes = self.schedule.header, sizes_of(self.layouts)
        shards = self.placement.shard_count
        total = max(header.end_step - 1 - self.start_step, 0)
        moments = min(total, max(min(_MOST_MOMENTS, _MOST_COUNTS // (header.lanes * shards * len(sizes))), _FEWEST_MOMENTS))
        apart = -(-total // moments) if total else 1
        self.steps = np.minimum(self.start_step + apart * np.arange(1, -(-total // apart) + 1), header.end_step - 1)
        self.before = counts_of(self.placement, self.ordinals, self.layouts)
        self.given, self.stored = (np.zeros((len(self.steps), *self.before.shape), np.int64) for _ in range(2))
        self.work = np.zeros((len(self.steps), header.lanes), np.int64)
        self._size_of = np.array([sizes.index(layout.row_bytes) for layout in self.layouts])
        k, slots = self.placement.k, max(header.slots)
        self._lanes = [
            _LaneState(
                LaneStripes.of(self.placement, lane, np.zeros(len(self.layouts), np.int64)),
                np.full(slots, _STORED, np.int64),
                [np.ones(-(-int(count) // k), bool) for count in given],
            )
            for lane, given in enumerate(self.ordinals)
        ]

    @property
    def apart(self) -> int:
        """The number of steps between two moments."""
        return int(self.steps[0] - self.start_step) if len(self.steps) else 1

    @property
    def complete(self) -> bool:
        """Whether all moments are known."""
        return self.known == len(self.steps)

    def advance(self) -> int:
        """Count the rows of all segments that were published since the last call.

        Returns the number of known moments. Raises ScheduleError for a damaged file.
        """
        while not self.complete and self.schedule.published(self._segment):
            segment = self.schedule.segment(self._segment)
            if segment is None:
                break
            if segment.kind == "train" and segment.last > self.start_step:
                for lane in range(self.schedule.header.lanes):
                    moves = LaneMoves(segment.first, segment.last, self.schedule.moves(segment.index, lane))
                    self._take(moves.part(max(segment.first, self.start_step + 1), segment.last), lane)
                self._close(segment.last)
            self._segment += 1
        return self.known

    def _close(self, last: int) -> None:
        """Turn the changes at each moment up to step `last` into totals.

        All changes up to that step are known.
        """
        until = int(np.searchsorted(self.steps, last, side="right"))
        for counts, before in ((self.given, self.before), (self.stored, self.before), (self.work, np.zeros_like(self.work[0]))):
            for moment in range(self.known, until):
                # Moments have changes until here, and totals from here on.
                counts[moment] += counts[moment - 1] if moment else before
        self.known = until

    def _take(self, moves: LaneMoves, lane: int) -> None:
        """Count the arrivals and the ended residencies of a lane."""
        state, tables, moments = self._lanes[lane], len(self.layouts), len(self.steps)
        table, ordinal, tag = (moves.values(f"arrival_{name}") for name in ("table", "ordinal", "tag"))
        arrived, ended = ((moves.steps(name) - self.start_step - 1) // self.apart for name in ("arrival_tag", "ends"))
        # A row of tag 0 arrives for the first time: this is when it gets its ordinal.
        new = tag == 0
        self._add(self.given, state, lane, table[new], ordinal[new], arrived[new], None)
        ending = moves.occupants("ends", state.held, np.where(new, ordinal * tables + table, _STORED))
        # A row is added to the store at the end of its first residency. Later write-backs only
        # replace it, which is work, as fetches are.
        first = ending != _STORED
        self._add(self.stored, state, lane, ending[first] % tables, ending[first] // tables, ended[first], state.protected)
        self.work[:, lane] += np.bincount(ended[~first], minlength=moments) + np.bincount(arrived[~new], minlength=moments)

    def _add(
        self,
        counts: np.ndarray,
        state: _LaneState,
        lane: int,
        table: np.ndarray,
        ordinal: np.ndarray,
        moment: np.ndarray,
        protected: list[np.ndarray] | None,
    ) -> None:
        """Count rows at their moments, and the parity rows of stripes that had no row before.

        Args:
            counts: int64 [moments, lanes, shards, sizes], to add to.
            table: int64 [n], of each row, in the order in which the rows come.
            ordinal: int64 [n].
            moment: int64 [n].
            protected: by table, which stripes have parity rows. If None, rows come in the order of
                their ordinals, so a stripe gets its parity rows with its first ordinal.
        """
        k, width = self.placement.k, self.placement.k + self.placement.r
        order = np.argsort(table, kind="stable")
        starts = np.searchsorted(table[order], np.arange(len(self.layouts) + 1))
        shape = counts.shape[0], counts.shape[2]
        for number, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue
            own = order[start:end]
            stripe, place, when = ordinal[own] // k, ordinal[own] % k, moment[own]
            homes = state.stripes.shards(number, stripe)
            size = int(self._size_of[number])
            held = np.bincount(when * shape[1] + homes[np.arange(len(own)), place], minlength=shape[0] * shape[1])
            if self.placement.r:
                fresh = place == 0 if protected is None else _fresh(protected, number, stripe)
                for parity in range(k, width):
                    held += np.bincount(when[fresh] * shape[1] + homes[fresh, parity], minlength=shape[0] * shape[1])
            counts[:, lane, :, size] += held.reshape(shape)


def _fresh(protected: list[np.ndarray], table: int, stripe: np.ndarray) -> np.ndarray:
    """Return which stripes get their first row, and mark them as protected.

    Args:
        stripe: int64 [n], in the order in which the stripes get rows.

    Returns:
        bool [n].
    """
    most = int(stripe.max()) + 1
    if most > len(protected[table]):
        protected[table] = np.concatenate(
            [protected[table], np.zeros(max(most, 2 * len(protected[table])) - len(protected[table]), bool)]
        )
    there = protected[table]
    fresh = np.zeros(len(stripe), bool)
    fresh[np.unique(stripe, return_index=True)[1]] = True
    fresh &= ~there[stripe]
    there[stripe] = True
    return fresh
