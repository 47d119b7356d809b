"""How many rows and parity rows each store shard has after each step of a schedule, in each lane's hash there: stated by the schedule, to the row."""

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
    """The distinct sizes of the rows of these layouts, in bytes, ascending."""
    return sorted({layout.row_bytes for layout in layouts})


def counts_of(placement: Placement, ordinals: np.ndarray, layouts: Sequence[RowLayout]) -> np.ndarray:
    """Rows and parity rows when all ordinals given (int64 [lanes, tables]) were written: int64 [lanes, shards, sizes]."""
    shards, sizes = placement.shard_count, sizes_of(layouts)
    counts = np.zeros((len(ordinals), shards, len(sizes)), np.int64)
    for lane, given in enumerate(ordinals):
        held = row_counts(placement, lane, given)
        for table, layout in enumerate(layouts):
            counts[lane, :, sizes.index(layout.row_bytes)] += held.rows[table] + held.parity_rows[table]
    return counts


def row_counts(placement: Placement, lane: int, given: np.ndarray) -> RowCounts:
    """What every shard holds of a lane when all ordinals given (int64 [tables]) were written."""
    return count_rows(LaneStripes.of(placement, lane, given), len(given), placement.shard_count)


@dataclass(slots=True)
class _LaneState:
    """What is known of a lane on the way: which rows sit in its slots that were never stored, and which stripes have parity rows.

    held: int64 [slots], ordinal * tables + table; _STORED where a row was stored, or none sits.
    """

    stripes: LaneStripes
    held: np.ndarray
    protected: list[np.ndarray]


@dataclass(slots=True)
class RowTimeline:
    """The store shards' rows over the steps of a schedule, from after `start_step` on, when every row ever given an ordinal was stored.

    steps: int64 [moments], ascending, after which the counts are. given: all that had their ordinal by then are stored, as after a clean stop;
    stored: those whose residency ended by then, as while training goes on; both int64 [moments, lanes, shards, sizes], parity rows included, those of
    moments that are not known yet being 0. work: int64 [moments, lanes], rows read or written again up to then. known: how many moments are whole.
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
        """Steps between two moments."""
        return int(self.steps[0] - self.start_step) if len(self.steps) else 1

    @property
    def complete(self) -> bool:
        """Whether all moments are known."""
        return self.known == len(self.steps)

    def advance(self) -> int:
        """Take in all segments that are published; returns how many moments are known now. Raises ScheduleError for a damaged file."""
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
        """All is known up to step `last`: what moments got becomes what there is after them."""
        until = int(np.searchsorted(self.steps, last, side="right"))
        for counts, before in ((self.given, self.before), (self.stored, self.before), (self.work, np.zeros_like(self.work[0]))):
            for moment in range(self.known, until):
                counts[moment] += counts[moment - 1] if moment else before
        self.known = until

    def _take(self, moves: LaneMoves, lane: int) -> None:
        """Count in what a lane does."""
        state, tables, moments = self._lanes[lane], len(self.layouts), len(self.steps)
        table, ordinal, tag = (moves.values(f"arrival_{name}") for name in ("table", "ordinal", "tag"))
        arrived, ended = ((moves.steps(name) - self.start_step - 1) // self.apart for name in ("arrival_tag", "ends"))
        new = tag == 0
        self._add(self.given, state, lane, table[new], ordinal[new], arrived[new], None)
        ending = moves.occupants("ends", state.held, np.where(new, ordinal * tables + table, _STORED))
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
        """Count rows, in the order in which they come, at their moments, with the parity rows of stripes that had no row before.

        protected: of each table, which stripes have parity rows; None: rows come in the order of their ordinals, which says that.
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
    """Which of these stripes (int64 [n], in the order in which they get rows) get their first row: bool [n]. They are noted."""
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
