"""Servers as users have them: a cluster of one shard, policies of providers, CONFIG refused, users with few rights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from command_line import free_port
from docs_pages import documented_rights

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.client.url import parse_url
from foreload.cache.errors import StoreError
from foreload.cache.protocol.shards.fence import fence_all, read_epochs
from foreload.cache.protocol.shards.marker import Marker, Migrated, changed, deletion
from foreload.cache.protocol.shards.namespace import (
    all_holdings,
    claim,
    lane_key,
    owner,
    remove,
)

TIMEOUT = timedelta(seconds=20)
LANES = 6
IDENTITY = {"run": "x"}


def write(namespace: str, lane: int, epoch: int, number: int) -> Write:
    """Batch `number` of a lane in a fence epoch: three rows that are full of it, and the marker."""
    rows = np.full((3, 40), number, np.uint8)
    return Write(0, lane_key(namespace, lane, epoch), np.arange(3, dtype=np.uint64), rows, Marker(number, number).stored())


def exercise(store: Store) -> None:
    """What a run does to a store shard: take a namespace, fence lanes, write, read, go on, and be overwritten."""
    claim(store, "t", IDENTITY, "new")
    for lane in range(LANES):
        store.exchange([], [write("t", lane, 0, 1)])
    assert read_epochs(store, 0, "t", range(LANES)) == [0] * LANES
    epochs = [there.epoch for there in fence_all(store, 0, "t", range(LANES), 1).values()]
    assert min(epochs) > 0
    assert read_epochs(store, 0, "t", range(LANES)) == epochs
    claim(store, "t", IDENTITY, "resume")
    keys = [lane_key("t", lane, epoch) for lane, epoch in enumerate(epochs)]
    reads = [Read(0, key, np.arange(3, dtype=np.uint64), np.zeros((3, 40), np.uint8)) for key in keys]
    store.exchange(reads, [write("t", lane, epoch, 2) for lane, epoch in enumerate(epochs)])
    for read in reads:
        assert read.missing is None
        assert (read.rows == 1).all()
        assert Marker.parse(read.marker) == Marker(1, 1)
    claim(store, "t", IDENTITY, "overwrite")
    for key in keys:
        assert store.command(0, "HLEN", key) == 0
    remove(store, "t")
    assert owner(store, "t", 0) is None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalStores]:
    """One server of the test's own."""
    with LocalStores(1, tmp_path / "server") as stores:
        yield stores


