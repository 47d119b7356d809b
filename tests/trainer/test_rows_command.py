"""`stores list`, `stores delete` and `delete`: which runs have rows on servers; rows, folders and local stores are deleted, no other's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest
from clicks import Clicks
from command_line import SMALL, done, refused, run_here
from docs_pages import documented_rights
from held import Hold
from waiting import DEADLINE_SECONDS

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.trainer.run.directory import STORES, Run


def train(clicks: Clicks, run: Path, store: str) -> None:
    done("train", clicks.schedule, "--run", run, "--store", store, *SMALL)


def keys(url: str) -> list[str]:
    """What a server holds besides fence epochs, of which a few bytes stay."""
    with Store([url]) as store:
        names = store.command(0, "KEYS", "*")
        assert isinstance(names, list)
        return sorted(key.decode() for key in names if not key.endswith(b":epoch"))


def test_the_documented_rights_are_enough_and_each_command_needs_only_its_own(clicks: Clicks, tmp_path: Path) -> None:
    """Without the right to ask how large a hash is, `stores status` lacks that size only, and forecasts with measured ones."""
    run, told = tmp_path / "run", tmp_path / "status.json"
    with LocalStores(3, tmp_path / "servers") as servers, Store(servers.urls) as store:
        for shard in range(3):
            store.command(shard, "ACL", "SETUSER", "ann", "on", ">secret", "~{run:*", "~run:run", *documented_rights()[0])
        train(clicks, run, ",".join(url.replace("unix://", "unix://ann:secret@") for url in servers.urls))
        forecasts = []
        for rights in ([], documented_rights()[1]):
            for shard in range(3):
                store.command(shard, "ACL", "SETUSER", "ann", *rights)
            done("stores", "status", run, "--json", told, FORELOAD_STORE_PASSWORD="secret")
            status = json.loads(told.read_text())
            assert [shard["state"] for shard in status["shards"]] == ["up"] * 3
            assert status["parity"]["state"] == "ok"
            assert all(("hash_bytes" in shard) == bool(rights) for shard in status["shards"])
            forecasts.append(status["forecast"])
        assert [one["overhead_measured"] for one in forecasts] == [False, True]
        for computed, measured in zip(forecasts[0]["shards"], forecasts[1]["shards"], strict=True):
            assert computed["memory_bytes"] == pytest.approx(measured["memory_bytes"], rel=0.1)
        done("delete", run, FORELOAD_STORE_PASSWORD="secret")
        assert not run.exists()


def test_runs_with_rows_are_listed_and_each_is_deleted_by_itself(clicks: Clicks, tmp_path: Path) -> None:
    with LocalStores(2, tmp_path / "servers") as servers:
        urls = ",".join(servers.urls)
        assert [line.split("  ")[1] for line in done("stores", "list", urls).splitlines()] == ["no run has rows here"] * 2
        with Store(servers.urls) as store:
            # Another program's.
            store.command(0, "SET", "other:run", "walk")
            store.command(0, "HSET", "{user:1}:2", "name", "ann")
        first, second = tmp_path / "first", tmp_path / "second"
        train(clicks, first, urls)
        train(clicks, second, urls)
        ids = {run.name: Run.open(run).manifest.run_id for run in (first, second)}

        told = done("stores", "list", urls, "--json", tmp_path / "list.json").splitlines()
        assert [line.split(":")[-2].split("  ")[-1] for line in told] == [
            f"namespace {name}, shard {shard} of 2 of run {ids[name]}" for shard in range(2) for name in ("first", "second")
        ]
        listed = json.loads((tmp_path / "list.json").read_text())["servers"]
        status = done("stores", "status", first, "--json", tmp_path / "status.json")
        assert "shard 0" in status
        shards = json.loads((tmp_path / "status.json").read_text())["shards"]
        for server, shard in zip(listed, shards, strict=True):
            assert server["namespaces"][0]["rows"] == shard["rows"] + shard["parity_rows"]
            assert server["namespaces"][0]["bytes"] == shard["hash_bytes"]

        told = done("delete", first).splitlines()
        assert all(
            line.startswith(f"deleted  {url}: namespace first, ") for line, url in zip(told[:2], servers.urls, strict=True)
        )
        assert told[2:] == [f"deleted  {first}"]
        assert not first.exists()
        assert "has no manifest.json" in refused("delete", first)
        for url in servers.urls:
            assert not any("first" in key for key in keys(url))
        digest = done("digest", second)
        assert len(digest.strip()) == 64

        # A run whose folder is gone.
        shutil.rmtree(second)
        told = done("stores", "delete", urls, "second").splitlines()
        assert all("deleted" in line for line in told)
        told = done("stores", "delete", urls, "second").splitlines()
        assert all(line.endswith("has nothing in namespace second") for line in told)
        assert [keys(url) for url in servers.urls] == [["other:run", "{user:1}:2"], []]
        assert "no run has rows here" in done("stores", "list", urls)
        assert "namespace: must be" in refused("stores", "delete", urls, "a b")


@pytest.mark.full
def test_a_run_is_deleted_though_a_shard_is_down_and_what_is_left_is_told(clicks: Clicks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with LocalStores(1, tmp_path / "up") as up, LocalStores(1, tmp_path / "down") as down:
        (up_url,), (down_url,) = up.urls, down.urls
        train(clicks, run, f"{up_url},{down_url}")
        (run / "notes.txt").write_text("mine")
        down.stop(save=True)
        status, out, err = run_here("delete", run)
        assert (status, err) == (2, "")
        lines = out.splitlines()
        assert lines[0].startswith(f"deleted  {up_url}: namespace run, ")
        assert lines[1].startswith(f"left  {down_url}: store {down_url}: cannot be reached")
        later = f"foreload stores delete {down_url} run"
        assert lines[1].endswith(f"; later: {later}")
        assert lines[2] == f"deleted  {run}, except files that are not the run's: notes.txt"
        assert [path.name for path in run.iterdir()] == ["notes.txt"]
        assert keys(up_url) == []
        assert run_here("stores", "list", f"{up_url},{down_url}")[0] == 2
        # Its server is back, with the rows.
        down.start()
        assert "namespace run, shard 1 of 2" in done("stores", "list", down_url)
        done(*later.split()[1:])
        assert keys(down_url) == []


@pytest.mark.full
def test_what_another_run_has_taken_stays(clicks: Clicks, tmp_path: Path) -> None:
    with LocalStores(1, tmp_path / "server") as server:
        first, second = tmp_path / "a" / "run", tmp_path / "b" / "run"
        train(clicks, first, server.urls[0])
        done("train", clicks.schedule, "--run", second, "--store", server.urls[0], *SMALL, "--overwrite")
        assert f"left  {server.urls[0]}: namespace run there belongs to another run" in done("delete", first)
        assert not first.exists()
        done("digest", second)


def test_a_run_that_trains_is_not_deleted_and_its_local_servers_go_with_it(clicks: Clicks, tmp_path: Path, hold: Hold) -> None:
    run = tmp_path / "run"
    command = hold(["train", clicks.schedule, "--run", run, "--store", "local:2", *SMALL], anew=True)
    try:
        assert "is being trained; stop it with Ctrl-C first" in refused("delete", run)
        # All but the servers.
        trainers = [
            process
            for process in command.remains.processes()
            if {"foreload.trainer.cli", "foreload.trainer.cluster.member.worker"} & set(process.cmdline())
        ]
        for process in trainers:
            process.kill()
        command.process.wait()
        psutil.wait_procs(trainers, timeout=DEADLINE_SECONDS)
        # Broken off: its servers are left, and alone have its rows.
        servers = LocalStores.find(run / STORES)
        assert servers is not None
        assert all(servers.pids)
        told = done("delete", run)
        assert told.splitlines() == ["deleted  its 2 local store shards", f"deleted  {run}"]
        assert not run.exists()
        assert servers.pids == (None, None)
    finally:
        command.clear()
