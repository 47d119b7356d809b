"""`foreload scale`, and trainers that are killed, or asked to leave, while others come: the model is that of an undisturbed run.

The schedule grows as the tests want it to, so that a run waits for trainers that are starting, however long that takes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Command, done, main, refused
from held import HeldRun, Hold
from injection import CallFault
from small_job import arguments, check_end, summary, synthetic_schedule, train_undisturbed

from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events

STEPS = 120


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four lanes, with few slots, in many segments."""
    folder = tmp_path_factory.mktemp("schedule")
    return synthetic_schedule(folder, STEPS * 128, lanes=4, slots=500, further="--segment-bytes 100KB")


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run with one trainer that nothing happened to."""
    run = train_undisturbed(schedule, tmp_path_factory.mktemp("run"))
    assert summary(run)["steps"] == STEPS
    return str(summary(run)["digest"])


Begin = Callable[..., HeldRun]


@pytest.fixture
def begin(schedule: Path, tmp_path: Path, hold: Hold) -> Begin:
    """Begins a run, given what stands on its command line beside the schedule."""

    def begun(*further: str) -> HeldRun:
        return hold(arguments(schedule, tmp_path / "run", "--peer-timeout", "60", "--digest", *further), 12, anew=True)

    return begun


@pytest.mark.parametrize(
    "further",
    [
        pytest.param(("--store", "local:1"), id="alone", marks=pytest.mark.full),
        pytest.param(("--store", "local:3", "--copies", "2"), id="with parity and copies"),
    ],
)
def test_scaling_up_and_down_changes_nothing(begin: Begin, undisturbed: str, further: tuple[str, ...]) -> None:
    run = begin(*further)
    assert "the number of trainers must be 1 to the schedule's lanes, 4; got 5" in refused("scale", run.path, 5)
    for number, members in ((2, (0, 1)), (4, (0, 1, 2, 3))):
        assert f"-> {number} trainers" in done("scale", run.path, number, "--no-wait")
        run.members(*members)
        run.hosting(*members)
    for number in (2, 1):
        done("scale", run.path, number, "--no-wait")
        run.hosting(*range(number))
    assert "done: 1 trainer" in done("scale", run.path, 1)
    check_end(run, undisturbed, trainers=1)
    kinds = [event["kind"] for event in read_events(run.path)]
    assert kinds.count("trainer-joined") == kinds.count("trainer-left") == 3
    assert "is not being trained" in refused("scale", run.path, 2)


def test_a_trainer_that_is_to_be_replaced_hands_its_lanes_over(begin: Begin, undisturbed: str) -> None:
    run = begin("--store", "local:1", "--trainers", "2")
    assert "trainer 7 does not train, or is leaving; the trainers are 0, 1" in refused("scale", run.path, "--replace", 7)
    assert "another trainer for 0" in done("scale", run.path, "--replace", 0, "--no-wait")
    run.hosting(1)
    run.members(1, 2)
    run.hosting(1, 2)
    assert "done: 2 trainers" in done("scale", run.path, 2)
    err = check_end(run, undisturbed, trainers=2)
    assert "trainer 0: left after step" in err
    assert "lost" not in err
    assert refused("scale", run.path, "--replace", 1).endswith("is not being trained")
    assert "one of the arguments N --replace is required" in refused("scale", run.path)
    assert "not allowed with argument" in refused("scale", run.path, 2, "--replace", 1)


@pytest.mark.full
def test_a_killed_trainer_is_replaced(begin: Begin, undisturbed: str) -> None:
    run = begin("--store", "local:3", "--trainers", "2", "--copies", "2")
    run.workers[0].kill()
    run.members(1, 2)
    run.hosting(1, 2)
    err = check_end(run, undisturbed, trainers=2)
    assert "trainer 0: lost (was killed by SIGKILL)" in err
    assert "trainer 2: joined after step" in err


@pytest.mark.full
def test_one_that_is_asked_to_leave_hands_its_lanes_over(begin: Begin, undisturbed: str) -> None:
    run = begin("--store", "local:1", "--trainers", "3")
    run.workers[0].send_signal(signal.SIGTERM)
    run.hosting(1, 2)
    err = check_end(run, undisturbed, trainers=2)
    assert "trainer 0: left after step" in err
    assert "lost" not in err


@pytest.mark.full
def test_the_only_trainer_that_is_asked_to_leave_stops_cleanly(
    begin: Begin, schedule: Path, undisturbed: str, tmp_path: Path
) -> None:
    run = begin("--store", "local:1")
    run.workers[0].send_signal(signal.SIGTERM)
    run.process.wait()
    assert summary(run.path)["state"] == "stopped"
    run.schedule.release()
    assert main(arguments(run.schedule.path, run.path, "--resume", "--trainers", "2", "--digest")) == 0
    assert summary(run.path)["digest"] == undisturbed


@pytest.mark.full
@pytest.mark.parametrize("copies", ["1", "2"])
@pytest.mark.parametrize("when", ["as it starts", "as a member"])
def test_one_that_is_killed_while_it_joins_is_not_missed(begin: Begin, undisturbed: str, copies: str, when: str) -> None:
    run = begin("--store", "local:1", "--trainers", "2", "--copies", copies)
    done("scale", run.path, 3, "--no-wait")
    run.until(lambda: any(run.joining))
    if when == "as a member":
        run.members(0, 1, 2)
    next(run.joining).kill()
    # Another one is started.
    run.members(0, 1, 3)
    run.hosting(0, 1, 3)
    err = check_end(run, undisturbed, trainers=3)
    told = "did not join: it was killed by SIGKILL" if when == "as it starts" else r"lost \(was killed by SIGKILL\)"
    assert re.search(f"trainer 2: {told}", err), err


@pytest.mark.full
def test_a_trainer_is_killed_while_another_joins(begin: Begin, undisturbed: str) -> None:
    run = begin("--store", "local:3", "--trainers", "2", "--copies", "2")
    done("scale", run.path, 3, "--no-wait")
    run.members(0, 1, 2)
    run.workers[0].kill()
    run.members(1, 2, 3)
    run.hosting(1, 2, 3)
    assert "trainer 0: lost (was killed by SIGKILL)" in check_end(run, undisturbed, trainers=3)


@pytest.mark.parametrize(
    ("change", "copies"),
    [("leave", "1"), ("scale", "2"), *(pytest.param(*case, marks=pytest.mark.full) for case in (("leave", "2"), ("scale", "1")))],
)
def test_a_launcher_that_is_killed_while_lanes_change_hands_loses_no_step(
    schedule: Path, undisturbed: str, tmp_path: Path, hold: Hold, change: str, copies: str
) -> None:
    """The term is over, and the next one is stated by nobody: the trainers go on as they were, and stop."""
    words = arguments(
        schedule, tmp_path / "run", "--store", "local:3", "--trainers", "3", "--copies", copies, "--peer-timeout", "60"
    )
    run = hold(words, 12, faults=[CallFault("foreload.trainer.cluster.coordinator.membership:clear_agreement", signal.SIGKILL)])
    if change == "leave":
        run.workers[1].send_signal(signal.SIGTERM)
    else:
        done("scale", run.path, 2, "--no-wait")
    run.process.wait()
    run.schedule.release()
    _, _, err = Command.end(run)
    assert "its launcher was killed; stopped after step" in err
    assert Run.open(run.path).saved_status().state == "stopped"
    assert main(arguments(run.schedule.path, run.path, "--resume", "--trainers", "2", "--digest")) == 0
    assert summary(run.path)["digest"] == undisturbed
