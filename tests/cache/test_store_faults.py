"""What goes wrong with a store: each gives one exception of its kind with one line, and no password."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from delay_proxy import narrow
from tls import TlsServer

from foreload.cache.client import connections, frames
from foreload.cache.client.connections import reply_error
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import COMMAND_ROWS, Read, Store, Write
from foreload.cache.client.url import PASSWORD_VARIABLE, StoreUrl, parse_url
from foreload.cache.errors import (
    CommandRefused,
    Fenced,
    StoreAuth,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreTls,
    StoreUnavailable,
)
from foreload.cache.rows.row_bytes import fields

SHORT = timedelta(seconds=0.3)  # for what must come to its end
LONG = timedelta(seconds=20)  # for what must not


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalStores]:
    """One server of the test's own, to be mistreated."""
    with LocalStores(1, tmp_path / "server") as stores:
        yield stores


def write(count: int = 10, row_bytes: int = 40) -> Write:
    return Write(0, b"k", np.arange(count, dtype=np.uint64), np.full((count, row_bytes), 7, np.uint8), b"00000001")


def read(count: int = 10, row_bytes: int = 40) -> Read:
    return Read(0, b"k", np.arange(count, dtype=np.uint64), np.zeros((count, row_bytes), np.uint8))


def line(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """The error's text, which is one line about a store."""
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("store ")
    return text


def test_a_store_that_is_down_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
        Store([f"unix://:secret@{tmp_path}/none.sock"], connect_timeout=SHORT)
    assert "secret" not in line(caught)
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        Store(["redis://127.0.0.1:1"], connect_timeout=SHORT)


def test_a_store_that_is_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = LocalStores(1, tmp_path)
    url = f"unix://{tmp_path}/shard-0.sock"
    tried, connect_error = threading.Event(), connections._connect_error

    def noted(url: StoreUrl, error: Exception) -> StoreError:
        tried.set()
        return connect_error(url, error)

    monkeypatch.setattr(connections, "_connect_error", noted)
    made: list[Store] = []
    thread = threading.Thread(target=lambda: made.append(Store([url], connect_timeout=LONG)))
    thread.start()
    assert tried.wait(LONG.total_seconds()), "it was there too late once"
    with stores:
        thread.join()
        made[0].command(0, "PING")
        made[0].close()


def test_a_silent_store_is_unavailable_after_the_timeout(server: LocalStores) -> None:
    with Store(server.urls, SHORT) as store:
        pid = server.pids[0] or 0
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match=r"did not answer for 0\.3 s") as caught:
                store.exchange([read()], [write()])
            assert str(server.urls[0]) in line(caught)
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(StoreUnavailable, match=r"the connections are closed .*silent"):
            store.exchange([read()], [])


def test_servers_that_are_silent_are_all_waited_for_at_once_and_each_once(tmp_path: Path) -> None:
    """Three of them take as long as one, and as the limit says."""
    listening, accepted = [socket.socket(socket.AF_UNIX) for _ in range(3)], list[socket.socket]()
    for number, one in enumerate(listening):
        one.bind(str(tmp_path / f"{number}.sock"))
        one.listen()
    with pytest.raises(StoreUnavailable, match=r"0\.sock: cannot be reached"):
        Store([f"unix://{tmp_path}/{number}.sock" for number in range(3)], SHORT, SHORT)
    for one in listening:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted.append(one.accept()[0])
    names = [one.getsockname() for one in accepted]
    for one in (*listening, *accepted):
        one.close()
    assert names == [f"{tmp_path}/{number}.sock" for number in range(3)]


def test_a_store_behind_a_slow_link_is_not_silent_while_it_takes_what_was_sent(server: LocalStores) -> None:
    rows, writes = np.zeros((COMMAND_ROWS, 132), np.uint8), 3
    with narrow(server.urls[0], 1 << 14, 0.03) as url, Store([url], SHORT) as store:
        begun = time.monotonic()
        store.exchange([], [Write(0, b"slow", fields(table, np.arange(len(rows))), rows) for table in range(writes)])
        assert time.monotonic() - begun > 2 * SHORT.total_seconds(), "the link is not as slow as this must be"
        assert store.command(0, "HLEN", b"slow") == writes * len(rows)


