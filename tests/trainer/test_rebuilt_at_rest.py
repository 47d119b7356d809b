"""A run at its end whose store shards are lost: `--resume` rebuilds them, and says that there is nothing to train."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import SMALL, Command, done, refused, run_here
from held import Hold
from small_job import scheduler_environment, summary

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.trainer.run.directory import STORES, Run
from foreload.trainer.run.event_log import read_events


@dataclass(frozen=True)
class Ended:
    """A run at its end, without shard 1, whose server is down. err: what its training said."""

    run: Path
    servers: list[LocalStores]
    err: str
    digest: str

    @property
    def urls(self) -> list[str]:
        return [server.urls[0] for server in self.servers]


@pytest.fixture
def ended(clicks: Clicks, tmp_path: Path, hold: Hold) -> Iterator[Ended]:
    run = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(LocalStores(1, tmp_path / str(shard))) for shard in range(3)]
        urls = ",".join(server.urls[0] for server in servers)
        job = hold(("train", clicks.schedule, "--run", run, "--store", urls, *SMALL))
        servers[1].stop(save=False)
        status, _, err = job.end()
        assert status == 0, err
        saved = Run.open(run).saved_status()
        assert (saved.state, saved.lost) == ("ended", [1])
        yield Ended(run, servers, err, done("digest", run))


def check_whole(ended: Ended, err: str) -> None:
    """Assert that a resume has made the run whole, and has trained nothing."""
    assert "store shard 1: is whole again\n" in err
    assert f"run {ended.run}: there is nothing to train; it is at the end of " in err
    status = Run.open(ended.run).saved_status()
    assert (status.state, status.lost) == ("ended", [])
    assert "not checked" not in done("scrub", ended.run)
    assert done("digest", ended.run) == ended.digest
    assert [event["shard"] for event in read_events(ended.run) if event["kind"] == "shard-rebuilt"] == [1]
    assert "is at the end of" in refused("train", "--run", ended.run, "--resume")


def test_a_lost_shard_is_rebuilt_on_its_own_server(ended: Ended) -> None:
    assert "the next --resume rebuilds it, once a server runs there" in ended.err
    resume = ("train", "--run", ended.run, "--resume")
    status, _, err = run_here(*resume)
    assert status == 2
    assert err.splitlines()[-1].startswith(
        f"foreload: error: run {ended.run}: store shard 1 is lost, and there is no server for it (store "
    )
    assert Run.open(ended.run).saved_status().lost == [1]
    # What else asks for a whole run says the same.
    line = refused("stores", "add", ended.run, ended.urls[0])
    assert "store shard 1 is lost; foreload train --resume, with a server there, rebuilds it" in line
    line = refused("stores", "replace", ended.run, "1", ended.urls[0])
    assert "--resume --store URL,...`, with the new server in the place of the old one" in line
    ended.servers[1].start()
    status, out, err = run_here(*resume)
    assert (status, out) == (0, "")
    check_whole(ended, err)


def test_the_digest_is_printed_if_it_is_asked_for(ended: Ended) -> None:
    ended.servers[1].start()
    status, out, err = run_here("train", "--run", ended.run, "--resume", "--digest")
    assert status == 0, err
    assert out == f"digest {ended.digest.strip()}\n"
    assert summary(ended.run)["digest"] == ended.digest.strip()
    check_whole(ended, err)


def test_all_trainers_of_a_scheduler_end_well(ended: Ended, launched: Callable[..., Command]) -> None:
    ended.servers[1].start()
    meeting = scheduler_environment()
    jobs = [launched("train", "--run", ended.run, "--resume", "--digest", RANK=str(rank), **meeting) for rank in range(2)]
    ends = [job.end() for job in jobs]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert [out for _, out, _ in ends] == [f"digest {ended.digest.strip()}\n", ""]
    check_whole(ended, ends[0][2])


def test_a_lost_shard_is_rebuilt_on_another_server(ended: Ended, tmp_path: Path) -> None:
    with LocalStores(1, tmp_path / "other") as other:
        urls = [ended.urls[0], other.urls[0], ended.urls[2]]
        status, _, err = run_here("train", "--run", ended.run, "--resume", "--store", ",".join(urls))
        assert status == 0, err
        assert Run.open(ended.run).manifest.store_urls == tuple(urls)
        check_whole(ended, err)
        with Store(other.urls) as store:
            assert store.command(0, "EXISTS", "run:run") == 1


def test_a_lost_local_shard_is_rebuilt_and_saved(clicks: Clicks, tmp_path: Path, hold: Hold) -> None:
    run = tmp_path / "run"
    job = hold(("train", clicks.schedule, "--run", run, "--store", "local:3", "--no-restart", *SMALL))
    servers = LocalStores.find(run / STORES)
    assert servers is not None
    os.kill(servers.pids[1] or 0, signal.SIGKILL)
    status, _, err = job.end()
    assert status == 0, err
    assert Run.open(run).saved_status().lost == [1]
    ended = Ended(run, [], err, done("digest", run))
    status, _, err = run_here("train", "--run", run, "--resume")
    assert status == 0, err
    check_whole(ended, err)
    assert all((run / STORES / f"shard-{shard}.rdb").exists() for shard in range(3))
