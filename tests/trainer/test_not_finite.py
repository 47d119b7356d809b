"""A loss that is NaN or infinite: the run is left as a clean stop after the step before leaves it, whoever hosts the lane."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from clicks import Clicks, write_log
from command_line import SMALL, done, refused, run_here
from model_cases import POISON_ABOVE
from training import Trained, job_in_memory, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run

FEATURES = """
label = "clicked"
[[dense]]
name = "price"
transform = "log"
[[feature]]
name = "ad"
rows = 300
encoding = "id"
[[feature]]
name = "user"
rows = 1000
"""
ROWS, BATCH = 300, 20
POISONED, HELD_OUT = 157, 290
"""Rows of the log that may be poison: one to train on, one that is held out."""
STEP = POISONED // BATCH
"""The first step with the row POISONED."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Schedule]:
    """(lanes, row) -> a schedule in which that row is poison to model_cases.Poisoned: 2 epochs of 14 steps, evaluation after each."""
    folder = tmp_path_factory.mktemp("clicks")
    (folder / "features.toml").write_text(FEATURES)

    @functools.cache
    def of(lanes: int, row: int) -> Schedule:
        log, out = write_log(folder / f"{row}.csv", ROWS, {(row, "price"): "1e30"}), folder / f"{lanes}-{row}"
        given = (
            f"{log} --format csv --features {folder}/features.toml --batch-size {BATCH} --lanes {lanes} --slots min --epochs 2"
        )
        prepare.run(f"{given} --eval-fraction 0.1 --segment-bytes 4000 --out {out}".split())
        return Schedule(out)

    return of


def job(**settings: object) -> TrainJob:
    return job_in_memory(model="model_cases:Poisoned", dim=4, dense_optimizer="Adam", **settings)


def lane_of_poison(schedule: Schedule, step: int) -> int:
    """The one lane whose slice of a training step has the poisoned sample."""
    event = next(event for event in schedule.events(0) if event.kind == "train" and event.step == step)
    lanes = [lane for lane in range(schedule.header.lanes) if (schedule.lane(event, lane).dense > POISON_ABOVE).any()]
    assert len(lanes) == 1
    return lanes[0]


@pytest.mark.parametrize(
    ("lanes", "trainers", "parity", "value"),
    [
        (1, 1, (1, 0), math.nan),
        (2, 2, (2, 1), math.nan),
        (3, 3, (1, 0), -math.inf),
        (4, 2, (1, 0), math.nan),
        pytest.param(2, 1, (1, 0), math.inf, marks=pytest.mark.full),
        pytest.param(4, 3, (2, 1), math.inf, marks=pytest.mark.full),
        pytest.param(4, 4, (1, 0), math.nan, marks=pytest.mark.full),
    ],
)
def test_training_stops_before_the_step_whose_loss_is_not_finite(
    prepared: Callable[[int, int], Schedule],
    servers: LocalStores,
    lanes: int,
    trainers: int,
    parity: tuple[int, int],
    value: float,
) -> None:
    schedule, options = prepared(lanes, POISONED), {"model_options": {"value": str(value)}}
    run = functools.partial(train, schedule=schedule, urls=servers.urls[: sum(parity)], parity=parity)
    failed = run(job(**options), trainers=trainers, copies=2)
    assert failed.failure is not None
    assert failed.failure.startswith(f"step {STEP}: the loss must be finite in every lane; got ")
    assert failed.failure.endswith(f" in lane {lane_of_poison(schedule, STEP)}")
    assert [report.step for report in failed.steps] == list(range(STEP))
    stopped = run(job(**options), stop_after=lambda step: step == STEP - 1)
    assert (failed.stopped_at, failed.digest) == (STEP - 1, stopped.digest)
    # It fails there again, also where it goes on after a stop, and with other trainers.
    given = job(**options)
    again = run(given, trainers=trainers)
    again = run(given, resume=again)
    assert (again.steps, again.failure, again.digest) == ([], failed.failure, stopped.digest)


def test_before_the_first_step_there_is_a_clean_stop_too(prepared: Callable[[int, int], Schedule], servers: LocalStores) -> None:
    schedule = prepared(2, 3)
    failed = train(job(), schedule, servers.urls[:1], trainers=2)
    assert failed.stopped_at == -1
    assert failed.failure == f"step 0: the loss must be finite in every lane; got nan in lane {lane_of_poison(schedule, 0)}"


@pytest.mark.parametrize(("lanes", "trainers"), [(1, 1), (4, 2)])
def test_training_stops_after_an_evaluation_whose_loss_is_not_finite(
    prepared: Callable[[int, int], Schedule], servers: LocalStores, lanes: int, trainers: int
) -> None:
    schedule = prepared(lanes, HELD_OUT)
    failed = train(job(), schedule, servers.urls[:1], trainers, copies=2)
    last = failed.steps[-1].step
    assert failed.failure is not None
    assert failed.failure.startswith("evaluation step 1: the loss must be finite in every lane; got nan in lane ")
    assert (failed.stopped_at, last, failed.evaluations) == (last, schedule.header.end_step // 2 - 1, [])
    assert failed.digest == train(job(), schedule, servers.urls[:1], stop_after=lambda step: step == last).digest


def test_where_it_is_allowed_training_goes_on_and_finite_losses_give_the_same_model(
    prepared: Callable[[int, int], Schedule], servers: LocalStores
) -> None:
    def go(row: int, **rest: object) -> Trained:
        return train(job(**rest), prepared(2, row), servers.urls[:1], trainers=2)

    end = prepared(2, POISONED).header.end_step
    poisoned = go(POISONED, allow_nan=True)
    assert (poisoned.failure, poisoned.stopped_at, len(poisoned.steps)) == (None, None, end)
    assert [math.isfinite(report.loss) for report in poisoned.steps[: STEP + 1]] == [True] * STEP + [False]
    harmless = {"model_options": {"value": 0.0}}
    assert go(POISONED, allow_nan=True, **harmless).digest == go(POISONED, **harmless).digest


def test_a_diverged_training_is_told_and_can_be_read(clicks: Clicks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, out, err = run_here(
        "train",
        clicks.schedule,
        "--run",
        run,
        "--store",
        "local:1",
        "--trainers",
        2,
        *SMALL,
        "--lr",
        "1e20",
        "--row-optimizer",
        "sgd",
    )
    assert status == 2, err
    assert not out
    error = err.splitlines()[-1].removeprefix("foreload: error: ")
    saved = Run.open(run).saved_status()
    assert error.startswith(f"step {saved.step + 1}: the loss must be finite in every lane; got ")
    assert error.endswith(
        f"; training stopped in its state after step {saved.step}, with everything saved; train anew with a lower --lr or --dense-lr, or go on with "
        "--resume --allow-nan"
    )
    assert saved.state == "stopped"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["last_step"]) == ("stopped", saved.step + 1, saved.step)
    log_losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(log_losses) == saved.step + 1
    assert None not in log_losses
    assert len(done("digest", run).strip()) == 64
    told = refused("evaluate", run)
    assert re.fullmatch(rf"run {run}, evaluation step \d+: the loss must be finite in every lane; got nan in lane \d", told)
    done("train", clicks.schedule, "--run", run, "--resume", "--allow-nan")
    assert Run.open(run).saved_status().state == "ended"
