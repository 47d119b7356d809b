"""`prepare` on Dask: a scheduler and workers in processes of their own, one of which dies during the job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.runners.dask.dask_runner import DaskRunner
from apache_beam.runners.dask.overrides import dask_overrides
from command_line import refused
from dask.base import compute
from distributed import Client
from disturbed import Doubled, disturb
from held_prepare import HeldPrepare
from portable_job import click_logs, contents, worker_environment

from dask_cluster import DaskCluster
from foreload.pipelines import prepare
from foreload.pipelines.beam import pipeline as beam_run
from foreload.pipelines.beam.stages import each
from foreload.pipelines.schedule.format import MANIFEST, WORK


@pytest.fixture(scope="module")
def on_dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    started = DaskCluster(tmp_path_factory.mktemp("dask"), 3, worker_environment())
    try:
        yield started
    finally:
        started.stop()


@pytest.mark.parametrize(
    "where", [pytest.param("Encode", marks=pytest.mark.full), "ReadAll", pytest.param("PlanLanes", marks=pytest.mark.full)]
)
def test_a_worker_killed_in_a_stage_changes_nothing(
    where: str, on_dask: DaskCluster, logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = HeldPrepare([*logs_to_prepare, f"--out={out}", *on_dask.flags], where, tmp_path)
    assert job.worker.pid in {worker.pid for worker in on_dask.workers}
    job.worker.kill()
    status, err = job.end()
    assert status == 0, err
    assert contents(out) == prepared_logs
    on_dask.restore()


@pytest.mark.full
@pytest.mark.parametrize("disturbed", [False, True])
def test_workers_make_the_same_schedule(
    disturbed: bool, on_dask: DaskCluster, logs_to_prepare: list[str], prepared_logs: dict[str, bytes], tmp_path: Path
) -> None:
    command = [*logs_to_prepare, f"--out={tmp_path / 'out'}", *on_dask.flags]
    if disturbed:
        prepare.run(command, wrap=disturb(3))
    else:
        prepare.run(command)
    assert contents(tmp_path / "out") == prepared_logs


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_ends_early_can_be_repeated_at_once_with_other_data(
    number: int, on_dask: DaskCluster, logs_to_prepare: list[str], tmp_path: Path
) -> None:
    out, others, alone = tmp_path / "out", tmp_path / "others", tmp_path / "alone"
    others.mkdir()
    other = click_logs(others, seed=1)
    prepare.run([*other, f"--out={alone}"])
    job = HeldPrepare([*logs_to_prepare, f"--out={out}", *on_dask.flags], "Encode", tmp_path)
    os.kill(job.process.pid, number)
    status, err = job.end()
    assert status == (130 if number == signal.SIGINT else -number), err
    assert "Traceback" not in err
    assert not (out / MANIFEST).exists()
    # Dask stops no task: the worker goes on with what it does for the first call while it has work of the second.
    job.release()
    prepare.run([*other, f"--out={out}", *on_dask.flags])
    assert contents(out) == contents(alone)
    assert not (out / WORK).exists()


def test_the_elements_of_a_stage_are_spread(on_dask: DaskCluster) -> None:
    pipeline = beam.Pipeline(DaskRunner())
    # As after a group stage, all are in one part.
    grouped = pipeline | beam.Create([("", number) for number in range(40)]) | beam.GroupByKey()
    each(grouped | beam.FlatMap(itemgetter(1)), Doubled(), lambda stage: stage)
    pipeline.replace_all(dask_overrides())
    visitor = DaskRunner.to_dask_bag_visitor({"npartitions": 64})
    pipeline.visit(visitor)
    with Client(scheduler_file=str(on_dask.scheduler_file)):
        parts = list(visitor.bags.values())[-1].to_delayed()
        sizes = [len(part) for part in compute(*parts)]
    assert sum(sizes) == 40
    assert max(sizes) < 10


@pytest.mark.parametrize(
    ("given", "partitions"),
    [([], ["--dask_npartitions=64"]), (["--dask_partition_size=2"], []), (["--dask_npartitions=9"], [])],
)
def test_stages_have_many_parts_unless_the_user_says_how_many(given: list[str], partitions: list[str]) -> None:
    flags = beam_run.with_dask(["--runner=DaskRunner", *given])
    assert flags == ["--runner=DaskRunner", *given, "--runner=apache_beam.runners.dask.dask_runner.DaskRunner", *partitions]


def test_without_dask_an_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = refused(
        "prepare", "--format=synthetic", "--rows=99", "--batch-size=9", f"--out={tmp_path / 'out'}", "--runner=DaskRunner"
    )
    assert line == "--runner: Dask is not installed; install it with pip install 'foreload[dask]'"
