"""`foreload train --resume=auto`: the same command starts a run, goes on with it however it ended, and tells how it did."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import SMALL, Command, done, reached, run_here
from held import Hold, held
from injection import CallFault, LauncherFault
from small_job import arguments, failing_model, summary, synthetic_schedule, train_undisturbed, under_torchrun

import foreload
from foreload.cache.client.local import LocalStores
from foreload.trainer.cluster.messages.control import AskStop, Stopping, ask
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events

HELD = 20


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps in four lanes."""
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 60 * 128, lanes=4, slots=500)


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(summary(train_undisturbed(schedule, tmp_path_factory.mktemp("run")))["digest"])


Words = Callable[..., list[str]]


@pytest.fixture
def words(schedule: Path, tmp_path: Path) -> Words:
    """The command: the same one each time."""

    def command(*further: str) -> list[str]:
        store = () if "--store" in further else ("--store", "local:3")
        return arguments(schedule, tmp_path / "run", *store, "--resume=auto", "--digest", *further)

    return command


def permanent(*command: object) -> str:
    """Do what ends with the status that says that trying again cannot help; returns what it says."""
    status, _, err = run_here(*command)
    assert status == 6, err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def calls(run: Path) -> int:
    """How many calls have begun to train a run."""
    return sum(event["kind"] == "call-began" for event in read_events(run))


