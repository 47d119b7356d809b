"""A key of another program in the place of a lane's hash: with parity that store shard is lost and rebuilt, without it one line says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import SMALL, Clicks, Command, done, refused, run_here
from held import Hold, stop_after

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.fence import look_at
from foreload.cache.protocol.namespace import lane_key
from foreload.trainer.run.directory import SUMMARY, Run


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[LocalStores]:
    with LocalStores(3, tmp_path / "servers") as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that nothing happened to."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done("train", clicks.schedule, "--run", run, "--store", "local:1", "--digest", *SMALL)
    return str(json.loads((run / SUMMARY).read_text())["digest"])


def train(clicks: Clicks, run: Path, *urls: str) -> tuple[object, ...]:
    return ("train", clicks.schedule, "--run", run, "--store", ",".join(urls), "--digest", *SMALL)


def put_foreign_key(url: str) -> bytes:
    """Have a list stand in the place of lane 0's hash on a server; returns its name."""
    with Store([url]) as store:
        key = lane_key("run", 0, look_at(store, 0, "run", [0])[0].epoch)
        store.command(0, "UNLINK", key)
        store.command(0, "RPUSH", key, "of", "another", "program")
        return key


def kind(url: str, key: bytes) -> object:
    with Store([url]) as store:
        return store.command(0, "TYPE", key)


def check_rebuilt(run: Path, url: str, key: bytes, undisturbed: str) -> None:
    assert Run.open(run).saved_status().lost == []
    assert "not checked" not in done("scrub", run)
    assert done("digest", run).strip() == undisturbed
    # Rebuilt, so nothing of another program is left.
    assert kind(url, key) == "string"


def test_while_it_trains_the_shard_is_lost_and_rebuilt(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str, hold: Hold
) -> None:
    run, url = tmp_path / "run", servers.urls[1]
    job = hold(train(clicks, run, *servers.urls))
    key = put_foreign_key(url)
    status, _, err = job.end()
    assert status == 0, err
    (lost,) = [line for line in err.splitlines() if "store shard 1: is lost" in line]
    assert f"store {url}: the key {key.decode()} is not the hash of lane 0's rows" in lost
    assert "store shard 1: is whole again" in err
    check_rebuilt(run, url, key, undisturbed)


def test_a_run_at_rest_is_read_without_the_shard_and_a_resume_rebuilds_it(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str
) -> None:
    run, url = tmp_path / "run", servers.urls[1]
    stop_after(10, train(clicks, run, *servers.urls), tmp_path)
    digest = done("digest", run)
    key = put_foreign_key(url)
    assert done("digest", run) == digest
    assert "not checked: store shard 1, which is lost" in done("scrub", run)
    told = run_here("stores", "status", run)[1].splitlines()
    assert told[0].endswith("parity 2+1 degraded")
    assert "shard 1  degraded" in told[2]
    assert f"the key {key.decode()} is not the hash of lane 0's rows" in told[2]
    # What was looked at is as it was.
    assert kind(url, key) == "list"
    status, _, err = run_here("train", "--run", run, "--resume")
    assert status == 0, err
    assert "store shard 1: is lost" in err
    assert "store shard 1: is whole again" in err
    check_rebuilt(run, url, key, undisturbed)
    # And again, at its end.
    key = put_foreign_key(url)
    status, _, err = run_here("train", "--run", run, "--resume")
    assert status == 0, err
    assert "there is nothing to train" in err
    check_rebuilt(run, url, key, undisturbed)


def test_without_parity_one_line_says_so(clicks: Clicks, tmp_path: Path, servers: LocalStores, hold: Hold) -> None:
    run, url = tmp_path / "run", servers.urls[0]
    job = hold(train(clicks, run, url))
    key = put_foreign_key(url)
    status, _, err = job.end()
    assert status == 2
    words = (
        f"store {url}: the key {key.decode()} is not the hash of lane 0's rows, but of another type, so another program wrote it"
    )
    assert words in err.splitlines()[-1]
    done("train", clicks.schedule, "--run", run, "--store", url, "--overwrite", *SMALL)
    key = put_foreign_key(url)
    for command_line in (("digest", run), ("export", run, "--out", tmp_path / "export")):
        assert f"the key {key.decode()} is not the hash of lane 0's rows" in refused(*command_line)
    assert not (tmp_path / "export").exists()


def test_a_key_that_was_there_before_the_run_is_no_hash_of_it(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str
) -> None:
    run, url = tmp_path / "run", servers.urls[2]
    with Store([url]) as store:
        store.command(0, "RPUSH", "{run:0}:0", "of another program")
    status, _, err = Command(*train(clicks, run, *servers.urls)).end()
    assert status == 0, err
    check_rebuilt(run, url, b"{run:0}:0", undisturbed)
