"""The bound that the oracle is held against is itself held against exhaustive search."""

from __future__ import annotations

import pytest
from belady import belady_arrivals, fewest_arrivals, lru_arrivals
from hypothesis import given
from hypothesis import strategies as st

steps_of_few_rows = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=8)


@given(steps_of_few_rows, st.integers(0, 3))
def test_belady_is_the_minimum_over_all_choices_and_lru_is_no_better(steps: list[list[int]], spare: int) -> None:
    slots = max(len(set(rows)) for rows in steps) + spare
    assert belady_arrivals(steps, slots) == fewest_arrivals(steps, slots) <= lru_arrivals(steps, slots)


@given(steps_of_few_rows)
def test_with_a_slot_for_every_row_each_arrives_once(steps: list[list[int]]) -> None:
    rows = {row for step in steps for row in step}
    assert belady_arrivals(steps, len(rows)) == lru_arrivals(steps, len(rows)) == len(rows)


def test_a_cycle_one_row_longer_than_the_cache_defeats_lru_alone() -> None:
    steps = [[number % 4] for number in range(12)]
    assert lru_arrivals(steps, 3) == 12
    assert belady_arrivals(steps, 3) == 6


def test_a_step_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3, not 2"):
        belady_arrivals([[1, 2, 3]], 2)
