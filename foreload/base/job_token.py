"""The token of a job, by which its processes on several hosts recognize each other.

This module reads the token, and lets the two ends of a connection prove that they have it. Neither
the token nor anything that reveals it is ever sent. What follows on the connection is not
encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from foreload.base.errors import SettingError

TOKEN_VARIABLE = "FORELOAD_JOB_TOKEN"
HANDSHAKE = timedelta(seconds=5)  # for the whole handshake, however slowly the peer sends
_LEAST = 16  # characters of a token
_MOST = 4096
_NONCE = 32
_PROOF = hashlib.sha256().digest_size


class WrongToken(ConnectionError):
    """The other end of a connection has another token, or none."""


def new_token() -> str:
    """Return a random token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def given_token(file: str | None) -> str | None:
    """Return the token of a file or, without a file, of the environment. None if there is none.

    Args:
        file: the path of a file with the token, or None.

    Raises:
        SettingError: the token is malformed, or the file cannot be read.
    """
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE)
        return None if text is None else _checked(text, TOKEN_VARIABLE)
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(_MOST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"--token-file: cannot be read: {file} ({error}); give RUN/token of the host that started training"
        ) from error
    return _checked(text, f"--token-file {file}")


def _checked(text: str, name: str) -> str:
    token = text.strip()
    if not _LEAST <= len(token) <= _MOST or not token.isascii() or not token.isprintable():
        raise SettingError(
            f"{name}: must be {_LEAST} to {_MOST} printable ASCII characters; got {len(token)} characters; use the contents of RUN/token"
        )
    return token


def write_token(path: Path, token: str) -> None:
    """Write a token to a file that only its owner can read.

    Raises:
        OSError: the file cannot be written.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(token + "\n")


def admit(peer: socket.socket, token: str, purpose: str) -> None:
    """Perform the handshake on the side that accepted the connection.

    The peer proves first that it has the token, and then this side does.

    Args:
        purpose: what the connection is for. It must be the same on both sides.

    Raises:
        WrongToken: the peer has another token, or none.
        OSError: the peer closed the connection, or takes longer than HANDSHAKE.
    """
    deadline = time.monotonic() + HANDSHAKE.total_seconds()
    own = secrets.token_bytes(_NONCE)
    _send(peer, own, deadline)
    answer = _receive(peer, _NONCE + _PROOF, deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(token, purpose, b"joins", own, theirs)):
        raise WrongToken("the token does not match the job's")
    _send(peer, _proof(token, purpose, b"admits", own, theirs), deadline)
    peer.settimeout(None)


def introduce(to: socket.socket, token: str, purpose: str) -> None:
    """Perform the handshake on the side that opened the connection; see `admit`.

    Raises:
        WrongToken: the other side has another token, or rejects this one.
        OSError: the connection failed, or the other side closed it at once.
    """
    deadline = time.monotonic() + HANDSHAKE.total_seconds()
    theirs = _receive(to, _NONCE, deadline)
    own = secrets.token_bytes(_NONCE)
    _send(to, own + _proof(token, purpose, b"joins", theirs, own), deadline)
    try:
        proof = _receive(to, _PROOF, deadline)
    except ConnectionError as error:
        raise WrongToken("the token does not match the job's") from error
    if not hmac.compare_digest(proof, _proof(token, purpose, b"admits", theirs, own)):
        raise WrongToken("the process that answers there does not have the job's token")
    to.settimeout(None)


def _proof(token: str, purpose: str, side: bytes, first: bytes, second: bytes) -> bytes:
    # Both nonces make a proof valid for this handshake only. `side` keeps a peer from returning the
    # proof that it received as its own.
    return hmac.digest(token.encode(), b"\0".join([b"foreload", purpose.encode(), side, first, second]), "sha256")


def _send(to: socket.socket, data: bytes, deadline: float) -> None:
    to.settimeout(max(deadline - time.monotonic(), 0.001))
    to.sendall(data)


def _receive(source: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        source.settimeout(max(deadline - time.monotonic(), 0.001))
        part = source.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received


MOST_STRANGERS, MOST_OF_ONE = 64, 8
"""The most connections that may be in the handshake at the same time, and the most of one address.

Further connections are closed at once.
"""
MOST_PEERS = 1024  # open connections
_BACKLOG = 128
_PAUSE_SECONDS = 0.1  # after a connection could not be accepted


def connected(host: str, port: int, token: str, purpose: str, timeout: float) -> socket.socket:
    """Return a connection to a TokenServer of this purpose, after the handshake.

    Args:
        timeout: seconds in which the connection must be established.

    Raises:
        WrongToken: the server has another token, or rejects this one.
        OSError: the connection failed.
    """
    to = socket.create_connection((host, port), timeout)
    try:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(to, token, purpose)
    except BaseException:
        to.close()
        raise
    return to


class TokenServer:
    """A server that serves peers with the job's token, each connection in a thread.

    It listens from its construction until `close`.

    Args:
        serve: called with each connection after its handshake, and the address of the peer, in a
            thread of its own. The connection is closed when `serve` returns or raises OSError.
        on_refused: called with the address of each peer that has another token, and the reason.

    Attributes:
        address: the address it listens at.
        port: the port it listens at.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        purpose: str,
        serve: Callable[[socket.socket, str], None],
        on_refused: Callable[[str, str], None] = lambda address, why: None,
    ) -> None:
        self._token, self._purpose, self._serve, self._on_refused = token, purpose, serve, on_refused
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listening = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        self.address, self.port = self._listening.getsockname()[:2]
        self._changed = threading.Lock()
        self._strangers: Counter[str] = Counter()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name=purpose, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        with self._changed:
            self._closed = True
            left = [self._listening, *self._open]
        for one in left:
            # A thread that waits on the socket then sees the end of the connection.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, place = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                # The process has no free descriptors. Wait until some connections end.
                time.sleep(_PAUSE_SECONDS)
                continue
            address = str(place[0])
            with self._changed:
                crowded = self._strangers.total() >= MOST_STRANGERS or self._strangers[address] >= MOST_OF_ONE
                if self._closed or crowded or len(self._open) >= MOST_PEERS:
                    peer.close()
                    continue
                self._strangers[address] += 1
                self._open.add(peer)
            threading.Thread(target=self._run, args=(peer, address), name=self._purpose, daemon=True).start()

    def _run(self, peer: socket.socket, address: str) -> None:
        try:
            try:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                admit(peer, self._token, self._purpose)
            except WrongToken as error:
                self._on_refused(address, str(error))
                return
            except OSError:
                return
            finally:
                with self._changed:
                    self._strangers[address] -= 1
                    if not self._strangers[address]:
                        del self._strangers[address]
            with contextlib.suppress(OSError):
                self._serve(peer, address)
        finally:
            with self._changed:
                self._open.discard(peer)
            peer.close()