def test_a_client_that_was_itself_stopped_calls_no_store_silent(server: LocalStores, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, run_exchange = server.pids[0] or 0, frames.run_exchange
    asked: list[bool] = []

    def stopped_before_it_looks(requests: Any, connections: Any, out: Any, data: Any, clock: int, *times: int) -> tuple[int, int]:
        if asked:
            found: tuple[int, int] = run_exchange(requests, connections, out, data, clock, *times)
            return found
        asked.append(True)
        assert run_exchange(requests, connections, out, data, clock, times[0], 1) == (frames.PAUSED, 0)
        os.kill(pid, signal.SIGCONT)
        # The server has answered while this process was stopped for much longer than the timeout. (Its answer to a later command of another
        # connection would not say so: it may be sent first.)
        assert select.select([store._connections.channels[0].socket], [], [], LONG.total_seconds())[0]
        connections[:, frames.PROGRESSED_NS] -= 10 * times[0]
        return frames.PAUSED, 0

    with Store(server.urls, LONG) as store:
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(frames, "run_exchange", stopped_before_it_looks)
        store.exchange([], [write()])
    assert asked


def test_a_killed_store_is_unavailable_at_once(server: LocalStores) -> None:
    with Store(server.urls, LONG) as store:
        os.kill(server.pids[0] or 0, signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match=r"closed the connection|connection broke") as caught:
            store.exchange([read()], [write()])
        line(caught)


def test_a_full_store_stops_cleanly_and_still_answers(server: LocalStores) -> None:
    with Store(server.urls, LONG) as store:
        store.exchange([], [write()])
        store.command(0, "CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(StoreFull, match=r"is full .*maxmemory") as caught:
            store.exchange([], [write(2048, 400) for _ in range(100)])
        line(caught)
        wanted = read()
        store.exchange([wanted], [])
        assert wanted.missing is None


def test_a_replica_is_refused(server: LocalStores) -> None:
    with Store(server.urls, LONG) as store:
        store.command(0, "REPLICAOF", "127.0.0.1", 1)
        with pytest.raises(StoreFull, match="read-only replica"):
            store.exchange([], [write()])


def test_a_busy_store_is_tried_again(server: LocalStores) -> None:
    with Store(server.urls, LONG) as store, redis.Redis(unix_socket_path=str(parse_url(server.urls[0], {}).path)) as control:
        script = _make_busy(server.urls[0], store, control)
        killer = threading.Thread(target=lambda: _kill_after_a_retry(store, control))
        killer.start()
        store.exchange([], [write()])
        killer.join()
        script.join()
        wanted = read()
        store.exchange([wanted], [])
        assert wanted.missing is None
        assert store.retries >= 2


def _make_busy(url: str, store: Store, control: redis.Redis) -> threading.Thread:
    """Has a server run a script that ends when it is killed: until then every other command gets BUSY. Returns the thread that asked for it."""
    store.command(0, "CONFIG", "SET", "lua-time-limit", 1)  # milliseconds; the older of its names, which all servers know

    def run_script() -> None:
        with contextlib.suppress(StoreError), Store([url], LONG) as other:
            other.command(0, "EVAL", "while true do end", 0)

    script = threading.Thread(target=run_script)
    script.start()
    with contextlib.suppress(redis.ResponseError):
        while True:
            control.ping()
    return script


def _kill_after_a_retry(store: Store, control: redis.Redis) -> None:
    deadline = time.monotonic() + LONG.total_seconds()
    while store.retries < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    control.script_kill()


def test_a_store_busy_for_too_long_is_unavailable(server: LocalStores) -> None:
    with Store(server.urls, SHORT) as store, redis.Redis(unix_socket_path=str(parse_url(server.urls[0], {}).path)) as control:
        script = _make_busy(server.urls[0], store, control)
        with pytest.raises(StoreUnavailable, match="not ready"):
            store.exchange([read()], [write()])
        control.script_kill()
        script.join()


def test_an_evicting_store_is_refused(server: LocalStores) -> None:
    with Store(server.urls) as store:
        store.command(0, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match=r"must be noeviction.*got allkeys-lru") as caught:
        Store(server.urls)
    line(caught)


def test_passwords_are_checked_and_never_shown(server: LocalStores, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = server.urls[0]
    monkeypatch.setenv(PASSWORD_VARIABLE, "hush!")
    with Store([plain]) as store:
        # The server wanted none: one store URL's password must not keep another from working.
        assert store.urls[0].password is None
        store.command(0, "CONFIG", "SET", "requirepass", "hush!")
    with Store([plain]) as store:
        assert "hush" not in str(store.urls)
        store.command(0, "ACL", "SETUSER", "ann", "on", ">ann!", "~*", "+@all", "-hset", "-hmget")
    named = plain.replace("unix://", "unix://ann:ann!@")
    with Store([named]) as store, pytest.raises(StoreAuth, match="NOPERM"):
        store.exchange([], [write()])
    for wrong in (plain.replace("unix://", "unix://:wrong!@"), plain.replace("unix://", "unix://ann:wrong!@")):
        with pytest.raises(StoreAuth, match=PASSWORD_VARIABLE) as caught:
            Store([wrong])
        assert "wrong!" not in line(caught)
    monkeypatch.delenv(PASSWORD_VARIABLE)
    with pytest.raises(StoreAuth, match="NOAUTH"):
        Store([plain])
    # The fixture's shutdown has no password.
    with Store([plain.replace("unix://", "unix://:hush!@")]) as store:
        store.command(0, "CONFIG", "SET", "requirepass", "")


def test_something_else_than_redis_is_noticed(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "web.sock"))
    listener.listen()

    def answer() -> None:
        with listener.accept()[0] as client:
            client.recv(1000)
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.recv(1000)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(StoreError) as caught:
        Store([f"unix://{tmp_path}/web.sock"], SHORT, SHORT)
    line(caught)
    thread.join()
    listener.close()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreFull),
        ("MISCONF Redis is configured to save RDB snapshots", StoreFull),
        ("READONLY You can't write against a read only replica.", StoreFull),
        ("NOAUTH Authentication required.", StoreAuth),
        ("WRONGPASS invalid username-password pair or user is disabled.", StoreAuth),
        ("NOPERM this user has no permissions", StoreAuth),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", Fenced),
        ("LOADING Redis is loading the dataset in memory", StoreBusy),
        ("MOVED 866 10.0.0.1:6379", StoreError),
        ("ERR unknown\r\ncommand", CommandRefused),
    ],
)
def test_each_answer_of_a_server_has_its_exception(text: str, kind: type[StoreError]) -> None:
    error = reply_error(parse_url("redis://:secret@h"), text)
    assert type(error) is kind
    assert "secret" not in str(error)
    assert "\n" not in str(error)


