"""Keys of another program in place of a lane's hash, its epoch key or the run's note.

With parity that store shard is lost and rebuilt. Without it one line says so, and how to go on.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import SMALL, Command, done, refused, run_here
from held import Hold, stop_after

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.fence import look_at
from foreload.cache.protocol.shards.namespace import epoch_key, lane_key, run_key
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


def put_foreign_list(store: Store, key: bytes) -> None:
    """Replace a key by a list, in one command: a trainer may write the key at any time."""
    store.command(0, "RPUSH", "foreign", "of", "another", "program")
    store.command(0, "RENAME", "foreign", key)


def put_foreign_key(url: str) -> bytes:
    """Have a list stand in the place of lane 0's hash on a server; returns its name."""
    with Store([url]) as store:
        key = lane_key("run", 0, look_at(store, 0, "run", [0])[0].epoch)
        put_foreign_list(store, key)
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
    assert f"store {url}: the key {key.decode()} must be the hash of lane 0's rows" in lost
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
    assert f"the key {key.decode()} must be the hash of lane 0's rows" in told[2]
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
        f"store {url}: the key {key.decode()} must be the hash of lane 0's rows, but has another type: another program wrote it"
    )
    assert words in err.splitlines()[-1]
    done("train", clicks.schedule, "--run", run, "--store", url, "--overwrite", *SMALL)
    key = put_foreign_key(url)
    for command_line in (("digest", run), ("export", run, "--out", tmp_path / "export")):
        assert f"the key {key.decode()} must be the hash of lane 0's rows" in refused(*command_line)
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


# -- The run's note and a lane's epoch key ---------------------------------------------------------------------------------------------

KEYS = (run_key("run"), epoch_key("run", 0))
DAMAGED = [
    (KEYS[0], None),
    (KEYS[1], b"of another program"),
    *(pytest.param(*one, marks=pytest.mark.full) for one in ((KEYS[0], b"of another program"), (KEYS[1], None))),
]
DAMAGED_FEW = [DAMAGED[0], pytest.param(*DAMAGED[1], marks=pytest.mark.full), *DAMAGED[2:]]


def put_foreign_value(url: str, key: bytes, content: bytes | None) -> None:
    """Replace a key on a server by other content, or by a list if that is None."""
    with Store([url]) as store:
        if content is None:
            put_foreign_list(store, key)
        else:
            store.command(0, "SET", key, content)


def names(line: str, url: str, key: bytes) -> bool:
    """Whether a line says that another program wrote a key of a server."""
    return f"store {url}: the key {key.decode()} " in line and "another program wrote it" in line


@pytest.mark.parametrize(
    ("key", "content"), [*DAMAGED_FEW, pytest.param(KEYS[0], b'{"format": "other"}', marks=pytest.mark.full)]
)
def test_with_parity_a_run_at_rest_is_read_without_the_shard_and_a_resume_rebuilds_it_whatever_key_is_foreign(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str, key: bytes, content: bytes | None
) -> None:
    run, url = tmp_path / "run", servers.urls[1]
    stop_after(10, train(clicks, run, *servers.urls), tmp_path)
    digest = done("digest", run)
    put_foreign_value(url, key, content)
    assert done("digest", run) == digest
    assert "not checked: store shard 1, which is lost" in done("scrub", run)
    told = run_here("stores", "status", run)[1].splitlines()
    assert told[0].endswith("parity 2+1 degraded")
    assert "shard 1  degraded" in told[2]
    assert names(told[2], url, key)
    assert kind(url, key) == ("list" if content is None else "string")
    status, _, err = run_here("train", "--run", run, "--resume")
    assert status == 0, err
    (lost,) = [line for line in err.splitlines() if "store shard 1: is lost" in line]
    assert names(lost, url, key)
    assert "store shard 1: is whole again" in err
    check_rebuilt(run, url, key, undisturbed)
    # And again, at its end.
    put_foreign_value(url, key, content)
    status, _, err = run_here("train", "--run", run, "--resume")
    assert status == 0, err
    assert "there is nothing to train" in err
    check_rebuilt(run, url, key, undisturbed)


@pytest.mark.parametrize(("key", "content"), DAMAGED_FEW)
def test_with_parity_a_takeover_loses_the_shard_and_it_is_rebuilt(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str, hold: Hold, key: bytes, content: bytes | None
) -> None:
    run, url = tmp_path / "run", servers.urls[1]
    job = hold((*train(clicks, run, *servers.urls), "--trainers", 2))
    put_foreign_value(url, key, content)
    job.workers[0].kill()  # the owner of lane 0
    status, _, err = job.end()
    assert status == 0, err
    assert "Traceback" not in err
    (lost,) = [line for line in err.splitlines() if "store shard 1: is lost" in line]
    assert names(lost, url, key)
    assert "store shard 1: is whole again" in err
    check_rebuilt(run, url, key, undisturbed)


@pytest.mark.parametrize(("key", "content"), DAMAGED_FEW)
def test_without_parity_one_line_names_the_key_and_a_remedy_that_works(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str, key: bytes, content: bytes | None
) -> None:
    run, url = tmp_path / "run", servers.urls[0]
    stop_after(10, train(clicks, run, url), tmp_path)
    digest = done("digest", run)
    put_foreign_value(url, key, content)
    for command_line in (("digest", run), ("train", "--run", run, "--resume")):
        line = refused(*command_line)
        assert names(line, url, key)
    with Store([url]) as store:
        store.command(0, *shlex.split(line.rpartition("redis-cli: ")[2]))
    assert done("digest", run) == digest
    done("train", "--run", run, "--resume")
    assert done("digest", run).strip() == undisturbed


def test_a_note_of_another_run_on_one_shard_is_refused_and_another_server_takes_its_place(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str
) -> None:
    run, key = tmp_path / "run", run_key("run")
    stop_after(10, train(clicks, run, *servers.urls), tmp_path)
    with Store([servers.urls[1]]) as store:
        text = store.command(0, "GET", key)
        assert isinstance(text, bytes)
        note = json.loads(text)
        store.command(0, "SET", key, json.dumps(note | {"identity": note["identity"] | {"run": "another"}}))
    why = refused("train", "--run", run, "--resume")
    assert f"store {servers.urls[1]}: namespace run belongs to another run" in why
    assert "give another server in its place (--resume --store URL,...)" in why
    servers.add()
    status, _, err = run_here(
        "train", "--run", run, "--resume", "--store", ",".join((servers.urls[0], servers.urls[3], servers.urls[2]))
    )
    assert status == 0, err
    check_rebuilt(run, servers.urls[3], key, undisturbed)


@pytest.mark.parametrize(("key", "content"), DAMAGED_FEW)
def test_a_new_run_and_a_deletion_replace_foreign_keys(
    clicks: Clicks, tmp_path: Path, servers: LocalStores, undisturbed: str, key: bytes, content: bytes | None
) -> None:
    run, url = tmp_path / "run", servers.urls[0]
    put_foreign_value(url, key, content)
    if key == KEYS[0]:
        why = refused(*train(clicks, run, url))
        assert f"store {url}: namespace run is in use: another program wrote the key run:run" in why
    stop_after(10, (*train(clicks, run, url), "--overwrite"), tmp_path)
    put_foreign_value(url, key, content)
    done("train", clicks.schedule, "--run", run, "--store", url, "--overwrite", *SMALL)
    assert done("digest", run).strip() == undisturbed
    put_foreign_value(url, key, content)
    assert "namespace run" in done("stores", "list", url)
    done("delete", run)
    assert "no run has rows here" in done("stores", "list", url)
