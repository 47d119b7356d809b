"""Which checkpoint is wanted next: what is asked for, due, or to be made for an evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.format import Header
from foreload.trainer.cluster.coordinator.wanted_checkpoints import WantedCheckpoints
from foreload.trainer.cluster.messages.control import AskCheckpoint, AskCheckpointed, CheckpointProgress
from foreload.trainer.job.job import TrainJob

FOLDER, ELSEWHERE = Path("run/checkpoints"), Path("elsewhere")
EPOCHS, EPOCH = 3, 40  # of how many steps; notice is a quarter of an epoch


def wanted(**settings: Any) -> WantedCheckpoints:
    return wanted_of(None, **settings)


def wanted_of(eval_every: int | None, clock: Callable[[], float] = time.monotonic, **settings: Any) -> WantedCheckpoints:
    header = Header(
        version=1, features=FeatureSpec.criteo(), batch_size=1, lanes=1, slots=(1,), epochs=EPOCHS, shuffle_seed=None, training_samples=EPOCH,
        evaluation_samples=1, first_step=0, first_number=0, parent=None, settings={}, eval_every=eval_every,
    )  # fmt: skip
    return WantedCheckpoints(
        TrainJob.of({"schedule": "clicks", "run": "run", "store": "local:1", **settings}), FOLDER, header, clock
    )


def test_nothing_is_wanted_unless_asked_for() -> None:
    checkpoints = wanted()
    assert checkpoints.next(-1) is None
    checkpoints.ask(AskCheckpoint(str(ELSEWHERE)))
    first = checkpoints.next(5)
    assert first is not None
    assert (first.folder, first.every, first.steps) == (ELSEWHERE, 1, ())
    assert checkpoints.next(5) is None
    checkpoints.again(first)
    assert checkpoints.next(6) == first
    checkpoints.now_saved(first, "elsewhere/step-7", 0.0, 2)
    assert checkpoints.progress(AskCheckpointed(0)) == CheckpointProgress(True, "elsewhere/step-7")


def test_the_next_multiple_is_wanted_and_with_it_the_steps_of_evaluations() -> None:
    due = wanted(checkpoint_every=7, keep_best="auc").next(-1)
    assert due is not None
    assert (due.folder, due.asked, due.every, due.steps) == (FOLDER, None, 7, (39, 79, 119))


@pytest.mark.parametrize(("every", "pause"), [(7, 10.0), ("90s", 90.0)])
def test_after_a_failure_none_is_begun_for_a_while(every: int | str, pause: float) -> None:
    now = 100.0
    checkpoints = wanted_of(None, lambda: now, checkpoint_every=every)
    now += 90.0
    due = checkpoints.next(5)
    assert due is not None
    checkpoints.failed(due, "the disk is full")
    now += pause - 0.5
    assert checkpoints.next(8) is None
    now += 0.5
    assert checkpoints.next(9) == due


def test_evaluations_amid_an_epoch_are_waited_for_too() -> None:
    checkpoints = wanted_of(16, keep_best="auc", checkpoint_every=7)
    due = checkpoints.next(-1)
    assert due is not None
    assert due.steps == (15, 31, 39, 55, 71, 79, 95, 111, 119)
    near = checkpoints.next(51)  # notice is a quarter of the steps between two
    assert near is not None
    assert (near.every, near.steps) == (None, (55, 71, 79, 95, 111, 119))
    asked = checkpoints.next(47)
    assert asked is not None
    assert asked.every == 7
    assert not checkpoints.gives_way(near, 55, 67)


@pytest.mark.parametrize("last", range(29, 39))
def test_nothing_else_is_begun_where_an_evaluation_is_near(last: int) -> None:
    checkpoints = wanted(checkpoint_every=7, keep_best="auc")
    checkpoints.ask(AskCheckpoint(None))
    near = checkpoints.next(last)
    assert near is not None
    assert (near.asked, near.every, near.steps) == (None, None, (39, 79, 119))
    assert not checkpoints.is_sooner(near, last)  # what is asked for waits
    after = checkpoints.next(39)
    assert after is not None
    assert after.asked is not None


def test_what_is_under_way_gives_way_to_the_checkpoint_of_an_evaluation_which_is_near_but_once() -> None:
    checkpoints = wanted(keep_best="auc")
    checkpoints.ask(AskCheckpoint(None))
    first = checkpoints.next(3)
    assert first is not None
    assert not checkpoints.gives_way(first, 5, 28)
    assert checkpoints.gives_way(first, 5, 29)
    checkpoints.again(first)
    again = checkpoints.next(39)
    assert again == first
    assert not checkpoints.gives_way(again, 41, 70)


def test_a_checkpoint_of_an_evaluation_gives_way_to_none() -> None:
    checkpoints = wanted(keep_best="auc")
    best = checkpoints.next(30)
    assert best is not None
    assert not checkpoints.gives_way(best, 39, 75)


def test_a_multiple_is_left_out_that_would_not_be_over_at_an_evaluation() -> None:
    checkpoints = wanted(checkpoint_every=7, keep_best="auc")
    first = checkpoints.next(-1)
    assert first is not None
    checkpoints.now_saved(first, "run/checkpoints/step-6", 0.0, 10)
    assert checkpoints.next(11) == wanted(checkpoint_every=7, keep_best="auc").next(11)  # step 13
    late = checkpoints.next(14)  # step 20, which is 19 before
    assert late is not None
    assert late.every is None
    assert not checkpoints.is_sooner(late, 15)
    assert checkpoints.is_sooner(late, 39)  # the evaluation is over


def test_who_asks_too_late_is_told() -> None:
    checkpoints = wanted()
    checkpoints.ask(AskCheckpoint(None))
    checkpoints.refuse("its training is over")
    assert checkpoints.progress(AskCheckpointed(0)) == CheckpointProgress(True, failed="its training is over")
    assert checkpoints.next(3) is None


def test_a_folder_in_which_another_process_saves_one_is_waited_for_up_to_a_minute() -> None:
    now = [100.0]
    checkpoints = wanted_of(None, lambda: now[0], checkpoint_every=7)
    checkpoints.ask(AskCheckpoint(str(ELSEWHERE)))
    for now[0] in (100.0, 130.0, 159.0):
        asked = checkpoints.next(3)
        assert asked is not None
        assert asked.folder == ELSEWHERE
        assert checkpoints.waits()
        checkpoints.again(asked)
        assert checkpoints.next(4) is None
        assert not checkpoints.is_sooner(asked, 4)
        now[0] += 1
    now[0] = 161.0
    assert not checkpoints.waits()
