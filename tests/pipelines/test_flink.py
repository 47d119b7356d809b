"""`prepare` on a real Flink cluster, as `make flink` starts it: workers, task managers and commands that die in any stage."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import fill
from disturbed import disturb
from docs_pages import ROOT
from held_prepare import HeldPrepare
from portable_job import click_logs, contents, worker_environment
from waiting import wait_until

from foreload.pipelines import prepare
from foreload.pipelines.errors import PipelineError
from foreload.pipelines.schedule.format import MANIFEST, WORK

_SPEC = importlib.util.spec_from_file_location("cluster", ROOT / "deploy" / "flink" / "cluster.py")
assert _SPEC is not None
assert _SPEC.loader is not None
flink: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(flink)

pytestmark = [
    pytest.mark.skipif(flink.missing() is not None, reason=f"a Flink cluster {flink.missing()}"),
    pytest.mark.timeout(1800),
]
OVER = ("CANCELED", "FINISHED")
HEARTBEAT_MS = 10_000
"""After how long a silent task manager is lost."""


class Flink:
    """A cluster, and what `prepare` needs to run on it."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        # Workers must find the DoFns of the tests.
        self.flags: list[str] = cluster.await_ready({"PYTHONPATH": worker_environment()["PYTHONPATH"]})

    def jobs(self) -> dict[str, str]:
        """The state of each job that there was."""
        return {job["jid"]: job["state"] for job in self.cluster.ask("jobs/overview")["jobs"]}

    def attempts(self, job: str) -> dict[str, int]:
        """How often each stage of a job was begun again, by Flink's name for it."""
        vertices = self.cluster.ask(f"jobs/{job}")["vertices"]
        return {
            vertex["name"]: max(part["attempt"] for part in self.cluster.ask(f"jobs/{job}/vertices/{vertex['id']}")["subtasks"])
            for vertex in vertices
        }

    def restore(self) -> None:
        """Have both task managers there again, for the next test."""
        for number in range(1, flink.TASK_MANAGERS + 1):
            if self.cluster.processes[f"task-manager-{number}"].poll() is not None:
                self.cluster.start_task_manager(number)
        wait_until(lambda: self.cluster.task_managers() == flink.TASK_MANAGERS)


