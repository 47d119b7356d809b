"""What an LRU cache would do, against one that is worked by hand."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.pipelines.compiler.other_slots import LaneUses, count_moves, lru_arrivals, lru_depths


def lane(steps: list[list[int]], rows: int) -> LaneUses:
    """A lane whose steps use these rows, none of them trained before."""
    starts = np.cumsum([0, *map(len, steps)]).astype(np.int64)
    used = np.array([row for step in steps for row in step], np.int32)
    return LaneUses(used, starts, np.ones(rows, bool), np.zeros(rows, np.int16))


def by_hand(steps: list[list[int]], slots: int) -> list[int]:
    """Arrivals at each step: of rows that were not there when it began; then the least recently used leave."""
    held: OrderedDict[int, None] = OrderedDict()
    arrived = []
    for step in steps:
        arrived.append(sum(row not in held for row in step))
        for row in step:
            held.pop(row, None)
            held[row] = None
        while len(held) > slots:
            held.popitem(last=False)
    return arrived


@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True), min_size=1, max_size=30), st.integers(0, 8))
def test_arrivals_are_those_of_a_cache_worked_by_hand_and_no_fewer_than_the_minimum(steps: list[list[int]], spare: int) -> None:
    # Rows are numbered in the order of their first use, as a schedule gives them.
    numbers: dict[int, int] = {}
    steps = [[numbers.setdefault(row, len(numbers)) for row in step] for step in steps]
    uses = lane(steps, len(numbers))
    slots = uses.least_slots + spare
    arrived = lru_arrivals(uses, lru_depths(uses), slots)
    assert arrived.tolist() == by_hand(steps, slots)
    assert arrived.sum() >= count_moves(uses, slots).arrived.sum()


@pytest.mark.parametrize("slots", [2, 3])
def test_a_loop_longer_than_the_slots_never_hits(slots: int) -> None:
    uses = lane([[k % 4] for k in range(12)], 4)
    assert lru_arrivals(uses, lru_depths(uses), slots).tolist() == [1] * 12
    assert lru_arrivals(uses, lru_depths(uses), 4).sum() == 4
