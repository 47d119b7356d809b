"""One connection to a store shard: made by redis-py, then driven as a raw socket that never blocks, through buffers that are reused."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import redis

from foreload.cache.client import frames
from foreload.cache.client.backoff import pauses
from foreload.cache.client.connection import new_connection
from foreload.cache.client.resp import ProtocolError, Request
from foreload.cache.client.url import PASSWORD_VARIABLE, StoreUrl
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

RETRIED = ("LOADING", "BUSY", "TRYAGAIN")  # errors of a server that will be ready in a moment
# The other end is gone, or went while the connection was made: it may be there again in a moment. Other TLS errors the user must set right.
_TLS_CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


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
        return StoreBusy(f"store {url}: not ready ({text}); try again later, or with a longer --store-timeout")
    if code in ("MOVED", "ASK", "CLUSTERDOWN"):
        return StoreError(
            f"store {url}: is part of a Redis cluster of several shards ({text}); name servers outside a cluster, or clusters of one shard"
        )
    return CommandRefused(f"store {url}: refuses the command ({text})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from: redis-py wraps those of TLS in its own."""
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
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _TLS_CLOSED):
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
        connection = new_connection(url, timeout)
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


def _unacknowledged_bytes(connection: socket.socket) -> int:
    """How many bytes that were sent the other end's machine has not acknowledged yet; 0 where that is not known."""
    try:
        (left,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0)))
    except OSError:
        return 0
    return int(left)


