"""The connections to all store shards: made by redis-py, then driven as raw sockets that never block, in one loop until the last reply."""

from __future__ import annotations

import contextlib
import fcntl
import selectors
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from foreload.cache.client import frames
from foreload.cache.client.backoff import pauses
from foreload.cache.client.load import ShardLoad
from foreload.cache.client.resp import ProtocolError, Request, lay_out
from foreload.cache.client.url import PASSWORD_VARIABLE, StoreUrl
from foreload.cache.errors import (
    CommandRefused,
    Fenced,
    StoreAuth,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreSilent,
    StoreTls,
    StoreUnavailable,
)


def new_connection(url: StoreUrl, timeout: timedelta) -> Any:
    """A redis-py connection, not yet connected, that never retries or reconnects by itself.

    timeout: for connecting and for each answer of the handshake. Raises StoreTls where an option names a file that is not there.
    """
    settings: dict[str, Any] = {
        "db": url.database,
        "username": url.username,
        "password": url.password,
        "socket_timeout": timeout.total_seconds(),
        "socket_connect_timeout": timeout.total_seconds(),
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "health_check_interval": 0,
        "protocol": 2,
    }
    if url.path is not None:
        return redis.UnixDomainSocketConnection(path=url.path, **settings)
    settings |= {"host": url.host, "port": url.port, "socket_keepalive": True}
    return redis.Connection(**settings) if url.scheme == "redis" else redis.SSLConnection(**settings | url.tls_settings())


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


