"""One schedule, byte for byte, whatever runs the pipeline, in whatever order, however often, and whether or not it was broken off."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from disturbed import disturb

from foreload.pipelines import prepare
from foreload.pipelines.planning import plan
from foreload.pipelines.schedule.format import PROVENANCE

FEATURES = """
order_by = "time"
order_type = "integer"
weight = "price"
group = "right"
[[label]]
name = "clicked"
[[label]]
name = "late"
column = "time"
at_least = 30
[[label]]
name = "price"
kind = "number"
[[dense]]
name = "price"
transform = "standard"
[[feature]]
name = "left"
encoding = "vocabulary"
[[feature]]
name = "right"
encoding = "hash"
rows = 500
"""
OPTIONS = (
    "--batch-size=32",
    "--lanes=3",
    "--slots=60",
    "--epochs=2",
    "--shuffle-seed=5",
    "--eval-fraction=0.2",
    "--eval-every=4",
    "--max-rejects=9",
    "--segment-bytes=4000",
)
PIECE_ROWS = 100


def worker_environment() -> dict[str, str]:
    """The environment of processes that import the packages and this folder."""
    tests = Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests / "harness")])}


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Sort in small buckets, so that there are many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PIECE_ROWS", PIECE_ROWS)
        yield


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line, without --out: five files, a few malformed records."""
    folder = tmp_path_factory.mktemp("data")
    generator = random.Random(0)
    for name in "abcde":
        lines = ["clicked,price,left,right,time"]
        for _ in range(generator.randrange(100, 200)):
            # A 2 is no label: one record in 31 of these files is malformed.
            clicked = generator.choice("01" * 15 + "2" if name in "bd" else "01")
            left, right, time = (generator.randrange(n) for n in (90, 2000, 60))
            lines.append(f"{clicked},{generator.random():.3f},w{left},{right},{time}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "features.toml").write_text(FEATURES)
    return [str(folder / "*.csv"), "--format=csv", f"--features={folder / 'features.toml'}", *OPTIONS]


def contents(schedule: Path) -> dict[str, bytes]:
    """Every file but the one that says how the schedule came to be."""
    files = [path for path in schedule.rglob("*") if path.is_file() and path.name != PROVENANCE]
    return {str(path.relative_to(schedule)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def expected(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The schedule that one worker in this process makes, undisturbed."""
    out = tmp_path_factory.mktemp("expected")
    summary = prepare.run([*arguments, f"--out={out}"])
    files = contents(out)
    assert summary["rejected"] > 0
    assert summary["fetched"] > 0
    assert {"schedule.json", "rejects.jsonl", "encoding/encoding.json", "segment-000003.json"} <= set(files)
    assert not (out / ".work").exists()
    return files


def test_two_threads_make_the_same_schedule(arguments: list[str], expected: dict[str, bytes], tmp_path: Path) -> None:
    prepare.run([*arguments, f"--out={tmp_path}", "--direct_num_workers=2", "--direct_running_mode=multi_threading"])
    assert contents(tmp_path) == expected


def test_groups_in_any_order_and_work_done_twice_change_nothing(
    arguments: list[str], expected: dict[str, bytes], tmp_path: Path
) -> None:
    prepare.run([*arguments, f"--out={tmp_path}"], wrap=disturb(1))
    assert contents(tmp_path) == expected


# A run that dies in ShuffleBucket leaves what one leaves that dies in Encode, and more.
@pytest.mark.parametrize(
    ("stage", "elements"),
    [pytest.param("Encode", 3, marks=pytest.mark.full), ("ShuffleBucket", 5), ("reading", 20), ("planning", 5)],
)
def test_a_run_broken_off_can_be_started_again(
    stage: str, elements: int, arguments: list[str], expected: dict[str, bytes], tmp_path: Path
) -> None:
    command = [*arguments, f"--out={tmp_path}"]
    script = f"from disturbed import prepare_and_die; prepare_and_die({command!r}, {stage!r}, {elements}, {PIECE_ROWS})"
    dead = subprocess.run([sys.executable, "-c", script], env=worker_environment(), capture_output=True, text=True, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert not (tmp_path / "schedule.json").exists()
    prepare.run(command)
    assert contents(tmp_path) == expected


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
            grpc.channel_ready_future(channel).result(timeout=60)
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
    arguments: list[str],
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where workers run, relative paths mean something else.
    folder = Path(arguments[0]).parent
    monkeypatch.chdir(folder)
    command = [arguments[0].removeprefix(f"{folder}/"), *arguments[1:], f"--out={os.path.relpath(tmp_path)}", *job_flags]
    if disturbed:
        prepare.run(command, wrap=disturb(3))
    else:
        prepare.run(command)
    assert contents(tmp_path) == expected