def now_ns() -> int:
    """The clock of `frames.run_exchange`."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Channel:
    """A connection with the requests under way on it. `send` and `receive` do what the socket allows at once; neither blocks.

    state (int64 [CONNECTION_COLUMNS]), out and data (uint8, the outgoing and incoming buffers) are views that `place` gives; between calls
    `frames.run_exchange` may go on with them.
    """

    def __init__(self, url: StoreUrl, timeout: timedelta, connect_timeout: timedelta) -> None:
        self.url, self._connection = connect(url, timeout, connect_timeout)
        self.socket: socket.socket = self._connection._sock
        self.socket.setblocking(False)
        self.failure: StoreError | None = None  # why nothing more can be asked on it, where that is noted, not raised
        self.compiled = not isinstance(self.socket, ssl.SSLSocket)  # whether its bytes are what the socket carries
        self.tls_wants_write = False
        self._left: int | None = None  # bytes sent that the server's machine did not have at the last look
        self._table = np.zeros((0, frames.REQUEST_COLUMNS), np.int64)
        self._requests: list[Request] = []
        self._first = 0  # the row of the table at which its requests begin

    @classmethod
    def absent(cls, url: StoreUrl, failure: StoreError) -> Channel:
        """A channel whose server cannot be reached; nothing can be asked on it."""
        channel = cls.__new__(cls)
        channel.failure = failure
        channel.url, channel._connection = url, new_connection(url, timedelta(seconds=1))
        channel.socket = socket.socket()
        channel.socket.close()
        channel.compiled, channel.tls_wants_write, channel._left = True, False, None
        channel._table, channel._requests, channel._first = np.zeros((0, frames.REQUEST_COLUMNS), np.int64), [], 0
        return channel

    def place(self, state: np.ndarray, out: np.ndarray, data: np.ndarray) -> None:
        """Use this row and these buffers from now on. No request is under way."""
        state[frames.FD] = self.socket.fileno()
        self._state, self._out, self._data = state, out, data

    def begin(self, table: np.ndarray, first: int, requests: list[Request]) -> None:
        """Start on requests, which lie in the table from row `first` on; those before must have been answered."""
        self._table, self._first, self._requests = table, first, requests
        self._state[frames.ANSWERED : frames.FILLING + 1] = (first, first + len(requests), first)
        self._state[frames.PROGRESSED_NS] = now_ns()
        self._left = None

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far."""
        return int(self._state[frames.SENT_BYTES])

    @property
    def bytes_received(self) -> int:
        """Bytes received so far."""
        return int(self._state[frames.RECEIVED_BYTES])

    @property
    def progressed_ns(self) -> int:
        """When bytes were last sent or received, or requests begun, by `now_ns`."""
        return int(self._state[frames.PROGRESSED_NS])

    def is_taken(self, timeout_ns: int) -> bool:
        """Where nothing was sent or received for timeout_ns: whether the server's machine still takes what was sent, as it may for long behind a slow
        link, so that it cannot have answered. How much is left is looked at again after a quarter of that time, the first time, and after all of it.
        """
        before, self._left = self._left, _unacknowledged_bytes(self.socket)
        if self._left == 0 if before is None else self._left >= before:
            return False
        self._state[frames.PROGRESSED_NS] = now_ns() - (timeout_ns - timeout_ns // 4 if before is None else 0)
        return True

    @property
    def answered(self) -> bool:
        """Whether every reply is in."""
        return bool(self._state[frames.ANSWERED] == self._state[frames.LAST])

    @property
    def wants_write(self) -> bool:
        """Whether there is something left to send."""
        state = self._state
        unsent = state[frames.OUT_START] < state[frames.OUT_END] or state[frames.FILLING] < state[frames.LAST]
        return bool(unsent or self.tls_wants_write)

    def handle_in_python(self) -> None:
        """Do what `frames.run_exchange` cannot: read other replies, and let the socket say what ails it. Raises as send and receive do."""
        self._read()
        self.send()
        if not self.answered:
            self.receive()

    def send(self) -> None:
        """Send as much of the buffer, refilled when empty, as the socket takes. Raises StoreUnavailable."""
        state = self._state
        if state[frames.OUT_START] == state[frames.OUT_END]:
            frames.fill(self._table, state, self._out)
            if not state[frames.OUT_END]:
                return
        try:
            # After SSLWantWrite the same bytes must be offered again: the buffer changes only once it is sent.
            sent = self.socket.send(self._out[state[frames.OUT_START] : state[frames.OUT_END]].data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise self._broken(error) from error
        state[frames.OUT_START] += sent
        state[frames.SENT_BYTES] += sent
        state[frames.PROGRESSED_NS] = now_ns()

    def receive(self) -> None:
        """Receive and read what is there. Raises StoreUnavailable, and StoreError where it is not the Redis protocol."""
        state = self._state
        while True:
            self.tls_wants_write = False
            try:
                count = self.socket.recv_into(self._data[state[frames.IN_END] :].data)
            except ssl.SSLWantWriteError:
                self.tls_wants_write = True
                return
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise StoreUnavailable(f"store {self.url}: closed the connection; see the server's log")
            state[frames.IN_END] += count
            state[frames.RECEIVED_BYTES] += count
            state[frames.PROGRESSED_NS] = now_ns()
            self._read()
            # What TLS has decrypted already, the selector does not see.
            if not (isinstance(self.socket, ssl.SSLSocket) and self.socket.pending()):
                return

    def _read(self) -> None:
        """Feed the incoming buffer to the replies that are due, in order. Raises StoreError where it is not the Redis protocol."""
        state = self._state
        start, end = int(state[frames.IN_START]), int(state[frames.IN_END])
        try:
            while start < end:
                if self.answered:
                    raise ProtocolError("more replies than commands")
                reply = self._requests[int(state[frames.ANSWERED]) - self._first].reply
                start = reply.feed(self._data, start, end)
                if not reply.done:
                    break
                state[frames.ANSWERED] += 1
        except ProtocolError as error:
            raise StoreError(f"store {self.url}: breaks the Redis protocol ({error}); is it a Redis server?") from error
        state[frames.IN_START] = start
        frames.to_front(state, self._data)

    def _broken(self, error: OSError) -> StoreUnavailable:
        # Also where TLS says it: certificates and versions were agreed on when the connection was made, so it is the connection that broke.
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or error
        return StoreUnavailable(f"store {self.url}: the connection broke ({why}); see the server's log")

    def fail(self, failure: StoreError) -> None:
        """Close the connection and expect no more of what is under way; `failure` says why."""
        self.failure = failure
        self._state[frames.ANSWERED] = self._state[frames.FILLING] = self._state[frames.LAST]
        self._state[frames.OUT_START] = self._state[frames.OUT_END] = 0
        self.close()

    def close(self) -> None:
        """Close the connection, whatever is under way."""
        with contextlib.suppress(OSError):
            self._connection.disconnect()
