"""The token of a job, by which its processes on several hosts know each other: where it comes from, and how two ends of a connection show that they
have it. Neither the token nor anything that gives it away is ever sent; what follows on the connection is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from foreload.base.errors import SettingError

TOKEN_VARIABLE = "FORELOAD_JOB_TOKEN"
HANDSHAKE = timedelta(seconds=5)  # for all of it, however slowly the other end sends
_LEAST = 16  # characters of a token
_MOST = 4096
_NONCE = 32
_PROOF = hashlib.sha256().digest_size


class WrongToken(ConnectionError):
    """The other end of a connection has another token, or none."""


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(32)


def given_token(file: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token of a file or, without one, of the environment; None where neither has any. Raises SettingError."""
    if file is None:
        return None if TOKEN_VARIABLE not in environment else _checked(environment[TOKEN_VARIABLE], TOKEN_VARIABLE)
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(_MOST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--token-file: cannot be read: {file} ({error}); give RUN/token of the training's host") from error
    return _checked(text, f"--token-file {file}")


def _checked(text: str, name: str) -> str:
    token = text.strip()
    if not _LEAST <= len(token) <= _MOST or not token.isascii() or not token.isprintable():
        raise SettingError(
            f"{name}: must be {_LEAST} to {_MOST} printable ASCII characters; got {len(token)} characters; take what RUN/token has"
        )
    return token


def write_token(path: Path, token: str) -> None:
    """Write a token so that its owner alone can read it. Raises OSError."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(token + "\n")


def admit(peer: socket.socket, token: str, purpose: str) -> None:
    """The side that was connected to: let the peer show that it has the token, and show that this side has it. purpose: of the connection, the same
    on both sides. Raises WrongToken, and OSError where the peer is gone or takes longer than HANDSHAKE.
    """
    deadline = time.monotonic() + HANDSHAKE.total_seconds()
    own = secrets.token_bytes(_NONCE)
    _send(peer, own, deadline)
    answer = _receive(peer, _NONCE + _PROOF, deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(token, purpose, b"joins", own, theirs)):
        raise WrongToken("the token is not the job's")
    _send(peer, _proof(token, purpose, b"admits", own, theirs), deadline)
    peer.settimeout(None)


def introduce(to: socket.socket, token: str, purpose: str) -> None:
    """The side that has connected; see `admit`. Raises WrongToken, and OSError, also where the other side closes the connection at once."""
    deadline = time.monotonic() + HANDSHAKE.total_seconds()
    theirs = _receive(to, _NONCE, deadline)
    own = secrets.token_bytes(_NONCE)
    _send(to, own + _proof(token, purpose, b"joins", theirs, own), deadline)
    try:
        proof = _receive(to, _PROOF, deadline)
    except ConnectionError as error:
        raise WrongToken("the token is not the job's") from error
    if not hmac.compare_digest(proof, _proof(token, purpose, b"admits", theirs, own)):
        raise WrongToken("what answers there does not have the job's token")
    to.settimeout(None)


def _proof(token: str, purpose: str, side: bytes, first: bytes, second: bytes) -> bytes:
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
