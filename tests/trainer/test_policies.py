"""Policies of checkpoints: when a new baseline is due, what planning gains, which ones may go, and how many bits are enough."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_policies import bases, kept, planned_to_keep_least, written
from foreload.trainer.checkpoints.files import (
    baseline_is_due,
    baseline_is_planned,
    bits_for,
    bits_for_job,
    deletable,
    dependents,
    expected_restores,
)
from foreload.trainer.job.job_values import POLICIES


@pytest.mark.parametrize(("exponent", "after"), [(0.25, 8), (0.30, 7), (0.35, 6)])
def test_the_predictor_takes_a_new_baseline_after_so_many_increments(exponent: float, after: int) -> None:
    sizes = [0.26 * number**exponent for number in range(1, 30)]
    assert next(i for i in range(len(sizes)) if baseline_is_due(sizes[:i])) == after
    increments = np.zeros((30, 30))
    for base, number in product(range(30), range(30)):
        increments[base, number] = sizes[number - base - 1] if number > base else 0
    made = bases("intermittent", [1.0] * 30, increments)
    # The baseline, as many increments, and the next baseline.
    assert made[: after + 3] == [None, *[0] * after, None, after + 1]


@pytest.mark.parametrize("size", [0.01, 0.5, 0.999])
def test_increments_that_do_not_grow_need_no_new_baseline(size: float) -> None:
    assert not any(baseline_is_due([size] * count) for count in range(200))
    assert baseline_is_due([1.0] * 5)


def test_each_policy_is_made_of_what_it_says() -> None:
    full, increments = [10.0] * 4, np.full((4, 4), 3.0)
    made = {policy: bases(policy, full, increments) for policy in POLICIES}
    assert made == {
        "full": [None] * 4,
        "one-shot": [None, 0, 0, 0],
        "consecutive": [None, 0, 1, 2],
        "intermittent": [None, 0, 0, 0],
        "planned": [None, 0, 0, 0],
    }
    assert written(full, increments, made["full"]) == 40
    assert written(full, increments, made["one-shot"]) == 19
    # The two newest, and their baseline; of the consecutive ones all are needed.
    assert kept(full, increments, made["full"]) == 20
    assert kept(full, increments, made["one-shot"]) == 16
    assert kept(full, increments, made["consecutive"]) == 19
    assert bases("full", [], np.zeros((0, 0))) == []


@st.composite
def sizes(draw: st.DrawFn, most: int = 9) -> tuple[list[float], np.ndarray]:
    """Sizes as they can be: a model that grows, and increments of at most all of it."""
    count = draw(st.integers(1, most))
    full = sorted(draw(st.lists(st.floats(1, 100), min_size=count, max_size=count)))
    parts = draw(st.lists(st.floats(0, 1), min_size=count * count, max_size=count * count))
    return full, np.array(parts).reshape(count, count) * np.array(full)


@given(sizes())
@settings(deadline=None)
def test_planned_is_never_worse(matrix: tuple[list[float], np.ndarray]) -> None:
    full, increments = matrix
    by_policy = {policy: bases(policy, full, increments) for policy in POLICIES}
    for policy in ("intermittent", "one-shot", "full"):
        assert written(*matrix, by_policy["planned"]) <= written(*matrix, by_policy[policy]) * (1 + 1e-12)
        assert kept(*matrix, planned_to_keep_least(*matrix)) <= kept(*matrix, by_policy[policy]) * (1 + 1e-12)


@given(sizes(most=6), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_planned_is_the_best_of_all_choices_of_baselines(matrix: tuple[list[float], np.ndarray], keep: int) -> None:
    count = len(matrix[0])
    choices: list[list[int | None]] = []
    for baselines in product((True, False), repeat=count - 1):
        made: list[int | None] = []
        for number, baseline in enumerate((True, *baselines)):
            made.append(None if baseline else max(one for one in range(number) if made[one] is None))
        choices.append(made)
    assert written(*matrix, bases("planned", *matrix)) == pytest.approx(min(written(*matrix, made) for made in choices))
    least = min(kept(*matrix, made, keep) for made in choices)
    assert kept(*matrix, planned_to_keep_least(*matrix, keep), keep) == pytest.approx(least)


@given(sizes())
@settings(deadline=None)
def test_planning_from_any_checkpoint_on_is_as_good_as_planning_all(matrix: tuple[list[float], np.ndarray]) -> None:
    full, increments = matrix
    made: list[int | None] = []
    for number in range(len(full)):
        baseline = next((one for one in reversed(range(number)) if made[one] is None), None)
        rest = None if baseline is None else [baseline, *range(number, len(full))]
        due = rest is None or baseline_is_planned([full[one] for one in rest], increments[np.ix_(rest, rest)])
        made.append(None if due else baseline)
    assert written(*matrix, made) == pytest.approx(written(*matrix, bases("planned", *matrix)))


def test_what_no_kept_checkpoint_needs_may_go() -> None:
    one_shot: dict[str, str | None] = {"a": None, "b": "a", "c": "a", "d": None, "e": "d"}
    assert deletable(one_shot, 2) == ["a", "b", "c"]
    assert deletable(one_shot, 3) == ["b"]
    assert deletable(one_shot, 1) == ["a", "b", "c"]
    assert deletable(one_shot, 0) == list(one_shot)
    consecutive: dict[str, str | None] = {"a": None, "b": "a", "c": "b"}
    assert deletable(consecutive, 1) == []
    assert dependents(consecutive, "a") == ["b", "c"]
    assert dependents(one_shot, "a") == ["b", "c"]
    assert dependents(one_shot, "e") == []


def test_bits_follow_from_the_restores_to_expect() -> None:
    assert [bits_for(restores) for restores in (0, 1, 2, 3, 4, 20, 21, 1000)] == [4, 4, 4, 4, 8, 8, 8, 8]
    assert [bits_for(3, happened) for happened in (0, 3, 4)] == [4, 4, 8]
    assert expected_restores(3600, 1) == 1
    assert expected_restores(10 * 86_400, 2) == 20
    assert expected_restores(10 * 86_400 + 1, 2) == 21
    # 100 of 1,000 steps in a day, so 10 days in all.
    assert [bits_for_job(100, 86_400.0, 1000, rate, 0) for rate in (0.1, 0.3, 0.31)] == [4, 4, 8]
    assert bits_for_job(100, 86_400.0, 1000, 0.3, 4) == 8
    assert [bits_for_job(100, 86_400.0, 1000, rate, 0, least=8) for rate in (0.1, 0.4)] == [8, 8]
    assert bits_for_job(0, 0.0, 1000, 1.0, 0) == 4
