"""`foreload train` as a user starts it: processes, signals, failures, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from command_line import Command, main, reached, refused_apart
from held import Hold, held
from injection import STARTED, LauncherFault
from small_job import arguments, scheduler_environment, summary, synthetic_schedule, train_undisturbed, under_torchrun
from waiting import DEADLINE_SECONDS

from foreload.cache.client.local import LocalStores
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.compute.numerics import ENVIRONMENTS, fingerprint
from foreload.trainer.run.directory import STORES, Run


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 40 steps in four lanes, with evaluation after each."""
    folder = tmp_path_factory.mktemp("schedule")
    return synthetic_schedule(folder, 5600, lanes=4, slots=500, further="--eval-fraction 0.1 --epochs 2")


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one trainer and one store shard that nothing happened to."""
    return train_undisturbed(schedule, tmp_path_factory.mktemp("run"))


def test_a_run_leaves_what_the_commands_then_read(
    schedule: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = summary(undisturbed)
    assert (told["steps"], told["samples"], told["state"]) == (80, 10080, "ended")
    assert told["rows_fetched"] > 0
    # Every arrival's residency ended once.
    assert told["rows_written_back"] == told["rows_arrived"]
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(80))
    assert list((undisturbed / "tensorboard").iterdir())
    capsys.readouterr()

    assert main(["digest", str(undisturbed)]) == 0
    assert capsys.readouterr().out.strip() == told["digest"]

    assert main(["evaluate", str(undisturbed), "--json", str(tmp_path / "metrics.json")]) == 0
    evaluated = json.loads((tmp_path / "metrics.json").read_text())
    assert {name: evaluated[name] for name in ("log_loss", "auc", "normalized_entropy")} == {
        name: told[name] for name in ("log_loss", "auc", "normalized_entropy")
    }

    assert main(["export", str(undisturbed), "--out", str(tmp_path / "export")]) == 0
    about = json.loads((tmp_path / "export" / "export.json").read_text())
    for table in about["tables"]:
        rows = pq.read_table(tmp_path / "export" / table["file"])
        ids = rows["id"].to_pylist()
        assert ids == sorted(set(ids))
        assert len(ids) == table["rows"]
        assert {len(weight) for weight in rows["weight"].to_pylist()} <= {4}

    assert main(["stores", "status", str(undisturbed)]) == 0
    assert "shard 0  at rest" in capsys.readouterr().out


def test_ctrl_c_stops_after_a_step_and_resuming_gives_the_same_model(
    schedule: Path, undisturbed: Path, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    first = hold(arguments(schedule, run, "--store", "local:2", "--trainers", "2"), anew=True)
    # As a terminal does it: to the launcher. Trainers have a session of their own.
    first.process.send_signal(signal.SIGINT)
    status, _, err = first.stopped()
    assert status == 130, err
    assert "--resume" in err
    saved = Run.open(run).saved_status()
    assert saved.state == "stopped"
    assert saved.step == first.step
    # What stopped there can be read, too.
    assert main(["evaluate", str(run)]) == 0
    capsys.readouterr()

    # Trained on by another number of trainers.
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--trainers", "3", "--digest"]) == 0
    assert summary(run)["digest"] == summary(undisturbed)["digest"]
    assert summary(run)["steps"] == 80
    assert summary(run)["rows_flushed"] > 0


@pytest.mark.full
def test_a_terminal_that_closes_stops_the_run_as_ctrl_c_does(
    schedule: Path, undisturbed: Path, tmp_path: Path, hold: Hold
) -> None:
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    # What it prints before it is held fits into the terminal's buffer, so nobody has to read it.
    job = hold(arguments(schedule, run, "--store", "local:2", "--trainers", "2"), terminal=os.ttyname(theirs))
    os.close(theirs)
    os.close(ours)
    assert job.stopped()[0] == 128 + signal.SIGHUP
    assert Run.open(run).saved_status().state == "stopped"
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert summary(run)["digest"] == summary(undisturbed)["digest"]


@pytest.mark.full
def test_a_run_that_goes_on_in_other_numerics_says_since_when(
    schedule: Path, tmp_path: Path, launched: Callable[..., Command], hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    first = hold(arguments(schedule, run, "--store", "local:1"), 5)
    first.process.send_signal(signal.SIGINT)
    assert first.stopped()[0] == 130
    begun = Run.open(run).manifest
    since = Run.open(run).saved_status().step + 1

    elsewhere = ("train", str(schedule), "--run", str(run), "--resume", "--accept-numerics", "--trainers", "2", "--digest")
    status, out, err = launched(*elsewhere, MKL_CBWR="COMPATIBLE").end()
    assert status == 0, err
    manifest = Run.open(run).manifest
    assert manifest.fingerprint is not None
    assert manifest.fingerprint["mkl_cbwr"] == "COMPATIBLE"
    kept = [{"step": 0, "fingerprint": begun.fingerprint}, {"step": since, "fingerprint": manifest.fingerprint}]
    assert list(manifest.mixed_numerics) == summary(run)["mixed_numerics"] == kept
    told = f"of mixed numerics since step {since} (mkl_cbwr"
    assert out.splitlines()[-1].startswith(told)

    capsys.readouterr()
    assert main(["digest", str(run), "--json", str(tmp_path / "digest.json")]) == 0
    digest, mixed = capsys.readouterr().out.splitlines()
    assert digest == summary(run)["digest"]
    assert mixed.startswith(told)
    assert json.loads((tmp_path / "digest.json").read_text())["mixed_numerics"] == kept


def test_a_trainer_that_dies_ends_the_job_with_one_line_and_no_process_left(
    schedule: Path, undisturbed: Path, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:1", "--trainers", "2", "--copies", "1"), 3)
    job.workers[1].kill()
    status, _, err = job.end()
    assert status == 2
    lines = [line for line in err.splitlines() if line.startswith("foreload: error:")]
    assert len(lines) == 1
    assert "trainer 1 (lanes 2, 3): was killed by SIGKILL; the others were stopped" in lines[0]
    assert "Traceback" not in err
    # There is no dense part yet; nothing was saved, and nothing is lost but time.
    assert main(["digest", str(run)]) == 2
    assert "never stopped cleanly" in capsys.readouterr().err
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert "resumed from the beginning" in capsys.readouterr().err
    assert summary(run)["digest"] == summary(undisturbed)["digest"]


def kill(*processes: psutil.Process) -> None:
    """End processes at once, as kill -9 does."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)