def test_it_starts_a_run_and_then_tells_how_that_ended(words: Words, undisturbed: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = done(*words())
    assert summary(run)["digest"] == undisturbed
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    status, out, err = run_here(*words("--json", str(tmp_path / "told.json")))
    assert (status, out) == (0, first)
    assert f"run {run}: there is nothing to train; it is at the end of " in err
    assert json.loads((tmp_path / "told.json").read_text()) == summary(run)
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_the_digest_of_a_run_that_ended_without_one_is_computed(
    schedule: Path, words: Words, undisturbed: str, tmp_path: Path
) -> None:
    done(*arguments(schedule, tmp_path / "run", "--store", "local:3"))
    assert f"digest {undisturbed}\n" in done(*words())
    (tmp_path / "run" / "summary.json").unlink()
    assert run_here(*words())[:2] == (0, "")


def test_a_run_that_was_stopped_goes_on(words: Words, undisturbed: str, tmp_path: Path, hold: Hold) -> None:
    job = hold([word for word in words() if word != "--digest"], HELD)
    job.until(job.waits)
    # Another one that is started meanwhile waits for nobody.
    status, _, err = run_here(*words())
    assert status == 2
    assert "is being trained or read right now" in err
    assert ask(job.path, AskStop()) == Stopping()
    assert job.stopped()[0] == 0
    out = done(*job_words(words(), job.schedule.path))
    assert f"digest {undisturbed}\n" in out
    assert calls(tmp_path / "run") == 2


def job_words(words: list[str], schedule: Path) -> list[str]:
    """The command with another schedule."""
    return [words[0], str(schedule), *words[2:]]


def test_a_run_that_is_killed_ten_times_ends_in_the_undisturbed_model(words: Words, undisturbed: str, tmp_path: Path) -> None:
    """As under a process manager that starts the same command until its status is 0."""
    points = ["rows applied", "before fetch", "data leaves"]
    ends = []
    for time in range(10):
        fault = TrainerFault(time % 2, points[time % 3], 5 * time + 3, signal.SIGKILL)
        job = Command(*words("--trainers", "2", "--copies", "1", "--checkpoint-every", "4"), faults=[fault])
        status, _, err = job.end()
        assert "now that it is stopped" not in err
        ends.append(status)
    assert ends == [2] * 10
    status, out, err = run_here(*words("--trainers", "2", "--copies", "1", "--checkpoint-every", "4"))
    assert status == 0, err
    assert f"digest {undisturbed}\n" in out
    # The first one from the beginning; the others went on from there, or from whatever checkpoint was whole by then.
    assert calls(tmp_path / "run") == 11


@pytest.mark.parametrize(
    "fault",
    [
        CallFault("foreload.trainer.cluster.launcher:locked", signal.SIGKILL),
        CallFault("foreload.trainer.run.directory:write_json", signal.SIGKILL),
        CallFault("foreload.trainer.cluster.launcher:claimed", signal.SIGKILL),
        LauncherFault("trainer started", 1),
    ],
    ids=["before it has the folder", "before there is a manifest", "before it has the namespace", "before training"],
)
def test_one_whose_launcher_is_killed_before_it_trains_is_started_again(
    words: Words, undisturbed: str, tmp_path: Path, fault: Any
) -> None:
    job = Command(*words("--trainers", "1"), faults=[fault])
    job.process.wait()
    job.remains.kill()
    job.clear()
    assert f"digest {undisturbed}\n" in done(*words())


@pytest.mark.full
def test_under_torchrun_whoever_is_killed_all_start_again(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    with held(schedule, tmp_path / "held", HELD) as copy:
        command = arguments(
            copy.path, run, "--store", "local:1", "--follow", "--digest", "--resume=auto", "--checkpoint-every", "5"
        )
        job = launched("--max-restarts", "3", *under_torchrun(*command), module="torch.distributed.run")

        def of_rank(rank: str) -> list[psutil.Process]:
            return [process for process in job.remains.processes() if process.environ().get("RANK") == rank]

        def trains(call: int) -> bool:
            return reached(run, copy.step)() and calls(run) == call

        def first() -> psutil.Process:
            return psutil.Process(job.answer(run).trainers[0])

        # The first trainer, the launcher, and the second trainer, which is its own.
        for call, killed in enumerate((first, lambda: first().parent(), lambda: of_rank("1")[0]), 1):
            job.until(partial(trains, call))
            process = killed()
            assert process is not None
            copy.publish_through(copy.step + 5)
            process.kill()
        copy.release()
        status, _, err = job.end()
    assert status == 0, err
    assert (summary(run)["digest"], calls(run)) == (undisturbed, 4)


def test_rows_whose_folder_is_gone_are_neither_trained_on_nor_deleted(words: Words, tmp_path: Path) -> None:
    with LocalStores(1, tmp_path / "servers") as servers:
        store = ("--store", servers.urls[0], "--namespace", "mine")
        done(*words(*store))
        shutil.move(tmp_path / "run", tmp_path / "away")
        line = permanent(*words(*store))
        assert "mine" in line
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.move(tmp_path / "away", tmp_path / "run")
        done("digest", tmp_path / "run")


def test_it_never_deletes_a_run(words: Words, tmp_path: Path) -> None:
    done(*words())
    assert "never deletes a run" in permanent(*words("--overwrite"))
    assert summary(tmp_path / "run")["state"] == "ended"


@pytest.mark.parametrize(
    ("further", "said"),
    [
        (["--seed", "8"], "--seed: must be what the run was started with, 0; got 8"),
        (["--parity", "1+1"], "--parity: must be what the run was started with, 2+1; got 1+1"),
    ],
)
def test_another_training_than_the_run_was_is_refused_for_good(words: Words, hold: Hold, further: list[str], said: str) -> None:
    job = hold([word for word in words() if word != "--digest"], HELD)
    assert ask(job.path, AskStop()) == Stopping()
    job.stopped()
    assert said in permanent(*job_words(words(*further), job.schedule.path))


def test_a_setting_that_this_machine_does_not_allow_just_now_has_the_usual_status(words: Words) -> None:
    status, _, err = run_here(*words("--address", "192.0.2.1", "--trainers", "2"))
    assert (status, "--address: must be an address of this machine" in err) == (2, True)
    assert "--dim: must be" in permanent(*words("--dim", "0"))


def test_what_may_pass_has_the_usual_status(words: Words, tmp_path: Path) -> None:
    """A schedule that is yet to be prepared, a server that is yet to be started."""
    status, _, err = run_here(*job_words(words(), tmp_path / "nowhere"))
    assert (status, "is not a folder" in err) == (2, True)
    status, _, err = run_here(*words("--store", f"unix://{tmp_path}/none.sock", "--store-timeout", "1"))
    assert status == 2, err


def test_a_failure_that_comes_again_after_the_same_step_cannot_be_helped_by_trying(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text(failing_model(HELD))
    (tmp_path / "fails").write_text("(_ for _ in ()).throw(RuntimeError('out of ideas'))")
    monkeypatch.chdir(tmp_path)
    command = [word for word in words() if word not in ("--model-options", *SMALL[-2:])]
    command += ["--model", "fails.py:Fails"]
    status, _, err = run_here(*command)
    assert status == 2, err
    assert "out of ideas" in err
    assert "out of ideas" in permanent(*command)
    assert Run.open(tmp_path / "run").saved_status().step == 19


def test_a_loss_that_is_not_finite_again_cannot_be_helped_by_trying(words: Words) -> None:
    diverging = words("--dense-lr", "1e30")
    status, _, err = run_here(*diverging)
    assert status == 2, err
    assert permanent(*diverging) == err.splitlines()[-1]


def test_from_a_checkpoint_it_begins_once(words: Words, schedule: Path, undisturbed: str, tmp_path: Path) -> None:
    done(*arguments(schedule, tmp_path / "first", "--store", "local:1", "--checkpoint-every", "30"))
    checkpoint = tmp_path / "first" / "checkpoints" / "step-29"
    command = words("--from", str(checkpoint), "--checkpoint-every", "10", "--accept-model", "--accept-numerics")
    job = Command(*command, faults=[TrainerFault(0, "rows applied", 45, signal.SIGKILL)])
    assert job.end()[0] == 2
    status, out, err = run_here(*command)
    assert status == 0, err
    assert f"digest {undisturbed}\n" in out
    # Both calls are of one run, which was made of the checkpoint once.
    begun = [event for event in read_events(tmp_path / "run") if event["kind"] == "call-began"]
    assert [event["step"] >= 29 for event in begun] == [True, True]


def test_servers_that_were_added_since_need_not_be_named(words: Words, hold: Hold, undisturbed: str) -> None:
    job = hold([word for word in words() if word != "--digest"], HELD)
    done("stores", "add", job.path, "local")
    job.advance()
    assert ask(job.path, AskStop()) == Stopping()
    job.stopped()
    assert f"digest {undisturbed}\n" in done(*job_words(words(), job.schedule.path))


@pytest.mark.full
def test_urls_of_servers_that_a_run_has_left_are_those_it_has_now(
    schedule: Path, undisturbed: str, tmp_path: Path, words: Words, hold: Hold
) -> None:
    with LocalStores(3, tmp_path / "servers") as servers:
        old, new = servers.urls[:2], servers.urls[2]
        command = words("--store", ",".join(old), "--namespace", "here")
        job = hold([word for word in command if word != "--digest"], HELD)
        done("stores", "move", job.path, old[1], new)
        job.advance()
        assert ask(job.path, AskStop()) == Stopping()
        job.stopped()
        assert f"digest {undisturbed}\n" in done(*job_words(command, job.schedule.path))
        assert Run.open(job.path).placement.live == [0, 2]


def test_a_job_file_and_a_program_may_say_it(words: Words, schedule: Path, undisturbed: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[train]\nresume = "auto"\n')
    command = [word for word in words("--job", str(file)) if word != "--resume=auto"]
    assert f"digest {undisturbed}\n" in done(*command)
    assert f"digest {undisturbed}\n" in done(*command)
    file.write_text('[train]\nresume = "always"\n')
    assert '--resume: must be true, false or "auto"; got' in run_here(*command)[2]
    for _ in range(2):
        run = foreload.train(
            schedule, run=tmp_path / "by program", store="local:1", dim=4, lr=0.05, dense_ema=0.9,
            model_options={"bottom": "8-4", "top": "8-1"}, resume="auto",
        )  # fmt: skip
        assert run.digest() == undisturbed
