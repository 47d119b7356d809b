"""Evaluations amid epochs: each sees the rows as of its step, and training is what it is without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import small_terms
from small_terms import assert_same
from training import Death, Trained, train

from foreload.base.codec import to_stored
from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule

EVERY = 5
EVALUATED = [4, 9, 11, 16, 21, 23]
"""Of two epochs of 12 steps, the steps before an evaluation."""
pytestmark = pytest.mark.usefixtures("one_thread")


def _prepared(folder: Path, *further: str) -> Schedule:
    return small_terms.schedule(folder, f"--eval-every={EVERY}", *further)


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return _prepared(tmp_path_factory.mktemp("amid"))


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, servers: LocalStores, one_thread: None) -> Trained:
    return train(small_terms.job(), schedule, servers.urls)


@pytest.mark.parametrize(
    ("trainers", "shuffle_seed", "further"),
    [
        (1, None, ()),
        (4, 7, ("--window=200", "--overwrite")),
        (2, None, ("--window=200", "--slots=100")),
        pytest.param(2, 7, (), marks=pytest.mark.full),
        pytest.param(4, None, ("--slots=all",), marks=pytest.mark.full),
    ],
)
def test_model_and_metrics_are_those_of_plain_training(
    tmp_path: Path, servers: LocalStores, trainers: int, shuffle_seed: int | None, further: Sequence[str]
) -> None:
    given = [*further] + ([] if shuffle_seed is None else [f"--shuffle-seed={shuffle_seed}"])
    given += ["--slots=100"] if "--window=200" in given and "--slots=100" not in given else []
    _prepared(tmp_path, *given)
    expected = small_terms.plainly(tmp_path, eval_every=EVERY, shuffle_seed=shuffle_seed)
    outcome = train(
        small_terms.job(), Schedule(tmp_path / "schedule"), servers.urls[:2], trainers, copies=2 if trainers > 1 else 1
    )
    assert outcome.digest == expected.digest
    assert [step.loss for step in outcome.steps] == expected.log_losses
    assert [e.step for e in outcome.evaluations] == expected.evaluated == EVALUATED
    assert [e.epoch for e in outcome.evaluations] == [0, 0, 0, 1, 1, 1]
    for name in ("auc", "log_loss", "normalized_entropy"):
        assert [getattr(e, name) for e in outcome.evaluations] == pytest.approx([getattr(e, name) for e in expected.evaluations])


def test_the_model_is_that_without_evaluations_amid_epochs(
    tmp_path: Path, servers: LocalStores, undisturbed: Trained, schedule: Schedule
) -> None:
    without = small_terms.schedule(tmp_path)
    assert train(small_terms.job(), without, servers.urls).digest == undisturbed.digest
    assert without.manifest["counts"] == schedule.manifest["counts"], "no training row moves more often"
    assert not to_stored(without.header).keys() & {"eval_every", "evaluation_sets"}


@pytest.mark.parametrize("last", [3, 4, 5, 11, 12])
def test_a_stop_around_an_evaluation_is_gone_on_from(
    schedule: Schedule, servers: LocalStores, undisturbed: Trained, last: int
) -> None:
    job = small_terms.job()
    first = train(job, schedule, servers.urls, 2, stop_after=lambda step: step == last)
    then = train(job, schedule, servers.urls, 1, resume=first)
    assert then.digest == undisturbed.digest
    # Of the step that it stopped after, the evaluation is still to come.
    assert [e.step for e in first.evaluations] == [step for step in EVALUATED if step < last]
    assert [e.step for e in then.evaluations] == [step for step in EVALUATED if step >= last]
    assert [e.auc for e in (*first.evaluations, *then.evaluations)] == [e.auc for e in undisturbed.evaluations]


@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_dies_in_an_evaluation(schedule: Schedule, servers: LocalStores, undisturbed: Trained, trainer: int) -> None:
    outcome = train(small_terms.job(), schedule, servers.urls, 2, copies=2, deaths=[Death(trainer, "evaluating", 9)])
    assert len(outcome.terms) == 2
    assert_same(outcome, undisturbed)
