"""The few ends of a training after which nothing of its last steps is left: each says so, and a checkpoint leads on to the undisturbed model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from command_line import done, fill, run_here
from held import Hold, send
from small_job import arguments, summary, synthetic_schedule, train_undisturbed

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.namespace import claim, owner, remove
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events

HELD = 30


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 60 * 128, slots=900)


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(summary(train_undisturbed(schedule, tmp_path_factory.mktemp("run")))["digest"])


@pytest.fixture(params=["2+1", "off"])
def parity(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[LocalStores]:
    """Three servers, none of which the run started."""
    with LocalStores(3, tmp_path / "servers") as stores:
        yield stores
        send(stores, signal.SIGCONT)


def test_a_run_whose_namespace_another_one_took_says_so(
    schedule: Path, undisturbed: str, servers: LocalStores, tmp_path: Path, hold: Hold, parity: str
) -> None:
    """Its rows are gone for good, and the name stays the other one's."""
    run, store = tmp_path / "run", ("--store", ",".join(servers.urls), "--parity", parity)
    job = hold(arguments(schedule, run, *store, "--namespace", "shared", "--checkpoint-every", "20"), HELD)
    job.until(lambda: any(event["kind"] == "checkpoint-saved" for event in read_events(run)))
    with Store(servers.urls, timedelta(seconds=5)) as other:
        remove(other, "shared")
        claim(other, "shared", {"run": "another"}, "new")
        others = [owner(other, "shared", shard) for shard in range(3)]
    status, _, err = job.end()
    assert status == 2, err
    assert "namespace shared now belongs to another run, which deleted this run's rows" in err
    assert "--resume goes on from checkpoint" in err
    status, _, err = run_here(*arguments(schedule, run, *store, "--resume"))
    assert (status, "Traceback" in err) == (2, False), err
    with Store(servers.urls, timedelta(seconds=5)) as other:
        assert [owner(other, "shared", shard) for shard in range(3)] == others
    begun = ("--from", run / "checkpoints", "--run", tmp_path / "anew", *store, "--digest")
    assert f"digest {undisturbed}\n" in done("train", schedule, *begun)


def test_where_the_disk_has_no_room_for_what_is_to_be_kept_the_newest_checkpoint_leads_on(
    schedule: Path, undisturbed: str, servers: LocalStores, small_disk: Path, hold: Hold, parity: str
) -> None:
    run, store = small_disk / "run", ("--store", ",".join(servers.urls), "--parity", parity)
    impatient = ("--store-patience", "0", "--store-timeout", "1")
    job = hold(arguments(schedule, run, *store, *impatient, "--checkpoint-every", "20", "--no-report"), HELD)
    job.until(lambda: any(event["kind"] == "checkpoint-saved" for event in read_events(run)))
    send(servers, signal.SIGSTOP)
    fill(small_disk, 0)
    status, _, err = job.end()
    assert (status, "Traceback" in err) == (2, False), err
    assert "--resume goes on from checkpoint" in err
    assert not Run(run).keeps_lanes
    send(servers, signal.SIGCONT)
    (small_disk / "ballast").unlink()
    out = done(*arguments(schedule, run, *store, "--resume", "--digest"))
    assert f"digest {undisturbed}\n" in out
