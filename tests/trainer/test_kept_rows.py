"""Runs that cannot go on though no row is lost: they keep what their servers lack, and `--resume` ends in the undisturbed model."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command_line import Command, refused, run_here
from grids import covering
from held import Hold, send, standing
from injection import CallFault
from small_job import arguments, failing_model, summary, synthetic_schedule, train_undisturbed

from foreload.cache.client.local import LocalStores
from foreload.trainer.cluster.messages.faults import Fault, TrainerFault
from foreload.trainer.run.directory import STORES, Run
from foreload.trainer.run.event_log import read_events
from foreload.trainer.saved.kept_lanes import folder_of

HELD = 40  # the step at which runs are held
IMPATIENT = ("--store-patience", "0", "--store-timeout", "1")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So few slots that rows come and go in each step; an evaluation at the end."""
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 9000, lanes=3, slots=600, further="--eval-fraction 0.05")


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(summary(train_undisturbed(schedule, tmp_path_factory.mktemp("run")))["digest"])


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[LocalStores]:
    """Three servers, none of which the run started."""
    with LocalStores(3, tmp_path / "servers") as stores:
        yield stores
        send(stores, signal.SIGCONT)


def store_of(servers: LocalStores, parity: str) -> tuple[str, ...]:
    """The servers as a run has them."""
    urls = servers.urls if parity != "off" else servers.urls[:2]
    return "--store", ",".join(urls), "--parity", parity


def state(run: Path) -> str:
    """As `foreload status` tells it."""
    status, out, _ = run_here("status", run)
    assert status == 0
    return out.splitlines()[0].partition(": ")[2].partition(",")[0].partition(" after")[0]


def resumed(schedule: Path, run: Path, store: tuple[str, ...]) -> tuple[int, str]:
    """Go on: the status, and what was said."""
    status, _, err = run_here(*arguments(schedule, run, *store, "--resume", "--digest"))
    return status, err


@pytest.mark.parametrize(
    ("parity", "trainers", "copies"),
    covering([(parity, *held) for parity in ("2+1", "off") for held in ((1, 1), (2, 1), (3, 2), (2, 2), (3, 3))], 7),
)
def test_a_run_whose_servers_all_stand_still_is_kept_and_goes_on(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, hold: Hold, parity: str, trainers: int, copies: int
) -> None:
    run, store = tmp_path / "run", store_of(servers, parity)
    job = hold(arguments(schedule, run, *store, *IMPATIENT, "--trainers", str(trainers), "--copies", str(copies)), HELD)
    step = job.step
    send(servers, signal.SIGSTOP)
    status, _, err = job.end()
    assert status == 2, err
    assert "Traceback" not in err
    assert "the rows that its servers lack are kept in" in err
    kept, failed = list(read_events(run))[-2:]
    assert (kept["kind"], kept["step"], failed["kind"]) == ("rows-kept", step, "call-failed")
    # While they stand still nothing can be done, and nothing is lost by trying.
    assert state(run) == "kept"
    refused(*arguments(schedule, run, *store, *IMPATIENT, "--resume"))
    for command in (
        ["evaluate", run],
        ["digest", run],
        ["export", run, "--out", tmp_path / "export"],
        ["checkpoint", "save", run],
    ):
        assert "ended while its servers lacked rows; it keeps these in" in refused(*command)
    assert state(run) == "kept"
    send(servers, signal.SIGCONT)
    status, err = resumed(schedule, run, store)
    assert status == 0, err
    assert "the rows that it kept are on its servers again" in err
    told = summary(run)
    assert (told["digest"], told["state"]) == (undisturbed, "ended")
    assert not folder_of(run).exists()
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 <= step


