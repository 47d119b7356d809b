"""`foreload train` while its schedule is still prepared, is removed, or is prepared anew: the same model, or a stop that --resume continues."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Command, done, error_of, main, reached, status_of
from held import held, standing
from small_job import arguments, summary, train_undisturbed

from foreload.base.files import write_json
from foreload.pipelines import prepare
from foreload.pipelines.schedule.format import (
    FAILED,
)
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.run.directory import Run

LAST_STEP = 59
OPTIONS = (
    "--format synthetic --rows 4224 --eval-fraction 0.1 --batch-size 128 --lanes 2 --slots 900 --epochs 2 --segment-bytes 300KB"
)


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 30 steps in two lanes, each in several segments, with evaluation after each."""
    out = tmp_path_factory.mktemp("schedule") / "clicks"
    prepare.run([*OPTIONS.split(), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    """The digest of a training that nothing happened to."""
    run = train_undisturbed(schedule, tmp_path_factory.mktemp("run"))
    return summary(run)["digest"]


def put_back(schedule: Path, path: Path) -> None:
    """The whole schedule, as another `prepare` makes it."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(schedule, path)


def check_going_on(path: Path, run: Path, undisturbed: object) -> None:
    """Assert that --resume ends with the same model."""
    assert main(arguments(path, run, "--resume", "--digest")) == 0
    assert summary(run)["digest"] == undisturbed


def test_a_follower_trains_what_is_published_and_waits_for_the_rest(
    schedule: Path, undisturbed: object, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    with held(schedule, tmp_path / "held", 9) as copy:
        followed = copy.path
        job = launched(*arguments(followed, run, "--store", "local:1", "--trainers", "2", "--follow", "--digest"))
        job.until(reached(run, copy.step))
        copy.release()
        status, _, err = job.end()
    assert status == 0, err
    assert summary(run)["digest"] == undisturbed


@pytest.mark.parametrize("trainers", [pytest.param("1", marks=pytest.mark.full), "2"])
@pytest.mark.full
def test_a_follower_that_waits_heeds_ctrl_c_and_goes_on_later(
    schedule: Path, undisturbed: object, tmp_path: Path, launched: Callable[..., Command], trainers: str
) -> None:
    run = tmp_path / "run"
    with held(schedule, tmp_path / "held", 9) as copy:
        followed = copy.path
        last = copy.step
        job = launched(*arguments(followed, run, "--store", "local:1", "--trainers", trainers, "--follow"))
        job.interrupt(reached(run, last))
        status, _, err = job.end()
    assert status == 130, err
    assert f"stopped after step {last}; go on with: " in err
    assert Run.open(run).saved_status().step == last
    put_back(schedule, followed)
    check_going_on(followed, run, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("stopped", [False, True], ids=["and it comes", "and a stop is asked for"])
def test_a_trainer_joins_while_a_segment_is_waited_for(
    schedule: Path, undisturbed: object, tmp_path: Path, launched: Callable[..., Command], stopped: bool
) -> None:
    run = tmp_path / "run"

    def joined() -> bool:
        told = status_of(run)
        return told is not None and told.members == (0, 1)

    with held(schedule, tmp_path / "held", 9) as copy:
        followed = copy.path
        last = copy.step
        wanted = () if stopped else ("--digest",)
        job = launched(*arguments(followed, run, "--store", "local:1", "--follow", *wanted))
        job.until(reached(run, last))
        done("scale", run, 2, "--no-wait")
        job.until(joined)
        if stopped:
            job.interrupt(joined)
        else:
            copy.release()
        status, _, err = job.end()
    assert status == (130 if stopped else 0), err
    if stopped:
        assert Run.open(run).saved_status().step == last
        put_back(schedule, followed)
        check_going_on(followed, run, undisturbed)
    assert summary(run)["digest"] == undisturbed


@pytest.mark.full
@pytest.mark.parametrize("how", ["killed", "failed", "removed"])
def test_a_follower_stops_where_nobody_prepares_any_more_and_goes_on_when_it_is_prepared_again(
    schedule: Path, undisturbed: object, tmp_path: Path, launched: Callable[..., Command], how: str
) -> None:
    run = tmp_path / "run"
    with held(schedule, tmp_path / "held", 9) as copy:
        followed = copy.path
        job = launched(*arguments(followed, run, "--store", "local:1", "--trainers", "2", "--follow"))
        last = copy.step
        job.until(reached(run, last))
        if how == "failed":
            write_json(followed / FAILED, {"error": "clicks.csv, line 7: label: must be 0 or 1"})
        elif how == "removed":
            shutil.rmtree(followed)
    status, _, err = job.end()
    why = "clicks.csv, line 7" if how == "failed" else "is not complete, and no `foreload prepare` is working on it"
    assert why in error_of(status, err)
    assert f"training stopped after step {last}" in err
    assert Run.open(run).saved_status().step == last
    # A call that begins now finds nobody at work either, and ends at once.
    if how == "killed":
        assert main(arguments(followed, run, "--resume", "--follow")) == 2
        assert Run.open(run).saved_status().step == last
    put_back(schedule, followed)
    check_going_on(followed, run, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("how", ["removed", "prepared anew", "prepared from other data"])
def test_a_schedule_that_is_removed_or_replaced_under_a_training_is_used_no_more(
    schedule: Path, undisturbed: object, tmp_path: Path, launched: Callable[..., Command], how: str
) -> None:
    run, used = tmp_path / "run", tmp_path / "used"
    shutil.copytree(schedule, used)
    # One trainer stands still in a step, and the other waits for it, until the folder is another.
    stand = TrainerFault(1, "exchanged", 3, signal.SIGSTOP)
    words = arguments(used, run, "--store", "local:1", "--trainers", "2", "--peer-timeout", "600", "--digest")
    job = launched(*words, faults=[stand])
    trainer = standing(job, run, 1)
    if how == "removed":
        shutil.rmtree(used)
    else:
        seed = "1" if how == "prepared from other data" else "0"
        prepare.run([*OPTIONS.split(), "--seed", seed, "--out", str(used), "--overwrite"])
    trainer.resume()
    status, _, err = job.end()
    if how == "prepared anew":
        assert status == 0, err
        assert summary(run)["digest"] == undisturbed
        return
    # What the run keeps of its schedule cannot be brought up to date, which is told, too.
    told = [
        line for line in err.splitlines() if not line.startswith("the run cannot keep a copy of what it needs of its schedule")
    ]
    assert f"{used}" in error_of(status, "\n".join(told))
    assert "training stopped after step " in err
    stopped = Run.open(run).saved_status().step
    assert stopped < LAST_STEP
    assert main(arguments(used, run, "--resume")) == 2
    assert Run.open(run).saved_status().step == stopped
    put_back(schedule, used)
    check_going_on(used, run, undisturbed)
