"""One connection to a store shard: made by redis-py, then driven as a raw socket that never blocks, through buffers that are reused."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import redis

from cache.errors import Fenced, StoreAuth, StoreError, StoreFull, StoreTls, StoreUnavailable
from cache.resp import ProtocolError, Reply
from cache.url import PASSWORD_VARIABLE, StoreUrl

RETRIED = ("LOADING", "BUSY", "TRYAGAIN")
_COALESCE_BYTES = 1 << 16  # small commands are sent together up to this size
_RECEIVE_BYTES = 1 << 20
_FIRST_PAUSE = timedelta(milliseconds=10)
_LONGEST_PAUSE = timedelta(milliseconds=500)


@dataclass(slots=True)
class Request:
    """A command: its size, how to write it to a uint8 array, and the reply that it expects."""

    size_bytes: int
    encode: Callable[[np.ndarray], int]
    reply: Reply


def pauses(limit: timedelta) -> Iterator[None]:
    """Exponential backoff: each item follows a pause twice as long as the one before, until `limit` would be passed."""
    deadline = time.monotonic() + limit.total_seconds()
    pause = _FIRST_PAUSE.total_seconds()
    while time.monotonic() + pause < deadline:
        time.sleep(pause)
        yield
        pause = min(2 * pause, _LONGEST_PAUSE.total_seconds())


def reply_error(url: StoreUrl, text: str) -> StoreError:
    """The exception for an error line of the server, with a remedy where there is one."""
    code = text.split(" ", 1)[0]
    text = " ".join(text.split())
    if code == "OOM":
        return StoreFull(
            f"store {url}: is full ({text}); raise its maxmemory, remove a namespace no longer needed, or use more store shards"
        )
    if code == "MISCONF":
        return StoreFull(f"store {url}: takes no writes, for it cannot save to its disk ({text}); free disk space or see its log")
    if code == "READONLY":
        return StoreFull(f"store {url}: is a read-only replica; name its primary instead")
    if code in ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED") or "without any password configured" in text:
        return StoreAuth(
            f"store {url}: refuses the user or password ({text}); give them as SCHEME://USER:PASSWORD@... or in {PASSWORD_VARIABLE}"
        )
    if code == "WRONGTYPE":
        return Fenced(f"store {url}: another owner has taken the lane over ({text}); this one stops")
    if code in RETRIED:
        return StoreUnavailable(f"store {url}: not ready ({text}); try again later, or with a longer --store-timeout")
    if code in ("MOVED", "ASK", "CLUSTERDOWN"):
        return StoreError(f"store {url}: is part of a Redis cluster ({text}); name servers outside a cluster")
    return StoreError(f"store {url}: refuses the command ({text})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _tls_error(url: StoreUrl, error: ssl.SSLError) -> StoreTls:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return StoreTls(f"store {url}: its certificate is not trusted ({why}); name the authority's file with ?ssl_ca_certs=FILE")
    why = error.reason or " ".join(str(error).split())
    return StoreTls(f"store {url}: TLS failed ({why}); rediss:// needs a server that speaks TLS at this port, and files that fit")


def _connect_error(url: StoreUrl, error: Exception) -> StoreError:
    for cause in _causes(error):
        if isinstance(cause, StoreError):
            return cause
        if isinstance(cause, ssl.SSLError):
            return _tls_error(url, cause)
    text = " ".join(str(error).split())
    if isinstance(error, redis.AuthenticationError):
        return reply_error(url, "NOAUTH " + text.removeprefix("NOAUTH "))
    if isinstance(error, redis.ResponseError):
        return reply_error(url, text)
    return StoreUnavailable(f"store {url}: cannot be reached ({text.rstrip('.')}); start the server or correct the URL")


def connect(url: StoreUrl, timeout: timedelta, connect_timeout: timedelta) -> tuple[StoreUrl, Any]:
    """A connected redis-py connection, and the URL as it was used (without a password from the environment that the server did not want).

    A server that cannot be reached is tried again for connect_timeout. Raises StoreUnavailable, StoreAuth, StoreTls, StoreError.
    """
    attempts = pauses(connect_timeout)
    while True:
        connection = url.connection(timeout)
        try:
            connection.connect()
            return url, connection
        except (redis.RedisError, OSError) as error:
            connection.disconnect()
            if url.password_from_environment and "without any password configured" in str(error):
                url = url.without_password()
                continue
            failure = _connect_error(url, error)
            if not isinstance(failure, StoreUnavailable):
                raise failure from error
            try:
                next(attempts)
            except StopIteration:
                raise failure from error


class Channel:
    """A connection with the requests under way on it. `send` and `receive` do what the socket allows at once; neither blocks."""

    def __init__(self, url: StoreUrl, timeout: timedelta, connect_timeout: timedelta) -> None:
        self.url, self._connection = connect(url, timeout, connect_timeout)
        self.socket: socket.socket = self._connection._sock
        self.socket.setblocking(False)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.progressed = time.monotonic()
        self.requests: list[Request] = []
        self._encoded = 0  # requests written to the outgoing buffer
        self._answered = 0  # requests with their whole reply
        self._out = np.empty(_COALESCE_BYTES, np.uint8)
        self._out_start = self._out_end = 0
        self._in = np.empty(_RECEIVE_BYTES, np.uint8)
        self._in_start = self._in_end = 0
        self.tls_wants_write = False

    def begin(self, requests: list[Request]) -> None:
        """Start on requests; those before must have been answered."""
        self.requests = requests
        self._encoded = self._answered = 0
        self.progressed = time.monotonic()

    @property
    def answered(self) -> bool:
        """Whether every reply is in."""
        return self._answered == len(self.requests)

    @property
    def wants_write(self) -> bool:
        """Whether there is something left to send."""
        return self._out_start < self._out_end or self._encoded < len(self.requests) or self.tls_wants_write

    def send(self) -> None:
        """Send as much of the buffer, refilled when empty, as the socket takes. Raises StoreUnavailable, StoreTls."""
        if self._out_start == self._out_end and not self._fill():
            return
        try:
            # After SSLWantWrite the same bytes must be offered again: the buffer changes only once it is sent.
            sent = self.socket.send(self._out.data[self._out_start : self._out_end])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise self._broken(error) from error
        self._out_start += sent
        self.bytes_sent += sent
        self.progressed = time.monotonic()

    def _fill(self) -> bool:
        """Write the next command, and small ones after it, to the outgoing buffer. False if there is none."""
        at = 0
        while self._encoded < len(self.requests):
            request = self.requests[self._encoded]
            if at and at + request.size_bytes > _COALESCE_BYTES:
                break
            if request.size_bytes > len(self._out):
                self._out = np.empty(request.size_bytes, np.uint8)
            at += request.encode(self._out[at : at + request.size_bytes])
            self._encoded += 1
        self._out_start, self._out_end = 0, at
        return at > 0

    def receive(self) -> None:
        """Receive and read what is there. Raises StoreUnavailable, StoreTls, and StoreError where it is not the Redis protocol."""
        while True:
            self.tls_wants_write = False
            try:
                count = self.socket.recv_into(self._in.data[self._in_end :])
            except ssl.SSLWantWriteError:
                self.tls_wants_write = True
                return
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise StoreUnavailable(f"store {self.url}: closed the connection; see the server's log")
            self._in_end += count
            self.bytes_received += count
            self.progressed = time.monotonic()
            try:
                self._read()
            except ProtocolError as error:
                raise StoreError(f"store {self.url}: breaks the Redis protocol ({error}); is it a Redis server?") from error
            # What TLS has decrypted already, the selector does not see.
            if not (isinstance(self.socket, ssl.SSLSocket) and self.socket.pending()):
                return

    def _read(self) -> None:
        while self._in_start < self._in_end:
            if self.answered:
                raise ProtocolError("more replies than commands")
            reply = self.requests[self._answered].reply
            self._in_start = reply.feed(self._in, self._in_start, self._in_end)
            if not reply.done:
                break
            self._answered += 1
        left = self._in_end - self._in_start
        if self._in_start and (left == 0 or self._in_end > len(self._in) // 2):
            self._in[:left] = self._in[self._in_start : self._in_end].copy()
            self._in_start, self._in_end = 0, left
        if self._in_end == len(self._in):
            self._in = np.concatenate([self._in, np.empty_like(self._in)])

    def _broken(self, error: OSError) -> StoreError:
        if isinstance(error, ssl.SSLError):
            return _tls_error(self.url, error)
        return StoreUnavailable(f"store {self.url}: the connection broke ({error.strerror or error}); see the server's log")

    def close(self) -> None:
        """Close the connection, whatever is under way."""
        with contextlib.suppress(OSError):
            self._connection.disconnect()
