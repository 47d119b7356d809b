"""One schedule, byte for byte, whatever runs the pipeline, in whatever order, however often, and whether or not it was broken off."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from disturbed import disturb
from portable_job import PIECE_ROWS, contents, worker_environment
from waiting import DEADLINE_SECONDS

from foreload.pipelines import prepare


def test_two_threads_make_the_same_schedule(logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path) -> None:
    prepare.run([*logs_to_prepare, f"--out={tmp_path}", "--direct_num_workers=2", "--direct_running_mode=multi_threading"])
    assert contents(tmp_path) == prepared_logs


def test_groups_in_any_order_and_work_done_twice_change_nothing(
    logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path
) -> None:
    prepare.run([*logs_to_prepare, f"--out={tmp_path}"], wrap=disturb(1))
    assert contents(tmp_path) == prepared_logs


# A run that dies in ShuffleBucket leaves what one leaves that dies in Encode, and more.
@pytest.mark.parametrize(
    ("stage", "elements"),
    [pytest.param("Encode", 3, marks=pytest.mark.full), ("ShuffleBucket", 5), ("reading", 20), ("planning", 5)],
)
def test_a_run_broken_off_can_be_started_again(
    stage: str, elements: int, logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path
) -> None:
    command = [*logs_to_prepare, f"--out={tmp_path}"]
    script = f"from disturbed import prepare_and_die; prepare_and_die({command!r}, {stage!r}, {elements}, {PIECE_ROWS})"
    dead = subprocess.run([sys.executable, "-c", script], env=worker_environment(), capture_output=True, text=True, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert not (tmp_path / "schedule.json").exists()
    prepare.run(command)
    assert contents(tmp_path) == prepared_logs


@pytest.fixture(scope="module")
def job_flags() -> Iterator[list[str]]:
    """Beam's flags for the job service that FORELOAD_JOB_ENDPOINT names, else for one of our own with workers in their own processes.

    FORELOAD_JOB_FLAGS adds to them; workers must find the packages and tests/pipelines, and share the folder of --basetemp.
    """
    given = os.environ.get("FORELOAD_JOB_ENDPOINT")
    if given:
        yield ["--runner=PortableRunner", f"--job_endpoint={given}", *os.environ.get("FORELOAD_JOB_FLAGS", "").split()]
        return
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    service = subprocess.Popen(
        [sys.executable, "-m", "apache_beam.runners.portability.local_job_service_main", f"--port={port}"],
        env=worker_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with grpc.insecure_channel(f"localhost:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=DEADLINE_SECONDS)
        worker = f"{sys.executable} -m apache_beam.runners.worker.sdk_worker_main"
        yield [
            "--runner=PortableRunner",
            f"--job_endpoint=localhost:{port}",
            "--environment_type=beam:env:harness_subprocess_python:v1",
            f"--environment_config={worker}",
        ]
    finally:
        service.terminate()
        service.wait()


# What holds of workers disturbed holds of others, too.
@pytest.mark.parametrize("disturbed", [pytest.param(False, marks=pytest.mark.full), True])
def test_workers_in_other_processes_make_the_same_schedule(
    disturbed: bool,
    job_flags: list[str],
    logs_to_prepare: list[str],
    prepared_logs: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where workers run, relative paths mean something else.
    folder = Path(logs_to_prepare[0]).parent
    monkeypatch.chdir(folder)
    command = [
        logs_to_prepare[0].removeprefix(f"{folder}/"),
        *logs_to_prepare[1:],
        f"--out={os.path.relpath(tmp_path)}",
        *job_flags,
    ]
    if disturbed:
        prepare.run(command, wrap=disturb(3))
    else:
        prepare.run(command)
    assert contents(tmp_path) == prepared_logs