@pytest.mark.parametrize("parity", ["2+1", pytest.param("off", marks=pytest.mark.full)])
@pytest.mark.parametrize("how", ["killed", *(pytest.param(how, marks=pytest.mark.full) for how in ("leaves", "joins"))])
def test_servers_that_stand_still_while_lanes_change_hands(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, hold: Hold, parity: str, how: str
) -> None:
    """A trainer is lost, leaves, or gives lanes to one that joins: nobody can take its lanes over."""
    run, store = tmp_path / "run", store_of(servers, parity)
    job = hold(arguments(schedule, run, *store, *IMPATIENT, "--trainers", "2", "--copies", "2", "--no-restart"), HELD)
    send(servers, signal.SIGSTOP)
    if how == "joins":
        status, _, err = run_here("scale", run, "3", "--no-wait")
        assert status == 0, err
    else:
        job.workers[1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    status, _, err = job.end()
    send(servers, signal.SIGCONT)
    assert status == 2, err
    assert "Traceback" not in err
    assert state(run) == "kept"
    status, err = resumed(schedule, run, store)
    assert status == 0, err
    assert summary(run)["digest"] == undisturbed


@pytest.mark.parametrize("parity", ["2+1", pytest.param("off", marks=pytest.mark.full)])
def test_servers_that_are_silent_when_everything_is_to_be_written_back(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, hold: Hold, parity: str
) -> None:
    """A signal asks for a stop, and then they stand still: what is in slots cannot be written."""
    run, store = tmp_path / "run", store_of(servers, parity)
    job = hold(arguments(schedule, run, *store, *IMPATIENT, "--trainers", "2"), HELD)
    send(servers, signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    assert Command.end(job)[0] == 2
    assert state(run) == "kept"
    send(servers, signal.SIGCONT)
    status, err = resumed(schedule, run, store)
    assert status == 0, err
    assert summary(run)["digest"] == undisturbed


@pytest.mark.parametrize(
    ("parity", "how"), covering([(parity, how) for parity in ("2+1", "off") for how in ("--resume", "--resume=auto")], 3)
)
def test_servers_that_are_silent_after_the_last_step(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, parity: str, how: str
) -> None:
    """Once they have the rows, the next call ends the run, with the last evaluation."""
    run, store = tmp_path / "run", store_of(servers, parity)
    fault = TrainerFault(0, "last write-back", 0, signal.SIGSTOP)
    job = Command(*arguments(schedule, run, *store, *IMPATIENT, "--peer-timeout", "300"), faults=[fault])
    trainer = standing(job, run, 0)
    send(servers, signal.SIGSTOP)
    trainer.resume()
    assert job.end()[0] == 2
    assert state(run) == "kept"
    send(servers, signal.SIGCONT)
    status, out, err = run_here(*arguments(schedule, run, *store, how, "--digest"))
    assert status == 0, err
    assert f"digest {undisturbed}\n" in out
    assert (summary(run)["digest"], state(run)) == (undisturbed, "ended")


@pytest.mark.parametrize(
    ("function", "parity"),
    [
        case if case in (("take_over_lost", "2+1"), ("keep_schedule", "off")) else pytest.param(*case, marks=pytest.mark.full)
        for function in ("take_over_lost", "write_dense", "forget_kept_lanes", "keep_schedule")
        for parity in ("2+1", "off")
        for case in [(function, parity)]
    ],
)
def test_who_brings_the_rows_to_the_servers_may_die_and_another_does(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, hold: Hold, parity: str, function: str,
    launched: Callable[..., Command],
) -> None:  # fmt: skip
    run, store = tmp_path / "run", store_of(servers, parity)
    job = hold(arguments(schedule, run, *store, *IMPATIENT), HELD)
    send(servers, signal.SIGSTOP)
    assert job.end()[0] == 2
    send(servers, signal.SIGCONT)
    fault = CallFault(f"foreload.trainer.saved.kept_rows:{function}", signal.SIGKILL)
    command = launched(*arguments(schedule, run, *store, "--resume", "--digest"), faults=[fault])
    assert command.end()[0] == -signal.SIGKILL
    status, err = resumed(schedule, run, store)
    assert status == 0, err
    assert summary(run)["digest"] == undisturbed


@pytest.mark.parametrize("parity", ["2+1", pytest.param("off", marks=pytest.mark.full)])
def test_rows_that_are_gone_from_the_servers_are_missed(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, hold: Hold, parity: str
) -> None:
    run, store = tmp_path / "run", store_of(servers, parity)
    job = hold(arguments(schedule, run, *store, *IMPATIENT), HELD)
    send(servers, signal.SIGSTOP)
    assert job.end()[0] == 2
    send(servers, signal.SIGKILL)
    for shard, process in enumerate(list(servers._processes.values())):
        process.wait()
        assert servers.restart(shard)
    line = refused(*arguments(schedule, run, *store, "--resume"))
    assert f"those kept in {folder_of(run)} are of no use: delete that folder, and --resume goes on from " in line
    assert state(run) == "kept"
    shutil.rmtree(folder_of(run))
    status, err = resumed(schedule, run, store)
    assert status == 0, err
    assert summary(run)["digest"] == undisturbed


def test_a_damaged_file_is_refused_before_anything_is_written(
    schedule: Path, servers: LocalStores, tmp_path: Path, hold: Hold
) -> None:
    run, store = tmp_path / "run", store_of(servers, "2+1")
    job = hold(arguments(schedule, run, *store, *IMPATIENT), HELD)
    send(servers, signal.SIGSTOP)
    assert job.end()[0] == 2
    send(servers, signal.SIGCONT)
    for path in sorted(folder_of(run).iterdir()):
        whole = path.read_bytes()
        for damaged in (whole[:-9], whole[: len(whole) // 2] + b"?" + whole[len(whole) // 2 + 1 :]):
            path.write_bytes(damaged)
            line = refused(*arguments(schedule, run, *store, "--resume"))
            assert path.name in line
            assert "damaged" in line
        path.write_bytes(whole)
    assert resumed(schedule, run, store)[0] == 0


@pytest.mark.parametrize(
    ("trainers", "copies", "store", "how"),
    covering(
        [
            (*held, store, how)
            for held in ((1, 1), (2, 1), (2, 2))
            for store in ("local:3", "local:1")
            for how in ("1 / 0", "os._exit(3)")
        ],
        7,
    ),
)
def test_a_model_that_fails_ends_the_run_as_a_stop_does(
    schedule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: int, copies: int, store: str, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text(failing_model(HELD))
    words = [
        "train",
        schedule,
        "--store",
        store,
        "--model",
        "fails.py:Fails",
        "--dim",
        4,
        "--trainers",
        trainers,
        "--copies",
        copies,
    ]
    words += ["--history", "off", "--no-report"]
    status, _, err = run_here(*words, "--run", "whole", "--digest")
    assert status == 0, err
    (tmp_path / "fails").write_text(how)
    line = refused(*words, "--run", "run")
    assert "with everything saved" in line
    assert ("division by zero" if "/" in how else "called os._exit(3) (fails.py, line 13)") in line
    (tmp_path / "fails").unlink()
    assert Run.open("run").saved_status().state == "stopped"
    status, _, err = run_here(*words, "--run", "run", "--resume", "--digest")
    assert status == 0, err
    assert summary(Path("run"))["digest"] == summary(Path("whole"))["digest"]


def test_local_servers_that_stand_still_are_used_as_they_are_by_the_next_call(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    faults = [Fault(HELD, shard, signal.SIGSTOP) for shard in range(3)]
    words = arguments(schedule, run, "--store", "local:3", "--trainers", "2")
    command = launched(*words, *IMPATIENT, faults=faults)
    command.process.wait()
    assert state(run) == "kept"
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    send(stores, signal.SIGCONT)
    status, err = resumed(schedule, run, ("--store", "local:3"))
    assert status == 0, err
    assert summary(run)["digest"] == undisturbed
    command.communicate()


def test_the_launcher_is_killed_while_trainers_keep(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, hold: Hold
) -> None:
    run, store = tmp_path / "run", store_of(servers, "2+1")
    held = TrainerFault(0, "kept", 0, signal.SIGSTOP)
    job = hold(arguments(schedule, run, *store, *IMPATIENT, "--trainers", "2"), HELD, faults=[held])
    trainer = job.status.trainers[0]
    assert trainer is not None
    send(servers, signal.SIGSTOP)
    job.schedule.release()
    process = psutil.Process(trainer)
    job.until(lambda: process.status() == psutil.STATUS_STOPPED)
    job.process.kill()
    process.resume()
    job.remains.wait_for_python()
    assert state(run) == "kept"
    send(servers, signal.SIGCONT)
    status, err = resumed(schedule, run, store)
    assert status == 0, err
    assert summary(run)["digest"] == undisturbed
    job.communicate()
