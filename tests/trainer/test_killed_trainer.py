"""`foreload train --copies 2` whose trainers are killed: the others go on, and the model is that of an undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from held import Hold
from small_job import arguments, summary, synthetic_schedule, train_undisturbed

from foreload.trainer.commands import status
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 60 steps in four lanes, with evaluation after each."""
    return synthetic_schedule(
        tmp_path_factory.mktemp("schedule"), 8500, lanes=4, slots=500, further="--eval-fraction 0.1 --epochs 2"
    )


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run with one trainer that nothing happened to."""
    run = train_undisturbed(schedule, tmp_path_factory.mktemp("run"))
    return str(summary(run)["digest"])


@pytest.mark.parametrize(
    ("trainers", "gone", "store"),
    [
        pytest.param(2, [1], "local:1", id="one of two"),
        pytest.param(3, [0, 2], "local:3", marks=pytest.mark.full, id="the leader of three and then another with parity"),
        pytest.param(2, [0], "local:3", marks=pytest.mark.full, id="the leader of two with parity"),
        pytest.param(4, [3, 1], "local:1", marks=pytest.mark.full, id="two of four"),
    ],
)
def test_the_others_go_on_and_the_model_is_that_of_an_undisturbed_run(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    hold: Hold,
    trainers: int,
    gone: list[int],
    store: str,
) -> None:
    run = tmp_path / "run"
    further = ["--store", store, "--trainers", str(trainers), "--copies", "2", "--digest", "--no-restart"]
    job = hold(arguments(schedule, run, *further))
    workers = job.workers
    for count, trainer in enumerate(gone):
        if count:
            job.advance(40)
        # Copies are filled while it trains.
        job.train_until(lambda reported: status.run(str(run)).survives is True)
        workers[trainer].kill()
        job.until(lambda lost=trainer: f"trainer {lost}: lost" in job.said)  # type: ignore[misc]
    ended, _, err = job.end()
    assert ended == 0, err
    lost = re.findall(r"trainer (\d): lost \(was killed by SIGKILL\); training goes on after step (\d+)", err)
    assert [int(trainer) for trainer, _ in lost] == gone
    assert summary(run)["digest"] == undisturbed
    assert summary(run)["steps"] == 120
    assert Run.open(run).saved_status().term == 1 + len(gone)
    events = list(read_events(run))
    assert [event["kind"] for event in events if not event["kind"].startswith(("lanes", "copies"))] == [
        *("call-began", "term-began"),
        *len(gone) * ("trainer-lost", "term-began"),
        "call-ended",
    ]
    assert [event["trainer"] for event in events if event["kind"] == "trainer-lost"] == gone
    taken = {lane for event in events if event["kind"] == "lanes-taken-over" for lane in event["lanes"]}
    assert taken >= {lane for lane in range(4) if lane * trainers // 4 in gone}
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert events[-1]["step"] == 119


@pytest.mark.full
def test_the_leader_that_is_asked_to_leave_hands_its_lanes_over(
    schedule: Path, undisturbed: str, tmp_path: Path, hold: Hold
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--trainers", "2", "--copies", "2", "--digest"), 10)
    job.workers[0].terminate()
    status, _, err = job.end()
    assert status == 0, err
    assert "lost" not in err
    assert (summary(run)["digest"], summary(run)["steps"], summary(run)["trainers"]) == (undisturbed, 120, 1)
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds == ["call-began", "term-began", "lanes-moved", "trainer-left", "term-began", "call-ended"]


@pytest.mark.full
def test_a_lane_that_nobody_else_has_is_lost_with_its_trainer(schedule: Path, tmp_path: Path, hold: Hold) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:1", "--trainers", "3", "--copies", "2", "--no-restart"), 5)
    for worker in job.workers[:2]:
        worker.kill()
    ended, _, err = job.end()
    assert ended == 3
    assert "lost, and with it the last steps of lane" in err
    lost, failed = list(read_events(run))[-2:]
    assert (lost["kind"], failed["kind"], failed["code"]) == ("trainer-lost", "call-failed", "lanes-lost")
    assert failed["cause"] in err
    assert "Traceback" not in err