def servers_of(run: Path) -> list[psutil.Process]:
    """The local servers of a run that are alive."""
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    return [psutil.Process(pid) for pid in stores.pids if pid is not None]


@pytest.mark.full
@pytest.mark.parametrize("but_servers", [False, True], ids=["everything", "everything but the servers"])
def test_whatever_is_killed_resuming_goes_on_from_the_last_clean_stop_or_says_how(
    schedule: Path,
    undisturbed: Path,
    tmp_path: Path,
    hold: Hold,
    capsys: pytest.CaptureFixture[str],
    but_servers: bool,
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:2"), 3)
    job.process.send_signal(signal.SIGTERM)
    assert job.stopped()[0] == 143
    saved = Run.open(run).saved_status()
    # Rows have been written back since.
    job = hold(["train", str(schedule), "--run", str(run), "--resume"], saved.step + 20)
    servers = servers_of(run)
    kill(*(process for process in job.remains.processes() if process not in servers), *(() if but_servers else servers))
    if but_servers:
        for command in (["digest", str(run)], ["train", str(schedule), "--run", str(run), "--resume"]):
            assert main(command) == 2
            err = capsys.readouterr().err
            assert f"its dense part is of step {saved.step}, where it last stopped cleanly" in err
            assert "rows on store shard 0, 1 are of later steps (steps up to " in err
            assert "--overwrite" not in err
            assert all(str(server.pid) in err for server in servers)
            assert servers_of(run) == servers
        kill(*servers)
    job.schedule.release()
    # What stands on the disk is that stop.
    assert main(["digest", str(run)]) == 0
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert f"resumed after step {saved.step}" in capsys.readouterr().err
    assert summary(run)["digest"] == summary(undisturbed)["digest"]


@pytest.mark.parametrize("trainers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_trainers_whose_launcher_is_killed_stop_cleanly_and_resuming_gives_the_same_model(
    schedule: Path,
    undisturbed: Path,
    tmp_path: Path,
    hold: Hold,
    capsys: pytest.CaptureFixture[str],
    trainers: int,
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:2", "--trainers", str(trainers)), anew=True)
    job.process.kill()
    _, err = job.communicate()
    left = psutil.wait_procs(job.remains.processes(), timeout=DEADLINE_SECONDS)[1]
    assert not left
    assert "Traceback" not in err
    assert "its launcher was killed; stopped after step " in err
    assert LocalStores.find(run / STORES) is None
    assert not (run / "control.sock").exists()
    saved = Run.open(run).saved_status()
    assert (saved.state, saved.totals["steps"]) == ("stopped", saved.step + 1)
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert summary(run)["digest"] == summary(undisturbed)["digest"]
    for name in ("steps", "samples", "rows_used", "rows_arrived", "rows_fetched"):
        assert summary(run)[name] == summary(undisturbed)[name]


@pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "point", ["last rows written", *(pytest.param(point, marks=pytest.mark.full) for point in ("last write-back", "ended"))]
)
def test_a_trainer_that_dies_at_the_end_without_a_launcher_is_not_waited_for(
    schedule: Path, undisturbed: Path, tmp_path: Path, hold: Hold, point: str, copies: int
) -> None:
    """Nobody takes its lanes over, so the others leave; the run has stopped if that trainer told before that it had written everything."""
    run = tmp_path / "run"
    place = ("--store", "local:2", "--trainers", "3", "--copies", str(copies))
    job = hold(arguments(schedule, run, *place), 3, faults=[TrainerFault(1, point, 0, signal.SIGKILL)])
    job.process.kill()
    servers = servers_of(run)
    _, err = job.communicate()
    job.remains.wait_for_python()
    assert "Traceback" not in err
    assert Run.open(run).saved_status().state == ("stopped" if point == "ended" else "training")
    # Where it was broken off, it begins again, as its line says: once the servers are ended, which have rows of some step.
    kill(*servers)
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert summary(run)["digest"] == summary(undisturbed)["digest"]


@pytest.mark.full
def test_trainers_whose_launcher_is_killed_before_they_begin_leave(
    schedule: Path, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, "--store", "local:1", "--trainers", "2"), faults=[LauncherFault(STARTED, 2)])
    job.communicate()
    assert job.process.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(job.remains.processes(), timeout=DEADLINE_SECONDS)[1]
    # It never began; the server that was left is of no use to anyone.
    assert main(arguments(schedule, run, "--store", "local:1")) == 0
    assert LocalStores.find(run / STORES) is None


