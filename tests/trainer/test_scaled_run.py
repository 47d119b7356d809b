"""`foreload scale`, and trainers that are killed, or asked to leave, while others come: the model is that of an undisturbed run."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command_line import Command, done, reached, refused
from small_job import arguments, summary, synthetic_schedule

from foreload.trainer.cli import main
from foreload.trainer.cluster.control import training_status
from foreload.trainer.run.event_log import read_events

STEPS, BATCH = 1500, 64

pytestmark = (
    pytest.mark.full
)  # a trainer takes seconds to start; one leaves in test_killed_trainer.py, and test_scaled.py has joining in one process
FURTHER = ("--peer-timeout", "60", "--digest")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps in four lanes, enough of them for trainers to start meanwhile."""
    return synthetic_schedule(
        tmp_path_factory.mktemp("schedule"), STEPS * BATCH, lanes=4, slots=500, further=f"--batch-size {BATCH}"
    )


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run with one trainer that nothing happened to."""
    run = tmp_path_factory.mktemp("run") / "undisturbed"
    assert main(arguments(schedule, run, "--store", "local:1", "--digest")) == 0
    assert summary(run)["steps"] == STEPS
    return str(summary(run)["digest"])


def hosts(run: Path) -> list[int]:
    """Of each lane, the trainer; none where the run does not train any more."""
    told = training_status(run)
    return [] if told is None else list(told.lanes)


def joining(job: Command) -> Iterator[psutil.Process]:
    """The trainers' processes that were started while others trained."""
    for worker in job.workers:
        if worker.environ()["FORELOAD_COMMANDS"] != "null":
            yield worker


def end(job: Command, run: Path, undisturbed: str) -> str:
    """The run ends with the undisturbed model, every step told once; returns what was said."""
    status, _, err = job.end()
    assert status == 0, err
    assert "Traceback" not in err
    told = summary(run)
    assert (told["digest"], told["steps"], told["state"]) == (undisturbed, STEPS, "ended")
    return err


@pytest.mark.parametrize(
    ("numbers", "further"),
    [
        pytest.param((2, 4, 2, 1), ("--store", "local:1"), id="to four and back"),
        pytest.param((2, 4, 2, 1), ("--store", "local:3", "--copies", "2"), id="with parity and copies"),
    ],
)
def test_scaling_changes_nothing(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    launched: Callable[..., Command],
    numbers: tuple[int, ...],
    further: tuple[str, ...],
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, *FURTHER, *further))
    job.until(reached(run, 5))
    assert "the number of trainers must be 1 to the schedule's lanes, 4; got 5" in refused("scale", run, 5)
    before = 1
    for number in numbers:
        said = done("scale", run, number).splitlines()
        assert (said[0], said[-1].split(":")[0]) == (f"{before} -> {number} trainers", "done")
        lanes = [event["lanes"] for event in read_events(run) if event["kind"] == "term-began"][-1]
        assert len(set(lanes)) == number
        before = number
    end(job, run, undisturbed)
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("trainer-joined") == kinds.count("trainer-left") > 0
    assert summary(run)["trainers"] == numbers[-1]
    assert "is not being trained" in refused("scale", run, 2)


def test_a_killed_trainer_is_replaced(schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command]) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, *FURTHER, "--store", "local:3", "--trainers", "2", "--copies", "2"))
    job.until(reached(run, 20))
    job.workers[0].kill()
    job.until(lambda: set(hosts(run)) == {1, 2})
    err = end(job, run, undisturbed)
    assert "trainer 0: lost (was killed by SIGKILL)" in err
    assert "trainer 2: joined after step" in err
    assert summary(run)["trainers"] == 2


def test_one_that_is_asked_to_leave_hands_its_lanes_over(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, *FURTHER, "--store", "local:1", "--trainers", "3"))
    job.until(reached(run, 20))
    job.workers[0].send_signal(signal.SIGTERM)
    job.until(lambda: 0 not in hosts(run))
    err = end(job, run, undisturbed)
    assert "trainer 0: left after step" in err
    assert "lost" not in err


def test_the_only_trainer_that_is_asked_to_leave_stops_cleanly(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, "--store", "local:1"))
    job.until(reached(run, 20))
    job.workers[0].send_signal(signal.SIGTERM)
    status, _, err = job.end()
    assert (status, summary(run)["state"]) == (0, "stopped"), err
    assert main(arguments(schedule, run, "--store", "local:1", "--resume", "--trainers", "2", "--digest")) == 0
    assert summary(run)["digest"] == undisturbed


@pytest.mark.parametrize("copies", ["1", "2"])
def test_one_that_is_killed_while_it_joins_is_not_missed(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command], copies: str
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, *FURTHER, "--store", "local:1", "--trainers", "2", "--copies", copies))
    job.until(reached(run, 5))
    done("scale", run, 3, "--no-wait")
    job.until(lambda: any(joining(job)))
    next(joining(job)).kill()
    # Another one is started.
    job.until(lambda: len(set(hosts(run))) == 3)
    err = end(job, run, undisturbed)
    assert re.search(r"trainer 2: (did not join: it was killed by SIGKILL|lost \(was killed by SIGKILL\))", err), err


def test_a_trainer_is_killed_while_another_joins(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, *FURTHER, "--store", "local:3", "--trainers", "2", "--copies", "2"))
    job.until(reached(run, 5))
    done("scale", run, 3, "--no-wait")

    def joined() -> bool:
        told = training_status(run)
        return told is not None and 2 in told.members

    job.until(joined)
    job.workers[0].kill()
    job.until(lambda: len(set(hosts(run))) == 3)
    err = end(job, run, undisturbed)
    assert "trainer 0: lost (was killed by SIGKILL)" in err
