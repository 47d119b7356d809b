"""Placement by locality: the kernel deals samples as the definition does, and fewer rows are exchanged for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference_data import Placement, Row, by_locality, slice_bounds

from foreload.pipelines.compiler.locality import MOST_LOOKUPS, assign_samples

Batch = list[list[Row]]


def assigned(batch: Sequence[Sequence[Row]], lane_of: dict[Row, int], lanes: int) -> list[int]:
    """What the kernel makes of a batch."""
    numbers: dict[Row, int] = {}
    inverse = [numbers.setdefault(row, len(numbers)) for rows in batch for row in rows]
    starts = np.cumsum([0, *(len(rows) for rows in batch)])
    lane = np.array([lane_of.get(row, -1) for row in numbers], np.int32)
    lookups = np.bincount(np.array(inverse, np.int64), minlength=len(numbers)).astype(np.int32)
    return assign_samples(np.array(inverse, np.int32), starts, lane, lookups, lanes).tolist()


@st.composite
def placed_batches(draw: st.DrawFn) -> tuple[Batch, dict[Row, int], int]:
    """A batch of samples with any number of values, rows that have a lane already, and the lanes."""
    lanes = draw(st.integers(1, 6))
    ids = st.integers(0, draw(st.sampled_from([2, 8, 40])))
    batch = draw(st.lists(st.lists(st.tuples(st.integers(0, 1), ids), max_size=6), max_size=40))
    rows = sorted({row for sample in batch for row in sample})
    lane_of = {row: draw(st.integers(0, lanes - 1)) for row in rows if draw(st.booleans())}
    return batch, lane_of, lanes


@given(placed_batches())
@example(([], {}, 3))
@example(([[(0, 1)]], {(0, 1): 2}, 4))
@example(([[(0, 1)], [(0, 1)], [(0, 2)], [(0, 2)]], {(0, 1): 1, (0, 2): 0}, 2))
def test_the_kernel_places_samples_by_the_definition(case: tuple[Batch, dict[Row, int], int]) -> None:
    batch, lane_of, lanes = case
    order = assigned(batch, lane_of, lanes)
    assert sorted(order) == list(range(len(batch))), "every sample has one place"
    slices = [order[first:last] for first, last in slice_bounds(len(batch), lanes)]
    assert slices == [sorted(places) for places in slices], "a slice is in the order of the batch"
    assert slices == by_locality(batch, lane_of, lanes)


@pytest.mark.parametrize("lanes", [2, 7, 64])
def test_large_batches_too(lanes: int) -> None:
    rng = np.random.default_rng(lanes)
    ids = np.minimum(rng.zipf(1.3, (3, 400, 5)), 3000).tolist()
    lane_of: dict[Row, int] = {}
    for step in ids:
        batch = [[(k, row) for k, row in enumerate(sample)] for sample in step]
        order = assigned(batch, lane_of, lanes)
        assert order == [place for places in by_locality(batch, lane_of, lanes) for place in places]
        lane_of.update({row: int(rng.integers(lanes)) for sample in batch for row in sample if row not in lane_of})


def test_one_lane_has_the_batch_as_it_is() -> None:
    assert assigned([[(0, 3)], [(0, 1)], [(0, 3)]], {(0, 3): 0}, 1) == [0, 1, 2]


def test_a_row_that_most_slices_use_says_nothing() -> None:
    popular: Batch = [[(0, 0)] for _ in range(MOST_LOOKUPS + 1)]
    assert assigned(popular, {(0, 0): 1}, 2) == assigned([[] for _ in popular], {}, 2)


def exchanged(kind: str, steps: Sequence[Batch], lanes: int) -> int:
    """Rows sent to other lanes than their own, over all steps."""
    placement = Placement(lanes, kind)
    sent = 0
    for batch in steps:
        for lane, places in enumerate(placement.slices(batch)):
            used = {row for place in places for row in batch[place]}
            sent += sum(placement.lane_of[row] != lane for row in used)
    return sent


@pytest.mark.parametrize("lanes", [2, 4])
def test_samples_of_the_same_group_end_up_in_the_same_lane(lanes: int) -> None:
    rng = np.random.default_rng(1)
    groups = rng.integers(0, 60, (30, 64))
    steps = [[[(0, int(g)), (1, 10 * int(g) + int(rng.integers(10)))] for g in step] for step in groups]
    # Far less: by order, a group's rows are with the right lane once in `lanes` times only.
    assert exchanged("locality", steps, lanes) < 0.7 * exchanged("order", steps, lanes)
