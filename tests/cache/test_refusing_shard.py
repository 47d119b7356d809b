"""Servers that refuse to write, are busy or answer nonsense during the traffic: they are lost until they no longer do, and said why."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from lost_shards import PATIENCE, Disturber, asked, check_lost, check_rebuilt, run
from waiting import DEADLINE_SECONDS

from foreload.cache.client import frames
from foreload.cache.client.connections import Channel
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError, ShardsRefuse, StoreError


def busy(stores: LocalStores, shard: int, until: threading.Event) -> None:
    """Have a server run a script until an event, and say so to everyone else."""

    def loop() -> None:
        with contextlib.suppress(CacheError), Store(stores.urls[shard : shard + 1], timedelta(seconds=60)) as other:
            other.command(0, "EVAL", "while true do end", 0)

    def end() -> None:
        until.wait(DEADLINE_SECONDS)
        with redis.Redis(unix_socket_path=str(stores.urls[shard]).removeprefix("unix://")) as other:
            other.script_kill()
        thread.join()

    asked(stores, shard, "CONFIG", "SET", "lua-time-limit", 5)
    thread = threading.Thread(target=loop)
    thread.start()
    threading.Thread(target=end).start()


def fail_to_save(stores: LocalStores, shard: int) -> None:
    """Have a server, that is to save now and then, fail to: from then on it takes no writes (MISCONF)."""
    # A folder in the place of its file: the rename at the end of the save fails, for root too.
    (stores.directory / f"shard-{shard}.rdb" / "x").mkdir(parents=True)
    with Store(stores.urls[shard : shard + 1], timedelta(seconds=5)) as other:
        other.command(0, "CONFIG", "SET", "save", "3600 1000000")
        other.command(0, "BGSAVE")
        while other.info(0)["rdb_last_bgsave_status"] != "err":
            pass


REFUSALS = {
    "READONLY": (("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")),
    "OOM": (("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0)),
    "NOPERM": (("ACL", "SETUSER", "default", "-hset"), ("ACL", "SETUSER", "default", "+hset")),
    "MISCONF": ((), ("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")),
}


def refusal_of(stores: LocalStores, kind: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """What has the server of shard 1 refuse to write from then on, and what ends that."""
    if kind == "BUSY":
        until = threading.Event()
        return partial(busy, stores, 1, until), until.set
    begin, end = REFUSALS[kind]
    return partial(asked, stores, 1, *begin) if begin else partial(fail_to_save, stores, 1), partial(asked, stores, 1, *end)


@pytest.mark.parametrize("kind", [*REFUSALS, "BUSY"])
def test_a_server_that_refuses_is_lost_until_it_no_longer_does(stores: LocalStores, tmp_path: Path, kind: str) -> None:
    begin, end = refusal_of(stores, kind)
    check_rebuilt(stores, tmp_path / "logs", {("batch logged", 9): begin, ("batch logged", 14): end}, timeout=0.5)


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_server_that_goes_on_refusing_is_never_adopted(stores: LocalStores, tmp_path: Path, kind: str) -> None:
    begin, _ = refusal_of(stores, kind)
    check_lost(stores, tmp_path / "logs", {("batch logged", 9): begin}, 1, grace=timedelta(seconds=1))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("READONLY", "is a read-only replica; give the URL of its primary instead"),
        ("OOM", r"is full \(OOM .*\); raise its maxmemory"),
        ("NOPERM", r"the user lacks a right \(NOPERM .*\); give it with ACL SETUSER"),
        ("MISCONF", r"refuses writes, because it cannot save to its disk \(MISCONF .*\); free disk space"),
        ("BUSY", r"is not ready \(BUSY .*\); try again later, or with a longer --store-timeout"),
    ],
)
def test_without_parity_a_server_that_refuses_is_told_of_in_a_line(
    stores: LocalStores, tmp_path: Path, kind: str, told: str
) -> None:
    begin, end = refusal_of(stores, kind)
    try:
        with pytest.raises(StoreError, match=rf"store unix://\S*shard-1\.sock: {told}") as caught:
            run(stores, tmp_path / "logs", 1, 0, Disturber({("data leaves", 4): begin}), timeout=0.5)
    finally:
        end()
    asked(stores, 1, "INFO")  # answered when the script has ended
    assert "\n" not in str(caught.value)


def test_where_more_servers_refuse_than_parity_covers_the_reason_is_told_and_not_that_rows_are_gone(
    stores: LocalStores, tmp_path: Path
) -> None:
    def refuse() -> None:
        for shard in range(3):
            asked(stores, shard, "CONFIG", "SET", "maxmemory", 1)

    message = (
        r"store shards 0, 1 no longer take part, but parity covers only 1: store unix://\S*: is full .*They still have their rows"
    )
    with pytest.raises(ShardsRefuse, match=message):
        run(stores, tmp_path / "logs", 2, 1, Disturber({("batch logged", 9): refuse}))


def test_a_server_that_refused_and_is_rebuilt_does_not_count_as_one_that_has_its_rows(
    stores: LocalStores, tmp_path: Path
) -> None:
    begin, end = refusal_of(stores, "OOM")
    disturber = Disturber(
        {
            ("batch logged", 9): begin,
            ("batch logged", 14): end,
            # What is rebuilt is decoded from rows of this one.
            ("rows rebuilt", 1): partial(asked, stores, 0, "ACL", "SETUSER", "default", "-@read"),
        }
    )
    message = (
        r"store shards 0, 1 no longer take part, but parity covers only 1: store unix://\S*shard-0\.sock: the user lacks a "
        r"right .*"
        r"Of these, 0 still have their rows"
    )
    with pytest.raises(ShardsRefuse, match=message):
        run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)


def test_a_server_that_answers_nonsense_is_lost(stores: LocalStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, nonsense = Channel.begin, [False]

    def garbled(self: Channel, table: np.ndarray, first: int, requests: list[Any]) -> None:
        begin(self, table, first, requests)
        if nonsense[0] and str(self.url) == stores.urls[1]:
            nonsense[0] = False
            self._data[:9] = np.frombuffer(b"HTTP/1.1\n", np.uint8)
            self._state[frames.IN_END] = 9

    monkeypatch.setattr(Channel, "begin", garbled)
    check_rebuilt(stores, tmp_path / "logs", {("batch logged", 9): lambda: nonsense.__setitem__(0, True)})
