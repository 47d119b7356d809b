"""Servers that stand still or close connections during the traffic: which ones are lost, which are waited for, and that no row is."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from lost_shards import PATIENCE, Disturber, asked, check_lost, check_unharmed, empty, kill, run, undisturbed
from tls import KINDS, TlsServer, tls_server_or_skip

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import NO_ROWS, Read, Store
from foreload.cache.errors import ShardsSilent
from foreload.cache.protocol.shards.shard_status import ShardNews, ShardsAwaited


def test_a_stopped_shard_is_lost_after_the_timeout_and_what_it_was_sent_harms_nothing(
    stores: LocalStores, tmp_path: Path
) -> None:
    disturber = Disturber(
        {
            ("data leaves", 9): partial(kill, stores, 2, signal.SIGSTOP),
            ("batch logged", 14): partial(kill, stores, 2, signal.SIGCONT),
        }
    )
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE, timeout=0.3)
    assert lost == []
    assert found == undisturbed(3, 2, 1)


def test_more_shards_that_do_not_answer_than_parity_covers_are_not_lost(stores: LocalStores, tmp_path: Path) -> None:
    disturber = Disturber({("data leaves", 9): partial(kill, stores, 0), ("batch logged", 12): partial(kill, stores, 2)})
    with pytest.raises(
        ShardsSilent, match=r"store shards 0, 2: are lost or do not answer, but parity covers only 1: .* cannot be reached"
    ):
        run(stores, tmp_path / "logs", 2, 1, disturber)


class Releasing(Disturber):
    """One that lets servers go on that stand still, once they are waited for."""

    def __init__(self, stores: LocalStores, stopped: dict[tuple[str, int], Sequence[int]]) -> None:
        self._stores = stores
        super().__init__({moment: partial(self._each, shards, signal.SIGSTOP) for moment, shards in stopped.items()})
        self.awaited: list[tuple[int, ...]] = []

    def _each(self, shards: Sequence[int], number: int) -> None:
        for shard in shards:
            kill(self._stores, shard, number)

    def hear(self, news: ShardNews) -> None:
        super().hear(news)
        if isinstance(news, ShardsAwaited):
            self.awaited.append(news.shards)
            self._each(news.shards, signal.SIGCONT)


@pytest.mark.parametrize(
    ("moment", "k", "r", "shards"),
    [  # when every shard is asked something: of others, those that are asked alone may be lost before the rest is found to be silent
        (("data leaves", 9), 2, 1, (0, 1, 2)),
        (("batch logged", 9), 2, 1, (0, 2)),
        (("parity leaves", 9), 2, 1, (0, 1, 2)),
        (("data leaves", 9), 1, 0, (0, 1, 2)),
        (("data leaves", 7), 1, 0, (1,)),
    ],
)
def test_shards_that_stand_still_and_are_too_many_are_waited_for(
    stores: LocalStores, tmp_path: Path, moment: tuple[str, int], k: int, r: int, shards: tuple[int, ...]
) -> None:
    """Nothing is lost, and the rows are those of a run in which all answered."""
    disturber = Releasing(stores, {moment: shards})
    check_unharmed(stores, tmp_path / "logs", k, r, disturber, timeout=1, patience=PATIENCE)
    assert disturber.awaited[0]
    assert set(disturber.awaited[0]) <= set(shards)
    assert disturber.awaited[-1] == ()


@pytest.mark.parametrize(("k", "r"), [(2, 1), (1, 0)], ids=["2+1", "without parity"])
def test_a_connection_that_is_reset_is_made_again_and_nothing_is_lost(
    stores: LocalStores, tmp_path: Path, k: int, r: int
) -> None:
    reset = partial(asked, stores, 1, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    leave = ("data leaves", "parity leaves", "fetch leaves") if r else ("data leaves", "data acknowledged", "fetch leaves")
    disturber = Disturber({(action, count): reset for action in leave for count in (6, 8)})
    check_unharmed(stores, tmp_path / "logs", k, r, disturber)


@dataclass
class OverTls:
    """Three servers that are reached over TLS."""

    servers: list[TlsServer]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]


@pytest.fixture(params=KINDS)
def over_tls(request: pytest.FixtureRequest, tmp_path: Path, certificates: Path) -> Iterator[OverTls]:
    """Three servers of a test's own, over TLS."""
    with contextlib.ExitStack() as opened:
        servers = []
        for shard in range(3):
            servers.append(tls_server_or_skip(tmp_path / f"{shard}", certificates, request.param))
            opened.callback(servers[-1].close)
        yield OverTls(servers)


def test_a_server_that_closes_tls_connections_loses_nothing_and_one_that_dies_is_a_lost_shard(
    over_tls: OverTls, tmp_path: Path
) -> None:
    servers = over_tls.servers
    disturber = Disturber(
        {
            (action, count): servers[1].disconnect
            for action in ("data leaves", "parity leaves", "fetch leaves")
            for count in (4, 6, 8)
        }
    )
    check_unharmed(over_tls, tmp_path / "logs", 2, 1, disturber)
    for shard in range(3):
        empty(over_tls, shard)
    check_lost(over_tls, tmp_path / "more logs", {("data leaves", 9): partial(kill, servers[2].stores, 0)}, 2)


def test_a_store_whose_shards_are_optional_begins_without_those_that_do_not_answer(stores: LocalStores) -> None:
    kill(stores, 0)
    kill(stores, 1, signal.SIGSTOP)
    try:
        with Store(stores.urls, timedelta(seconds=0.3), timedelta(), optional=True) as store:
            assert sorted(store.down) == [0, 1]
            assert store.command(2, "PING") == "PONG"
            read = Read(2, b"k", *NO_ROWS)
            assert sorted(store.attempt([read, Read(0, b"k", *NO_ROWS)], [])) == [0]
    finally:
        kill(stores, 1, signal.SIGCONT)