def test_a_peer_that_reads_nothing_while_it_writes_is_no_deadlock(server: LocalStores, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "relay.sock"))
    listener.listen()

    def relay() -> None:
        with listener.accept()[0] as client, socket.socket(socket.AF_UNIX) as upstream:
            upstream.connect(str(parse_url(server.urls[0], {}).path))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            other = {client: upstream, upstream: client}
            with selectors.DefaultSelector() as selector:
                for end in other:
                    selector.register(end, selectors.EVENT_READ)
                while True:
                    for key, _ in selector.select():
                        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not data:
                            return
                        other[key.fileobj].sendall(data)  # type: ignore[index]

    thread = threading.Thread(target=relay)
    thread.start()
    with Store([f"unix://{tmp_path}/relay.sock"], LONG) as store:
        store.exchange([], [write(2048, 4000)])
        reads = [read(2048, 4000) for _ in range(4)]
        store.exchange(reads, [write(2048, 4000)])
        store.exchange(reads, [write(2048, 4000) for _ in range(3)])
        for got in reads:
            assert got.missing is None
            assert (got.rows == 7).all()
    thread.join()
    listener.close()


def test_rows_travel_over_tls(tls_server: TlsServer) -> None:
    with Store([tls_server.url], LONG) as store:
        rows = np.random.default_rng(0).integers(0, 256, (2048, 500)).astype(np.uint8)
        fields = np.arange(2048, dtype=np.uint64)
        reads = [Read(0, b"k", fields, np.zeros_like(rows)) for _ in range(8)]
        store.exchange([], [Write(0, b"k", fields, rows, b"00000001")])
        store.exchange(reads, [Write(0, b"k", fields, rows, b"00000002") for _ in range(8)])
        for got in reads:
            assert got.marker == b"00000001"
            assert np.array_equal(got.rows, rows)
        store.exchange(reads[:1], [])
        assert reads[0].marker == b"00000002"


