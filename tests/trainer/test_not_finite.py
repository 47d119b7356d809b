"""A loss that is NaN or infinite: the run is left as a clean stop after the step before leaves it, whoever hosts the lane."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import SMALL, Clicks, done, refused, run_here, write_log
from training import Trained, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute import numerics
from foreload.trainer.run.directory import Run
from foreload.trainer.run.job import TrainJob

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
ROWS, BATCH, POISONED, HELD_OUT = 300, 20, 157, 290
STEP = POISONED // BATCH

_namespaces = itertools.count()


@pytest.fixture(autouse=True)
def _arithmetic() -> None:
    numerics.set_up(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three stores."""
    with LocalStores(3, tmp_path_factory.mktemp("stores")) as stores:
        yield stores


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Schedule]:
    """The schedule of a log with so many lanes, in which one row is poison: 14 steps an epoch, 2 epochs, evaluation after each."""
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


def job(**rest: object) -> TrainJob:
    return TrainJob.of(
        {
            "schedule": "-", "run": "-", "store": "-", "model": "model_cases:Poisoned", "dim": 4, "dense_optimizer": "Adam",
            "namespace": f"test-{next(_namespaces)}", **rest,
        }
    )  # fmt: skip


def lane_of_poison(schedule: Schedule, step: int) -> int:
    event = next(event for event in schedule.events(0) if event.kind == "train" and event.step == step)
    lanes = [lane for lane in range(schedule.header.lanes) if (schedule.lane(event, lane).dense > 60).any()]
    assert len(lanes) == 1
    return lanes[0]


@pytest.mark.parametrize(
    ("lanes", "trainers", "parity", "value"),
    [
        (1, 1, (1, 0), math.nan),
        (2, 1, (1, 0), math.inf),
        (2, 2, (2, 1), math.nan),
        (3, 3, (1, 0), -math.inf),
        (4, 2, (1, 0), math.nan),
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
    found = run(job(**options), trainers=trainers)
    assert found.failure is not None
    assert found.failure.startswith(f"step {STEP}: the loss must be finite in every lane; got ")
    assert found.failure.endswith(f" in lane {lane_of_poison(schedule, STEP)}")
    assert [report.step for report in found.steps] == list(range(STEP))
    stopped = run(job(**options), stop_after=lambda step: step == STEP - 1)
    assert (found.stopped_at, found.digest) == (STEP - 1, stopped.digest)
    # It fails there again, also where it goes on after a stop, and with other trainers.
    given = job(**options)
    again = run(given, trainers=trainers)
    again = run(given, resume=again)
    assert (again.steps, again.failure, again.digest) == ([], found.failure, stopped.digest)


def test_the_first_step_may_be_the_one(prepared: Callable[[int, int], Schedule], servers: LocalStores) -> None:
    schedule = prepared(2, 3)
    found = train(job(), schedule, servers.urls[:1], trainers=2)
    assert found.stopped_at == -1
    assert found.failure == f"step 0: the loss must be finite in every lane; got nan in lane {lane_of_poison(schedule, 0)}"


@pytest.mark.parametrize(("lanes", "trainers"), [(1, 1), (4, 2)])
def test_training_stops_after_an_evaluation_whose_loss_is_not_finite(
    prepared: Callable[[int, int], Schedule], servers: LocalStores, lanes: int, trainers: int
) -> None:
    schedule = prepared(lanes, HELD_OUT)
    found = train(job(), schedule, servers.urls[:1], trainers)
    last = found.steps[-1].step
    assert found.failure is not None
    assert found.failure.startswith("evaluation step 1: the loss must be finite in every lane; got nan in lane ")
    assert (found.stopped_at, last, found.evaluations) == (last, schedule.header.end_step // 2 - 1, [])
    assert found.digest == train(job(), schedule, servers.urls[:1], stop_after=lambda step: step == last).digest


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
    rests = Run.open(run).saved_status()
    assert error.startswith(f"step {rests.step + 1}: the loss must be finite in every lane; got ")
    assert error.endswith(
        f"; training stopped as after step {rests.step}, with everything saved; train anew with a lower --lr or --dense-lr, or go on with "
        "--resume --allow-nan"
    )
    assert rests.state == "stopped"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["last_step"]) == ("stopped", rests.step + 1, rests.step)
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == rests.step + 1
    assert None not in losses
    assert len(done("digest", run).strip()) == 64
    told = refused("evaluate", run)
    assert re.fullmatch(rf"run {run}, evaluation step \d+: the loss must be finite in every lane; got nan in lane \d", told)
    done("train", clicks.schedule, "--run", run, "--resume", "--allow-nan")
    assert Run.open(run).saved_status().state == "ended"
