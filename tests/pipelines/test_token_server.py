"""A socket that serves those who have the job's token: others get nothing, however many or slow they are."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from foreload.base import job_token
from foreload.base.errors import SettingError
from foreload.base.job_token import (
    MOST_OF_ONE,
    TokenServer,
    WrongToken,
    connected,
    given_token,
    introduce,
    new_token,
    write_token,
)
from foreload.base.socket_messages import packed_head, receive, send

TOKEN = new_token()


@pytest.fixture
def refused() -> list[tuple[str, str]]:
    """Who was refused."""
    return []


@pytest.fixture
def server(refused: list[tuple[str, str]]) -> Iterator[TokenServer]:
    """Answers every message with itself."""

    def serve(peer: socket.socket, _: str) -> None:
        while (message := receive(peer, 1000)) is not None:
            send(peer, message.values, bytes(message.payload))

    there = TokenServer("127.0.0.1", 0, TOKEN, "echo", serve, lambda address, why: refused.append((address, why)))
    yield there
    there.close()


def asked(server: TokenServer, token: str = TOKEN, purpose: str = "echo") -> object:
    with connected("127.0.0.1", server.port, token, purpose, 30) as to:
        send(to, {"a": 1}, b"xy")
        answer = receive(to)
        return answer and (answer.values, bytes(answer.payload))


def all_of(stranger: socket.socket) -> bytes:
    """Everything that comes until the end."""
    received = b""
    while part := stranger.recv(4096):
        received += part
    return received


def test_who_has_the_token_is_served(server: TokenServer) -> None:
    assert asked(server) == ({"a": 1}, b"xy")


@pytest.mark.parametrize(
    ("token", "purpose"),
    [(new_token(), "echo"), (TOKEN[:-1] + "_", "echo"), (TOKEN, "another")],
    ids=["token", "last character", "purpose"],
)
def test_another_token_or_purpose_is_refused(
    server: TokenServer, refused: list[tuple[str, str]], token: str, purpose: str
) -> None:
    with pytest.raises(WrongToken, match="the token does not match the job's"):
        asked(server, token, purpose)
    assert [address for address, _ in refused] == ["127.0.0.1"]
    assert asked(server) is not None


def test_a_server_without_the_token_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.sendall(bytes(32))
                peer.recv(64)
                peer.sendall(bytes(32))
                peer.recv(1)

        thread = threading.Thread(target=pretend)
        thread.start()
        with (
            socket.create_connection(listening.getsockname()) as to,
            pytest.raises(WrongToken, match="the process that answers there does not have the job's token"),
        ):
            introduce(to, TOKEN, "echo")
        thread.join()


def test_strangers_get_a_random_number_and_the_end(server: TokenServer) -> None:
    seen = []
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(64), b"\xff" * 64):
        with socket.create_connection(("127.0.0.1", server.port), 30) as stranger:
            stranger.sendall(garbage)
            try:
                seen.append(all_of(stranger))
            except ConnectionResetError:
                seen.append(b"")  # the server had not read all of it
    assert all(len(one) in (0, 32) for one in seen)
    assert asked(server) is not None


def test_strangers_are_few(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_token, "HANDSHAKE", timedelta(seconds=60))
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_OF_ONE):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30))
            assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        with socket.create_connection(("127.0.0.1", server.port), 30) as further:
            assert all_of(further) == b""
    while True:  # the last one's place is free a moment after its end
        try:
            assert asked(server) is not None
            break
        except OSError:
            continue


def test_slow_strangers_do_not_stay(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_token, "HANDSHAKE", timedelta(seconds=1))
    with socket.create_connection(("127.0.0.1", server.port), 30) as stranger:
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        stranger.sendall(b"x")
        assert all_of(stranger) == b""


def test_no_more_than_so_many_are_served(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_token, "MOST_PEERS", 1)
    with connected("127.0.0.1", server.port, TOKEN, "echo", 30), pytest.raises(OSError, match=r"closed|reset"):
        asked(server)


def test_a_message_that_is_too_long_ends_the_connection(server: TokenServer) -> None:
    with connected("127.0.0.1", server.port, TOKEN, "echo", 30) as to:
        to.sendall(packed_head({"a": "x" * 2000}, 0))
        assert receive(to) is None


def test_a_closed_server_closes_its_connections(server: TokenServer) -> None:
    with connected("127.0.0.1", server.port, TOKEN, "echo", 30) as to:
        server.close()
        assert receive(to) is None
    with pytest.raises(ConnectionRefusedError):
        connected("127.0.0.1", server.port, TOKEN, "echo", 30)


def test_a_token_is_of_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORELOAD_JOB_TOKEN", raising=False)
    file = tmp_path / "token"
    write_token(file, TOKEN)
    write_token(file, TOKEN)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert given_token(str(file)) == TOKEN
    assert given_token(None) is None
    monkeypatch.setenv("FORELOAD_JOB_TOKEN", f" {TOKEN}\n")
    assert given_token(None) == TOKEN


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, "with\nseveral lines of it", "\u00fc" * 20])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FORELOAD_JOB_TOKEN", text)
    with pytest.raises(SettingError, match="FORELOAD_JOB_TOKEN: must be 16 to 4096 printable ASCII") as error:
        given_token(None)
    assert not text.strip() or text not in str(error.value)
    with pytest.raises(SettingError, match="--token-file: cannot be read"):
        given_token(str(tmp_path / "nothing"))