def test_of_two_calls_at_once_one_trains_and_the_other_is_refused(
    schedule: Path, undisturbed: Path, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    jobs = [launched(*arguments(schedule, run, "--store", "local:1", "--digest")) for _ in range(2)]
    ends = sorted((job.end() for job in jobs), key=lambda end: end[0])
    assert [status for status, _, _ in ends] == [0, 2], ends
    refusal = ends[1][2]
    assert "is being trained or read right now" in refusal or "holds a run already" in refusal
    assert "Traceback" not in refusal
    assert summary(run)["digest"] == summary(undisturbed)["digest"]


def test_a_run_in_training_is_left_alone_by_every_other_command(
    schedule: Path, undisturbed: Path, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:1", "--digest"), 3)
    for command in (
        arguments(schedule, run, "--store", "local:1", "--overwrite"),
        ["train", str(schedule), "--run", str(run), "--resume"],
        ["digest", str(run)],
        ["evaluate", str(run)],
    ):
        assert main(command) == 2
        assert "is being trained or read right now" in capsys.readouterr().err
    status, _, err = job.end()
    assert status == 0, err
    assert summary(run)["digest"] == summary(undisturbed)["digest"]


@pytest.mark.parametrize(
    "stopped", [pytest.param(False, marks=pytest.mark.full, id="at the end"), pytest.param(True, id="stopped")]
)
def test_rows_that_cannot_be_saved_stay_where_they_are_and_are_used_from_there(
    schedule: Path,
    undisturbed: Path,
    tmp_path: Path,
    hold: Hold,
    capsys: pytest.CaptureFixture[str],
    stopped: bool,
) -> None:
    """stopped: by Ctrl-C; else it ends."""
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:2", "--digest"), 3)
    # A folder in the place of the file: the rename at the end of the save fails, for root too.
    in_the_way = run / "stores" / "shard-1.rdb"
    (in_the_way / "x").mkdir(parents=True)
    if stopped:
        job.process.send_signal(signal.SIGINT)
    else:
        job.schedule.release()
    _, err = job.communicate()
    job.schedule.release()
    assert job.process.returncode == 2
    (server,) = servers_of(run)
    assert f"store local: shard 1 (process {server.pid}) could not save its rows" in err
    assert "Traceback" not in err
    assert Run.open(run).saved_status().state == ("stopped" if stopped else "ended")
    # Still they cannot be saved, and are read all the same.
    assert main(["digest", str(run)]) == 0
    out, err = capsys.readouterr()
    assert "foreload: warning: store local: shard 1" in err
    assert servers_of(run) == [server]
    if stopped:
        shutil.rmtree(in_the_way)
        assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    else:
        assert out.strip() == summary(undisturbed)["digest"]
        shutil.rmtree(in_the_way)
        assert main(["evaluate", str(run)]) == 0
    assert LocalStores.find(run / STORES) is None
    assert main(["digest", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == summary(undisturbed)["digest"]


@pytest.mark.full
def test_trainers_of_a_scheduler_give_the_same_model(
    schedule: Path, undisturbed: Path, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    command = arguments(schedule, tmp_path / "run", "--store", "local:1", "--digest")
    meeting = scheduler_environment()
    # As on two hosts, each at its own address.
    jobs = [launched(*command, "--address", f"127.0.0.{2 + rank}", RANK=str(rank), **meeting) for rank in range(2)]
    for job in jobs:
        status, _, err = job.end()
        assert status == 0, err
    assert summary(tmp_path / "run")["digest"] == summary(undisturbed)["digest"]


@pytest.mark.full
def test_torchrun_trains_with_the_processor_s_instructions_that_the_call_names(
    schedule: Path, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("this processor has no avx512 to ask for")
    command = arguments(schedule, tmp_path / "run", "--store", "local:1", "--cpu-capability", "avx512")
    # As in a user's shell: the tests' own environment asks for avx2.
    unset = dict.fromkeys(ENVIRONMENTS["avx512"])
    job = launched(*under_torchrun(*command), module="torch.distributed.run", **unset)
    status, _, err = job.end()
    assert status == 0, err
    trained_under = Run.open(tmp_path / "run").manifest.fingerprint
    assert trained_under is not None
    assert (trained_under["cpu_capability"], trained_under["onednn_isa"]) == ("AVX512", "AVX512_CORE")


@pytest.mark.full
def test_ctrl_c_under_torchrun_stops_all_trainers_after_the_same_step(
    schedule: Path, undisturbed: Path, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    run = tmp_path / "run"
    with held(schedule, tmp_path / "held", 10) as copy:
        command = arguments(copy.path, run, "--store", "local:1", "--follow")
        job = launched(*under_torchrun(*command), module="torch.distributed.run")
        job.interrupt(reached(run, copy.step))
        _, _, err = job.end()
        copy.release()
    assert "go on with: foreload train" in err
    assert Run.open(tmp_path / "run").saved_status().state == "stopped"
    assert main(["train", str(schedule), "--run", str(tmp_path / "run"), "--resume", "--digest"]) == 0
    assert summary(tmp_path / "run")["digest"] == summary(undisturbed)["digest"]


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.full), "1"])
def test_a_schedulers_trainer_that_waits_for_others_says_so_and_heeds_ctrl_c(
    schedule: Path, tmp_path: Path, launched: Callable[..., Command], rank: str
) -> None:
    meeting = scheduler_environment()
    job = launched(*arguments(schedule, tmp_path / "run", "--store", "local:1"), RANK=rank, **meeting)
    waits = f"foreload: trainer {rank} of 2 waits at 127.0.0.1:{meeting['MASTER_PORT']} until all have come"
    job.interrupt(lambda: waits in job.said)
    status, _, err = job.end()
    assert status == 130
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_told_of(schedule: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        meeting = scheduler_environment() | {"RANK": "0", "MASTER_PORT": port}
        line = refused_apart(*arguments(schedule, tmp_path / "run", "--store", "local:1"), **meeting)
    assert line.startswith(
        f"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: must let 2 trainers meet at a free port of rank 0's machine; got 127.0.0.1:{port}"
    )
    assert not (tmp_path / "run").exists()


def test_a_trainer_whose_arithmetic_differs_may_not_join(
    schedule: Path, tmp_path: Path, launched: Callable[..., Command]
) -> None:
    command = arguments(schedule, tmp_path / "run", "--store", "local:1")
    meeting = scheduler_environment()
    jobs = [launched(*command, RANK="0", **meeting), launched(*command, RANK="1", MKL_CBWR="COMPATIBLE", **meeting)]
    ends = [job.end() for job in jobs]
    assert [status for status, _, _ in ends] == [2, 2]
    followed = fingerprint()["mkl_cbwr"]
    assert (
        f"numerics fingerprint: mkl_cbwr is COMPATIBLE here and {followed} in the run; set MKL_CBWR alike on all hosts"
        in ends[0][2]
    )


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["--store", "redis://127.0.0.1:1"], "store redis://127.0.0.1:1"),
        (["--store", "local:1", "--trainers", "5"], "--trainers: must be at most the schedule's lanes, 4; got 5"),
        (["--store", "local:1", "--model", "absent:Model"], "model: cannot import absent:Model"),
        (["--store", "local:1", "--memory", "1KB"], "--memory: 500 slots of this model take"),
        (["--store", "local:1", "--dense-optimizer", "LBFGS"], "dense-optimizer: must be one of"),
        (
            ["--store", "local:1", "--dense-optimizer", "SGD", "--dense-options", "momentum=-1"],
            "dense-options: SGD: Invalid momentum",
        ),
    ],
)
def test_a_call_that_cannot_work_says_why_before_it_starts_anything_and_leaves_the_folder_free(
    schedule: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    further: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(LocalStores, "start", lambda stores: pytest.fail("a server is started"))
    # Twice: a folder that the first call had taken would be refused for that.
    for _ in range(2):
        assert main(arguments(schedule, tmp_path / "run", "--store-patience", "0.2", *further)) == 2
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err