_OUT_BYTES = 1 << 17  # a processor's nearer caches hold both buffers
_IN_BYTES = 1 << 18
_RECENT = 0.125  # weight of the last exchange in what counts as recent
_PAUSE_NS = 500_000_000  # how often, at least, Python may see to signals
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Connections:
    """One channel a store shard, with their buffers. One thread uses it.

    timeout: for silence of a shard that owes an answer, and takes nothing of what was sent to it, and for how long LOADING, BUSY and TRYAGAIN are
    tried again. commands, retries: counters.
    loads: what each shard's server was asked, and how long that took; any thread may read it. recent: seconds of a shard's answer, the mean over
    its last exchanges, whoever else was asked. judge: says why a shard answers that a key is of another type, where that may not be a fence.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.channels: list[Channel] = []
        self.commands = self.retries = 0
        self.loads: dict[int, ShardLoad] = {}
        self.recent: dict[int, float] = {}
        self.judge: Callable[[int, StoreError], StoreError] | None = None
        self._closed = ""

    def open(self) -> None:
        """Begin with the channels that are there by now."""
        self._states = np.zeros((len(self.channels), frames.CONNECTION_COLUMNS), np.int64)
        self._make_buffers(_OUT_BYTES, _IN_BYTES)

    def replace(self, shard: int, channel: Channel) -> None:
        """Use another channel for a shard from now on; the one before is closed. Nothing is under way on either."""
        self.channels[shard].close()
        self.channels[shard] = channel
        self.loads.pop(shard, None)
        self.recent.pop(shard, None)
        self._states[shard] = 0
        channel.place(self._states[shard], self._out[shard], self._in[shard])

    def append(self, channel: Channel) -> None:
        """Have one channel more. Nothing is under way on any."""
        self.channels.append(channel)
        self._states = np.concatenate([self._states, np.zeros((1, frames.CONNECTION_COLUMNS), np.int64)])
        self._make_buffers(self._out.shape[1], self._in.shape[1])

    def close(self) -> None:
        """Close all channels. Does nothing the second time."""
        self._closed = self._closed or "it was closed before"
        for channel in self.channels:
            channel.close()

    def perform(self, requests: dict[int, list[Request]], failures: dict[int, StoreError] | None = None) -> None:
        """Run requests to their replies, again where a server was not ready, and raise what a server refused.

        failures: where shards are noted whose connection fails; where it is None, that closes everything and is raised.
        """
        if self._closed:
            raise StoreUnavailable(f"store: the connections are closed ({self._closed}); make a new Store")
        try:
            attempts = pauses(self.timeout)
            while requests:
                began = now_ns()
                self._begin(requests)
                self._await_replies(list(requests), failures)
                self._count(requests, began)
                again = self._not_ready(
                    {shard: of_shard for shard, of_shard in requests.items() if shard not in (failures or ())}, failures
                )
                if again and next(attempts, self) is self:  # no attempt is left: self stands for that
                    for shard, of_shard in again.items():
                        error = next(request.reply.error for request in of_shard if request.reply.error is not None)
                        self.lose(shard, reply_error(self.channels[shard].url, error), failures)
                    return
                for request in (request for of_shard in again.values() for request in of_shard):
                    request.reply.restart()
                    self.retries += 1
                requests = again
        except StoreError:
            raise
        except BaseException as error:
            # Replies may still be under way: nothing more can be asked on these connections.
            self._fail(repr(error))
            raise

    def _count(self, requests: Iterable[int], began: int) -> None:
        """Note how long the shards' answers took, all of which are in. began: by `now_ns`."""
        took = sorted(
            (channel.progressed_ns - began, shard) for shard in requests if (channel := self.channels[shard]).failure is None
        )
        recent = self.recent
        for nanoseconds, shard in took:
            before = recent.get(shard, 0.0)
            recent[shard] = before + _RECENT * (nanoseconds * 1e-9 - before)
        if len(took) < 2:
            return
        loads = self.loads
        for nanoseconds, shard in took:
            if (load := loads.get(shard)) is None:
                load = loads[shard] = ShardLoad()
            load.exchanges += 1
            load.seconds += nanoseconds * 1e-9
            load.bytes = self.channels[shard].bytes_sent + self.channels[shard].bytes_received
        loads[took[-1][1]].held_up += (took[-1][0] - took[-2][0]) * 1e-9

    def _not_ready(self, requests: dict[int, list[Request]], failures: dict[int, StoreError] | None) -> dict[int, list[Request]]:
        """All requests of the shards that were not ready; each may be repeated safely, and the parts of a read must see the same writes.

        A shard that refuses for any other reason is lost. Raises Fenced where the lane has another owner: then it is this one that must stop.
        A key of another type may also be another program's: `judge` finds out.
        """
        again: dict[int, list[Request]] = {}
        for shard, of_shard in requests.items():
            for request in of_shard:
                error = request.reply.error
                if error is None:
                    continue
                if error.split(" ", 1)[0] in RETRIED:
                    again[shard] = of_shard
                    continue
                refusal = reply_error(self.channels[shard].url, error)
                if isinstance(refusal, Fenced):
                    if self.judge is not None:
                        refusal = self.judge(shard, refusal)
                    if isinstance(refusal, Fenced):
                        raise refusal
                self.lose(shard, refusal, failures)
                again.pop(shard, None)
                break
        return again

    def _make_buffers(self, out_bytes: int, in_bytes: int) -> None:
        """Buffers for all connections, none of which has a request under way."""
        self._out = np.empty((len(self.channels), out_bytes), np.uint8)
        self._in = np.empty((len(self.channels), in_bytes), np.uint8)
        for channel, state, out, data in zip(self.channels, self._states, self._out, self._in, strict=True):
            channel.place(state, out, data)

    def _begin(self, requests: dict[int, list[Request]]) -> None:
        """Lay requests out in one table, and start each channel on its own; buffers grow where a frame would not fit."""
        all_requests = [request for of_shard in requests.values() for request in of_shard]
        frame_bytes = max((request.frame_bytes for request in all_requests), default=0)
        if 2 * frame_bytes > self._out.shape[1]:
            self._make_buffers(2 * frame_bytes, max(4 * frame_bytes, _IN_BYTES))
        self._table = lay_out(all_requests)
        first = 0
        for shard, of_shard in requests.items():
            self.channels[shard].begin(self._table, first, of_shard)
            self.commands += len(of_shard)
            first += len(of_shard)

    def _await_replies(self, busy: list[int], failures: dict[int, StoreError] | None) -> None:
        """Send and receive on the channels of these shards until each has every reply, or has failed."""
        try:
            if all(self.channels[shard].compiled for shard in busy):
                self._run_exchange(failures)
            else:
                self._select(busy, failures)
        except StoreError as error:
            self._fail(str(error))
            raise

    def _run_exchange(self, failures: dict[int, StoreError] | None) -> None:
        """The compiled loop. It returns now and then without need (PAUSED), so that Python sees to signals, and is called again."""
        timeout_ns = self._timeout_ns
        while True:
            why, shard = frames.run_exchange(
                self._table, self._states, self._out, self._in, time.CLOCK_MONOTONIC, timeout_ns, _PAUSE_NS
            )
            if why == frames.ALL_ANSWERED:
                return
            if why == frames.SILENT and not self.channels[shard].is_taken(timeout_ns):
                self.lose(shard, self._silence(shard), failures)
            elif why == frames.IN_PYTHON:
                try:
                    self.channels[shard].handle_in_python()
                except StoreError as error:
                    self.lose(shard, error, failures)

    def _select(self, busy: list[int], failures: dict[int, StoreError] | None) -> None:
        """The same in Python, where the bytes of a socket are TLS's."""
        with selectors.DefaultSelector() as selector:
            for shard in busy:
                channel = self.channels[shard]
                try:
                    channel.send()
                except StoreError as error:
                    self.lose(shard, error, failures)
                    continue
                selector.register(channel.socket, _READ | _WRITE if channel.wants_write else _READ, shard)
            seen = now_ns()
            while selector.get_map():
                due_ns = min(self.channels[key.data].progressed_ns for key in selector.get_map().values()) + self._timeout_ns
                wait_ns = min(max(due_ns - seen, 0), _PAUSE_NS)
                ready = selector.select(wait_ns * 1e-9)
                before, seen = seen, now_ns()
                frames.discount_stall(self._states, seen - before - wait_ns)
                for key, events in ready:
                    try:
                        self._serve(selector, key, events)
                    except StoreError as error:
                        selector.unregister(key.fileobj)
                        self.lose(key.data, error, failures)
                silent = self._check_silence(busy, seen, failures)
                for key in [key for key in selector.get_map().values() if key.data in silent]:
                    selector.unregister(key.fileobj)

    def lose(self, shard: int, error: StoreError, failures: dict[int, StoreError] | None) -> None:
        """Go on without a shard, and note why in failures; where that is None, raise it."""
        if failures is None:
            raise error
        failures[shard] = error
        self.channels[shard].fail(error)

    def _serve(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> None:
        """Do what a socket is ready for, and wait on for what its channel then wants; no more once every reply is in."""
        channel = self.channels[key.data]
        if events & _READ or channel.tls_wants_write:
            channel.receive()
        if events & _WRITE:
            channel.send()
        if channel.answered:
            selector.unregister(key.fileobj)
            return
        wanted = _READ | _WRITE if channel.wants_write else _READ
        if wanted != key.events:
            selector.modify(key.fileobj, wanted, key.data)

    @property
    def _timeout_ns(self) -> int:
        return self.timeout // timedelta(microseconds=1) * 1000

    def _check_silence(self, busy: list[int], at_ns: int, failures: dict[int, StoreError] | None) -> list[int]:
        """The shards that owe an answer and have been silent for too long: they are noted in failures, or raised (StoreSilent) where that is None."""
        silent = []
        for shard in busy:
            channel = self.channels[shard]
            silent_for = at_ns - channel.progressed_ns
            if not channel.answered and silent_for >= self._timeout_ns and not channel.is_taken(self._timeout_ns):
                self.lose(shard, self._silence(shard), failures)
                silent.append(shard)
        return silent

    def _silence(self, shard: int) -> StoreSilent:
        return StoreSilent(
            f"store {self.channels[shard].url}: silent for {self.timeout.total_seconds():g} s; is the server stopped or the network cut? "
            "--store-timeout sets the limit"
        )

    def _fail(self, why: str) -> None:
        self._closed = self._closed or why
        self.close()
