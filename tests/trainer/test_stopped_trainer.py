"""Trainers that stand still for longer than the timeout, are taken for lost, and go on: nothing of what they still do counts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
from command_line import Command, main, reached
from small_job import arguments, summary, synthetic_schedule

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.fence import read_epochs
from foreload.cache.protocol.shards.namespace import lane_key
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.run.directory import Run

LANES = 4


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs in four lanes, with evaluation after each, and few slots."""
    return synthetic_schedule(
        tmp_path_factory.mktemp("schedule"), 5700, lanes=LANES, slots=500, further="--eval-fraction 0.1 --epochs 2"
    )


def stored(servers: LocalStores, run: Path) -> list[dict[bytes, bytes]]:
    """Every row and parity row of a run, by lane and shard: field to value."""
    namespace, hashes = Run.open(run).manifest.namespace, []
    with Store(servers.urls, timedelta(seconds=10)) as store:
        for shard in range(store.shards):
            for lane, epoch in enumerate(read_epochs(store, shard, namespace, range(LANES))):
                pairs = store.command(shard, "HGETALL", lane_key(namespace, lane, epoch or 0))
                assert isinstance(pairs, list)
                hashes.append(dict(zip(pairs[::2], pairs[1::2], strict=True)))
                hashes[-1].pop(MARKER)
    return hashes


def refusals(servers: LocalStores) -> int:
    """How many commands the servers have refused since a fence stands where they wanted to go."""
    count = 0
    with Store(servers.urls, timedelta(seconds=10)) as store:
        for shard in range(store.shards):
            told = store.command(shard, "INFO", "errorstats")
            assert isinstance(told, bytes)
            count += sum(int(number) for number in re.findall(rb"errorstat_WRONGTYPE:count=(\d+)", told))
    return count


@pytest.fixture(scope="module")
def undisturbed(
    schedule: Path, servers: LocalStores, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, list[dict[bytes, bytes]]]]:
    """By parity, digest and rows of a run with one trainer that nothing happened to."""

    @cache
    def outcome(parity: str) -> tuple[str, list[dict[bytes, bytes]]]:
        run = tmp_path_factory.mktemp("run") / f"undisturbed-{parity}"
        assert main(arguments(schedule, run, "--store", ",".join(servers.urls), "--parity", parity, "--digest")) == 0
        return str(summary(run)["digest"]), stored(servers, run)

    return outcome


@pytest.mark.parametrize(
    ("parity", "point"),
    [
        ("2+1", "parity leaves"),
        pytest.param("2+1", "batch logged", marks=pytest.mark.full),
        pytest.param("2+1", "exchanged", marks=pytest.mark.full),
        pytest.param("2+1", "data leaves", marks=pytest.mark.full),
        pytest.param("off", "exchanged", marks=pytest.mark.full),
        pytest.param("off", "data leaves", marks=pytest.mark.full),
    ],
)
def test_what_it_still_writes_is_refused_it_stops_and_a_further_death_is_survived(
    schedule: Path,
    servers: LocalStores,
    undisturbed: Callable[[str], tuple[str, list[dict[bytes, bytes]]]],
    tmp_path: Path,
    parity: str,
    point: str,
) -> None:
    run = tmp_path / f"stopped-{parity}-{point}".replace(" ", "-")
    digest, rows = undisturbed(parity)
    further = ["--store", ",".join(servers.urls), "--parity", parity, "--trainers", "4", "--copies", "3", "--no-restart"]
    refused = refusals(servers)
    # The second has copies of lanes that the first had. It stands still until it is killed, so that training does not end before the first is heard.
    faults = [TrainerFault(1, point, 10, signal.SIGSTOP), TrainerFault(2, point, 60, signal.SIGSTOP)]
    words = arguments(schedule, run, *further, "--peer-timeout", "3", "--digest")
    job = Command(*words, faults=faults, may_kill=False)
    # Others have its lanes, and train.
    job.until(reached(run, 20))
    assert "trainer 1: lost (it sends no messages)" in job.said
    told = job.answer(run)
    os.kill(told.trainers[1], signal.SIGCONT)
    job.until(lambda: "trainer 1: was lost, and has stopped now" in job.said)
    os.kill(told.trainers[2], signal.SIGKILL)
    status, _, err = job.end()
    assert status == 0, err
    assert "trainer 2: lost (" in err
    assert "Traceback" not in err
    assert summary(run)["digest"] == digest
    assert stored(servers, run) == rows
    assert re.search(
        r"trainer 1: was lost, and has stopped now: .*(was taken for lost after step|another process has taken)", err
    ), err
    assert job.statuses[1] == 2
    # In the exchange nothing may be on its way to the store.
    assert refusals(servers) > refused or point == "exchanged"