def test_a_client_that_was_itself_stopped_calls_no_store_silent_over_tls(
    tls_server: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lapse: list[int] = []

    class Stopped(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if not lapse:
                lapse.append(10 * LONG // timedelta(microseconds=1) * 1000)
                return []
            return super().select(timeout)

    # It looks often, so that next to nothing of the lapse is time that it had asked for.
    monkeypatch.setattr("foreload.cache.client.connections._PAUSE_NS", 1_000_000)
    for module in ("foreload.cache.client.connections", "foreload.cache.client.connections"):
        monkeypatch.setattr(f"{module}.now_ns", lambda: time.monotonic_ns() + sum(lapse))
    with Store([tls_server.url], LONG) as store:
        monkeypatch.setattr(selectors, "DefaultSelector", Stopped)
        store.exchange([], [write()])
    assert lapse


def test_an_untrusted_certificate_is_refused(tls_server: TlsServer, certificates: Path) -> None:
    port = tls_server.port
    for url, words in [
        (f"rediss://localhost:{port}", "certificate is not trusted"),
        (f"rediss://localhost:{port}?ssl_ca_certs={certificates}/stranger.pem", "certificate is not trusted"),
        (f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates}/ca.pem", "certificate is not trusted"),
        (f"rediss://localhost:{port}?ssl_ca_certs={certificates}/server.key", "TLS failed"),
        (f"rediss://localhost:{port}?ssl_ca_certs={certificates}/none.pem", "must be an existing file"),
    ]:
        with pytest.raises(StoreTls, match=words) as caught:
            Store([url], LONG, SHORT)
        line(caught)
    with Store([f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates}/ca.pem&ssl_check_hostname=false"], LONG) as store:
        assert store.command(0, "PING") == "PONG"


def test_plain_and_tls_do_not_meet(tls_server: TlsServer) -> None:
    with pytest.raises(StoreUnavailable):
        Store([f"redis://localhost:{tls_server.port}"], SHORT, SHORT)


@pytest.mark.parametrize("by", ["CLIENT KILL", "SIGKILL"])
def test_a_closed_tls_connection_is_a_broken_one(tls_server: TlsServer, by: str) -> None:
    rows = [write(2048, 400) for _ in range(20)]
    with Store([tls_server.url], LONG) as store:
        store.exchange([], rows)
        if by == "SIGKILL":
            os.kill(tls_server.stores.pids[0] or 0, signal.SIGKILL)
        else:
            tls_server.disconnect()
        with pytest.raises(StoreUnavailable, match=r"closed the connection|connection broke") as caught:
            store.exchange([read()], rows)
        line(caught)
    if by == "SIGKILL":
        with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
            Store([tls_server.url], LONG, SHORT)
        line(caught)
    else:
        Store([tls_server.url], LONG, SHORT).close()