@pytest.fixture(scope="module")
def on_flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flink]:
    folder = tmp_path_factory.mktemp("flink")
    cluster = flink.Cluster(
        folder, flink.resolve_jars(flink.FOLDER), {"heartbeat.timeout": HEARTBEAT_MS, "heartbeat.interval": 1000}
    )
    try:
        yield Flink(cluster)
    finally:
        cluster.stop()
        assert not [process.pid for process in psutil.process_iter() if str(folder) in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


class HeldOnFlink(HeldPrepare):
    """A held job on Flink. job: its id; task_manager: the process of the one whose worker is held."""

    def __init__(self, on_flink: Flink, words: list[str], where: str, folder: Path) -> None:
        before = on_flink.jobs().keys()
        super().__init__([*words, *on_flink.flags], where, folder)
        [self.job] = on_flink.jobs().keys() - before
        self.task_manager = self.worker.parent()
        assert self.task_manager.pid in on_flink.cluster.pids.values()


WHERE = [
    pytest.param("Encode", marks=pytest.mark.full),
    pytest.param("SortBucket", marks=pytest.mark.full),
    "ReadAll",
    pytest.param("PlanLanes", marks=pytest.mark.full),
]


@pytest.mark.parametrize("where", WHERE)
def test_a_task_manager_killed_in_a_stage_changes_nothing(
    where: str, on_flink: Flink, logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = HeldOnFlink(on_flink, [*logs_to_prepare, f"--out={out}"], where, tmp_path)
    job.task_manager.kill()
    job.release()
    status, err = job.end()
    assert status == 0, err
    assert contents(out) == prepared_logs
    assert on_flink.jobs()[job.job] == "FINISHED"
    again = {name: count for name, count in on_flink.attempts(job.job).items() if count}
    assert any(where in name for name in again), again
    on_flink.restore()


@pytest.mark.full
@pytest.mark.parametrize("where", ["Encode", "PlanLanes"])
def test_a_task_manager_that_stands_still_and_goes_on_later_changes_nothing(
    where: str, on_flink: Flink, logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = HeldOnFlink(on_flink, [*logs_to_prepare, f"--out={out}"], where, tmp_path)
    job.task_manager.suspend()
    status, err = job.end()
    assert status == 0, err
    assert contents(out) == prepared_logs
    assert any(where in name and count for name, count in on_flink.attempts(job.job).items())
    # Its worker goes on with the job that is over. Flink may keep it for another job; it ends with its task manager.
    job.release()
    job.task_manager.resume()
    wait_until(job.went_on)
    job.task_manager.kill()
    wait_until(lambda: not job.worker.is_running())
    assert contents(out) == prepared_logs
    on_flink.restore()


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.full
def test_workers_make_the_same_schedule(
    disturbed: bool, on_flink: Flink, logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path
) -> None:
    command = [*logs_to_prepare, f"--out={tmp_path / 'out'}", *on_flink.flags]
    if disturbed:
        prepare.run(command, wrap=disturb(3))
    else:
        prepare.run(command)
    assert contents(tmp_path / "out") == prepared_logs


@pytest.mark.full
@pytest.mark.parametrize("where", ["Encode", "ReadAll"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_ends_early_can_be_repeated_at_once_with_other_data(
    number: int, where: str, on_flink: Flink, logs_to_prepare: list[str], tmp_path: Path
) -> None:
    out, others, alone = tmp_path / "out", tmp_path / "others", tmp_path / "alone"
    others.mkdir()
    other = click_logs(others, seed=1)
    prepare.run([*other, f"--out={alone}"])
    job = HeldOnFlink(on_flink, [*logs_to_prepare, f"--out={out}"], where, tmp_path)
    os.kill(job.process.pid, number)
    status, err = job.end()
    assert status == (130 if number == signal.SIGINT else -number), err
    assert not (out / MANIFEST).exists()
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == "foreload: stopped"
        assert "Traceback" not in err
        # Without any help: Beam's job server may not cancel the job, but its stages find the command over.
        wait_until(lambda: on_flink.jobs()[job.job] in OVER, on_flink.jobs)
    prepare.run([*other, f"--out={out}", *on_flink.flags])
    assert contents(out) == contents(alone)
    # The worker of the first call goes on, if it still can.
    job.release()
    wait_until(lambda: on_flink.jobs()[job.job] in OVER, on_flink.jobs)
    wait_until(job.went_on)
    assert contents(out) == contents(alone)
    assert not (out / WORK).exists()


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["malformed", "missing"])
def test_errors_end_in_the_same_line_as_elsewhere(wrong: str, on_flink: Flink, tmp_path: Path) -> None:
    words = click_logs(tmp_path)
    if wrong == "malformed":
        words[-2:] = ["--max-rejects=2", words[-1]]
    else:
        words[0] = str(tmp_path / "nothing" / "*.csv")
    said: list[str] = []
    for flags in ([], on_flink.flags):
        out = tmp_path / f"out{len(said)}"
        with pytest.raises(PipelineError) as error:
            prepare.run([*words, f"--out={out}", *flags])
        said.append(str(error.value).replace(str(out), "OUT"))
    assert said[0] == said[1]


@pytest.mark.full
@pytest.mark.parametrize("where", ["Encode", "ReadAll", "PlanLanes"])
def test_a_full_disk_is_told_and_the_same_command_works_once_there_is_space(
    where: str, on_flink: Flink, logs_to_prepare: list[str], prepared_logs: dict[str, bytes], small_disk: Path, tmp_path: Path
) -> None:
    command = [*logs_to_prepare, f"--out={small_disk / 'out'}"]
    job = HeldOnFlink(on_flink, command, where, tmp_path)
    fill(small_disk, 0)
    job.release()
    status, err = job.end()
    assert status == 2, err
    assert "the disk is full; free space" in err.splitlines()[-1], err
    assert "Traceback" not in err
    wait_until(lambda: on_flink.jobs()[job.job] in OVER, on_flink.jobs)
    (small_disk / "ballast").unlink()
    prepare.run([*command, *on_flink.flags])
    assert contents(small_disk / "out") == prepared_logs