def test_a_cluster_of_one_shard_is_a_store_shard(tmp_path: Path) -> None:
    settings = {"port": str(free_port()), "bind": "127.0.0.1", "cluster-enabled": "yes"}
    with LocalStores(1, tmp_path / "server", settings=settings) as server, Store(server.urls, TIMEOUT) as store:
        with pytest.raises(StoreError, match="CLUSTERDOWN"):
            store.command(0, "GET", "x")
        store.command(0, "CLUSTER", "ADDSLOTS", *range(16384))
        while b"cluster_state:ok" not in (said := store.command(0, "CLUSTER", "INFO")):  # type: ignore[operator]
            assert isinstance(said, bytes)
        exercise(store)
        # Of several shards it is none.
        store.command(0, "CLUSTER", "DELSLOTS", *range(16384))
        store.command(0, "CLUSTER", "ADDSLOTS", 0)
        store.command(0, "CONFIG", "SET", "cluster-require-full-coverage", "no")
        with pytest.raises(StoreError, match=r"part of a Redis cluster of several shards .* or clusters of one shard"):
            claim(store, "t", IDENTITY, "new")


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru", "volatile-ttl"])
def test_a_policy_that_evicts_no_row_is_accepted(server: LocalStores, policy: str) -> None:
    with Store(server.urls, TIMEOUT) as store:
        store.command(0, "CONFIG", "SET", "maxmemory-policy", policy)
    with Store(server.urls, TIMEOUT) as store:
        exercise(store)
        store.exchange([], [write("t", 0, 0, 1)])
        # Full, it refuses rows and keeps those that it has.
        store.command(0, "CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(StoreError, match="is full"):
            store.exchange([], [write("t", 0, 0, 2)])
        assert store.command(0, "HLEN", lane_key("t", 0, 0)) == 3 + 1


def test_a_policy_that_evicts_rows_is_refused_with_both_ways_to_change_it(server: LocalStores) -> None:
    with Store(server.urls, TIMEOUT) as store:
        store.command(0, "CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    for url in (server.urls[0], server.urls[0] + "?evicts=never"):
        with pytest.raises(
            StoreError, match=r"noeviction or volatile-\*, .*; got allkeys-lfu; run CONFIG SET .* parameter group"
        ) as caught:
            Store([url], TIMEOUT)
        assert "\n" not in str(caught.value)


def test_a_server_that_refuses_config_is_a_store_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.conf").write_text('rename-command CONFIG ""\n')
    with LocalStores(1, tmp_path / "server", settings={"include": str(tmp_path / "server.conf")}) as server:
        with Store(server.urls, TIMEOUT) as store:
            with pytest.raises(StoreError, match="unknown command"):
                store.command(0, "CONFIG", "GET", "maxmemory-policy")
            exercise(store)
        # One whose INFO has no policy either is taken at its user's word.
        info = Store.info
        monkeypatch.setattr(
            Store, "info", lambda store, shard: {name: said for name, said in info(store, shard).items() if "policy" not in name}
        )
        with pytest.raises(
            StoreError, match=r"does not report whether it evicts rows: .* add \?evicts=never to its URL"
        ) as caught:
            Store(server.urls, TIMEOUT)
        assert "\n" not in str(caught.value)
        url = parse_url(server.urls[0] + "?evicts=never")
        with Store([url], TIMEOUT) as store:
            assert store.command(0, "PING") == "PONG"
        assert parse_url(url.plain) == url


@pytest.fixture
def as_ann(server: LocalStores) -> str:
    """The server's URL for a user who has the documented rights of training, on the keys of run t."""
    with Store(server.urls, TIMEOUT) as store:
        store.command(0, "ACL", "SETUSER", "ann", "on", ">secret", "~{t:*", "~t:run", *documented_rights()[0])
    return server.urls[0].replace("unix://", "unix://ann:secret@")


def test_a_user_with_few_rights_is_enough(as_ann: str) -> None:
    with Store([as_ann], TIMEOUT) as store:
        with pytest.raises(StoreError, match="NOPERM"):
            store.command(0, "CONFIG", "GET", "maxmemory-policy")
        with pytest.raises(StoreError, match="NOPERM"):
            store.command(0, "GET", "others")
        exercise(store)


def migrate(url: str) -> None:
    """What a run with parity and a migration do besides: ask servers whether they answer, and delete rows that have moved."""
    with Store.connect([url], TIMEOUT, 1) as store:
        assert not store.down
        claim(store, "t", IDENTITY, "new")
        one = write("t", 0, 0, 1)
        store.exchange([], [one])
        moved = Migrated(version=1, term=1, begin=0, end=3, copied=False, number=1, held=0)
        answers = store.commands_at_once(0, deletion(one.key, one.fields, Marker(1, 1), moved))
        assert changed(answers) == (3, 1)


def test_these_rights_are_enough_with_parity_and_for_a_migration_too_and_each_is_used(server: LocalStores, as_ann: str) -> None:
    with Store(server.urls, TIMEOUT) as other:
        other.command(0, "CONFIG", "RESETSTAT")
    with Store([as_ann], TIMEOUT) as store:
        exercise(store)
    migrate(as_ann)
    with Store(server.urls, TIMEOUT) as other:
        statistics = other.command(0, "INFO", "commandstats")
    assert isinstance(statistics, bytes)
    used = {f"+{name}" for name in re.findall(r"cmdstat_([\w|]+):", statistics.decode())}
    assert {*documented_rights()[0]} <= used


def test_the_rights_of_commands_on_stores_are_enough(server: LocalStores, as_ann: str) -> None:
    """They list what a run has on a server, with its sizes."""
    with Store([as_ann], TIMEOUT) as store:
        claim(store, "t", IDENTITY, "new")
        store.exchange([], [write("t", 0, 0, 1)])
        with pytest.raises(StoreError, match="NOPERM"):
            all_holdings(store, 0)
    with Store(server.urls, TIMEOUT) as store:
        store.command(0, "ACL", "SETUSER", "ann", *documented_rights()[1])
    with Store([as_ann], TIMEOUT) as store:
        assert [holding.namespace for holding in all_holdings(store, 0)] == ["t"]
