"""The connections to all store shards.

redis-py makes them. Then one loop drives them as raw sockets that never block, until the last reply
is in.
"""

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
    """Return a redis-py connection, not yet connected, that never retries or reconnects by itself.

    Args:
        timeout: for connecting, and for each answer of the handshake.

    Raises:
        StoreTls: a TLS option names a file that does not exist.
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
# The other end closed the connection, perhaps while it was made, and may be back in a moment. Other
# TLS errors need the user.
_TLS_CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


def reply_error(url: StoreUrl, text: str) -> StoreError:
    """Return the exception for a server's error line, with a remedy if one is known."""
    code = text.split(" ", 1)[0]
    text = " ".join(text.split())
    if code == "OOM":
        return StoreFull(
            f"store {url}: is full ({text}); raise its maxmemory, remove a namespace no longer needed, or use more store shards"
        )
    if code == "MISCONF":
        return StoreFull(
            f"store {url}: refuses writes, because it cannot save to its disk ({text}); free disk space or see its log"
        )
    if code == "READONLY":
        return StoreFull(f"store {url}: is a read-only replica; give the URL of its primary instead")
    if code == "NOPERM":
        return StoreAuth(f"store {url}: the user lacks a right ({text}); give it with ACL SETUSER (docs/operations.md, Rights)")
    if code in ("NOAUTH", "WRONGPASS", "DENIED") or "without any password configured" in text:
        return StoreAuth(
            f"store {url}: refuses the user or password ({text}); give them as SCHEME://USER:PASSWORD@... or in {PASSWORD_VARIABLE}"
        )
    if code == "WRONGTYPE":
        return Fenced(f"store {url}: another process has taken over the lane ({text}); this one stops")
    if code in RETRIED:
        return StoreBusy(f"store {url}: is not ready ({text}); try again later, or with a longer --store-timeout")
    if code in ("MOVED", "ASK", "CLUSTERDOWN"):
        return StoreError(
            f"store {url}: is part of a Redis cluster of several shards ({text}); use servers outside a cluster, or clusters of one shard"
        )
    return CommandRefused(f"store {url}: refuses the command ({text})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, because redis-py wraps TLS errors in its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _tls_error(url: StoreUrl, error: ssl.SSLError) -> StoreTls:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return StoreTls(
            f"store {url}: its certificate is not trusted ({why}); give the certificate authority's file with ?ssl_ca_certs=FILE"
        )
    why = error.reason or " ".join(str(error).split())
    return StoreTls(
        f"store {url}: TLS failed ({why}); rediss:// needs a server that speaks TLS at this port, and the right certificate files"
    )


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
    """Connect to a server.

    A server that cannot be reached is retried for `connect_timeout`.

    Returns:
        The URL as it was used, and the redis-py connection. The URL lacks the password of the
        environment if the server wants none.

    Raises:
        StoreUnavailable: the server cannot be reached.
        StoreAuth: the server refuses the user or password.
        StoreTls: TLS failed.
        StoreError: the server refuses the connection for another reason.
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
    """Return how many sent bytes the other end's machine has not acknowledged yet.

    If that is not known, returns 0.
    """
    try:
        (left,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0)))
    except OSError:
        return 0
    return int(left)


def now_ns() -> int:
    """Return the time of the clock that `frames.run_exchange` uses, in nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Channel:
    """A connection with the requests under way on it.

    `send` and `receive` do what the socket allows at once; neither blocks. `place` sets the views
    state (int64 [CONNECTION_COLUMNS]), out and data (uint8, the outgoing and the incoming buffer).
    Between calls `frames.run_exchange` may continue with them.

    Attributes:
        failure: why the channel cannot be used any longer, if that is recorded and not raised.
        compiled: whether the socket carries the plain bytes of the protocol, so that compiled code
            can read and write it. Not so with TLS.
    """

    def __init__(self, url: StoreUrl, timeout: timedelta, connect_timeout: timedelta) -> None:
        self.url, self._connection = connect(url, timeout, connect_timeout)
        self.socket: socket.socket = self._connection._sock
        self.socket.setblocking(False)
        self.failure: StoreError | None = None
        self.compiled = not isinstance(self.socket, ssl.SSLSocket)
        self.tls_wants_write = False
        # Bytes sent that the server's machine had not acknowledged at the last check.
        self._left: int | None = None
        self._table = np.zeros((0, frames.REQUEST_COLUMNS), np.int64)
        self._requests: list[Request] = []
        self._first = 0  # the row of the table at which its requests begin

    @classmethod
    def absent(cls, url: StoreUrl, failure: StoreError) -> Channel:
        """Return a channel for a server that cannot be reached. It takes no requests."""
        channel = cls.__new__(cls)
        channel.failure = failure
        channel.url, channel._connection = url, new_connection(url, timedelta(seconds=1))
        channel.socket = socket.socket()
        channel.socket.close()
        channel.compiled, channel.tls_wants_write, channel._left = True, False, None
        channel._table, channel._requests, channel._first = np.zeros((0, frames.REQUEST_COLUMNS), np.int64), [], 0
        return channel

    def place(self, state: np.ndarray, out: np.ndarray, data: np.ndarray) -> None:
        """Use this row and these buffers from now on. No request may be under way."""
        state[frames.FD] = self.socket.fileno()
        self._state, self._out, self._data = state, out, data

    def begin(self, table: np.ndarray, first: int, requests: list[Request]) -> None:
        """Start on requests.

        All earlier requests must have been answered.

        Args:
            table: int64 [n, REQUEST_COLUMNS], with these requests from row `first` on.
        """
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
        """Return whether a silent server's machine still takes the bytes sent to it.

        Behind a slow link that can take long, and until it is done the server cannot have answered.
        This is called when nothing was sent or received for timeout_ns. After the first call, the
        unacknowledged bytes are checked again after a quarter of that time, and then each time
        after all of it.
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
        """Whether bytes are left to send."""
        state = self._state
        unsent = state[frames.OUT_START] < state[frames.OUT_END] or state[frames.FILLING] < state[frames.LAST]
        return bool(unsent or self.tls_wants_write)

    def handle_in_python(self) -> None:
        """Do what `frames.run_exchange` cannot do.

        That is to read replies of other kinds, and to raise the error of a broken socket. Raises as
        `send` and `receive` do.
        """
        self._read()
        self.send()
        if not self.answered:
            self.receive()

    def send(self) -> None:
        """Send as much of the buffer, refilled when empty, as the socket takes.

        Raises StoreUnavailable.
        """
        state = self._state
        if state[frames.OUT_START] == state[frames.OUT_END]:
            frames.fill(self._table, state, self._out)
            if not state[frames.OUT_END]:
                return
        try:
            # After SSLWantWriteError the same bytes must be offered again, so the buffer changes
            # only once it is sent.
            sent = self.socket.send(self._out[state[frames.OUT_START] : state[frames.OUT_END]].data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise self._broken(error) from error
        state[frames.OUT_START] += sent
        state[frames.SENT_BYTES] += sent
        state[frames.PROGRESSED_NS] = now_ns()

    def receive(self) -> None:
        """Receive the bytes that have arrived, and read the replies in them.

        Raises:
            StoreUnavailable: the connection broke or was closed.
            StoreError: the bytes are not the Redis protocol.
        """
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
            # The selector does not see bytes that TLS has decrypted already.
            if not (isinstance(self.socket, ssl.SSLSocket) and self.socket.pending()):
                return

    def _read(self) -> None:
        """Feed the incoming buffer to the replies that are due, in order.

        Raises StoreError if the bytes are not the Redis protocol.
        """
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
        # TLS errors count as a broken connection, too: certificates and versions were checked when
        # the connection was made.
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or error
        return StoreUnavailable(f"store {self.url}: the connection broke ({why}); see the server's log")

    def fail(self, failure: StoreError) -> None:
        """Close the connection, and drop the requests under way; `failure` says why."""
        self.failure = failure
        self._state[frames.ANSWERED] = self._state[frames.FILLING] = self._state[frames.LAST]
        self._state[frames.OUT_START] = self._state[frames.OUT_END] = 0
        self.close()

    def close(self) -> None:
        """Close the connection, even if requests are under way."""
        with contextlib.suppress(OSError):
            self._connection.disconnect()


# Both buffers fit a processor's inner caches.
_OUT_BYTES = 1 << 17
_IN_BYTES = 1 << 18
_RECENT = 0.125  # weight of the last exchange in `recent`
_PAUSE_NS = 500_000_000  # the longest time until Python can handle signals
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Connections:
    """One channel for each store shard, with their buffers.

    One thread uses it.

    Attributes:
        timeout: how long a shard may be silent if it owes an answer and its machine takes no bytes
            sent to it. Also how long LOADING, BUSY and TRYAGAIN are retried.
        commands: the number of commands sent.
        retries: the number of commands that were sent again.
        loads: by shard, what its server was asked and how long that took. Any thread may read it.
        recent: by shard, the mean seconds of its last answers, in all exchanges.
        judge: returns why a shard answers that a key is of another type, if that may not be a
            fence.
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
        """Begin with the channels added so far."""
        self._states = np.zeros((len(self.channels), frames.CONNECTION_COLUMNS), np.int64)
        self._make_buffers(_OUT_BYTES, _IN_BYTES)

    def replace(self, shard: int, channel: Channel) -> None:
        """Use another channel for a shard from now on, and close the previous one.

        No request may be under way on either.
        """
        self.channels[shard].close()
        self.channels[shard] = channel
        self.loads.pop(shard, None)
        self.recent.pop(shard, None)
        self._states[shard] = 0
        channel.place(self._states[shard], self._out[shard], self._in[shard])

    def append(self, channel: Channel) -> None:
        """Add a channel. No request may be under way on any channel."""
        self.channels.append(channel)
        self._states = np.concatenate([self._states, np.zeros((1, frames.CONNECTION_COLUMNS), np.int64)])
        self._make_buffers(self._out.shape[1], self._in.shape[1])

    def close(self) -> None:
        """Close all channels. A second call does nothing."""
        self._closed = self._closed or "the store was closed earlier"
        for channel in self.channels:
            channel.close()

    def perform(self, requests: dict[int, list[Request]], failures: dict[int, StoreError] | None = None) -> None:
        """Run requests until their replies are in, and raise errors that servers answer.

        Requests are retried if a server is not ready.

        Args:
            failures: collects the shards whose connection fails. If None, such a failure closes
                everything and is raised.
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
                # `next` returns self, as its default, if no attempt is left.
                if again and next(attempts, self) is self:
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
            # Replies may still be under way, so these connections cannot be used any longer.
            self._fail(repr(error))
            raise

    def _count(self, requests: Iterable[int], began: int) -> None:
        """Record how long the shards' answers took. All answers must be in.

        Args:
            began: when the requests began, by `now_ns`.
        """
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
        # Only the last shard to answer holds the others up, by its distance to the second to last.
        loads[took[-1][1]].held_up += (took[-1][0] - took[-2][0]) * 1e-9

    def _not_ready(self, requests: dict[int, list[Request]], failures: dict[int, StoreError] | None) -> dict[int, list[Request]]:
        """Return all requests of the shards that were not ready.

        All requests of such a shard are repeated: each may be repeated safely, and the parts of a
        read must see the same writes. A shard that refuses for any other reason is lost.

        Raises:
            Fenced: the lane has another owner, so this process must stop. A key of another type may
                also be another program's, which `judge` finds out.
        """
        again: dict[int, list[Request]] = {}
        for shard, of_shard in requests.items():
            for request in of_shard:
                error = request.reply.error
                if error is None:
                    continue
                if error.split(" ", 1)[0] in RETRIED:
                    # The parts of a read must see the same writes, so all requests of the shard are
                    # repeated.
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
        """Make buffers for all connections. No request may be under way."""
        self._out = np.empty((len(self.channels), out_bytes), np.uint8)
        self._in = np.empty((len(self.channels), in_bytes), np.uint8)
        for channel, state, out, data in zip(self.channels, self._states, self._out, self._in, strict=True):
            channel.place(state, out, data)

    def _begin(self, requests: dict[int, list[Request]]) -> None:
        """Write requests to one table, and start each channel on its own requests.

        The buffers grow if a frame would not fit.
        """
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
        """Send and receive on these shards' channels until each has every reply or has failed."""
        try:
            if all(self.channels[shard].compiled for shard in busy):
                self._run_exchange(failures)
            else:
                self._select(busy, failures)
        except StoreError as error:
            self._fail(str(error))
            raise

    def _run_exchange(self, failures: dict[int, StoreError] | None) -> None:
        """Run the compiled loop.

        It returns regularly without need (PAUSED), so that Python handles signals, and is called
        again.
        """
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
        """Do the same in Python, for sockets with TLS."""
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
                # A stop of this process must not count as silence of the servers.
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
        """Go on without a shard, and record why in `failures`; if that is None, raise the error."""
        if failures is None:
            raise error
        failures[shard] = error
        self.channels[shard].fail(error)

    def _serve(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> None:
        """Read and write a socket as far as it is ready, and update what to wait for.

        When every reply is in, the socket is no longer waited for.
        """
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
        """Return the shards that owe an answer and have been silent for too long.

        They are recorded in `failures`. If that is None, StoreSilent is raised.
        """
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
            f"store {self.channels[shard].url}: did not answer for {self.timeout.total_seconds():g} s; has the server stopped or the network failed? "
            "--store-timeout sets the limit"
        )

    def _fail(self, why: str) -> None:
        self._closed = self._closed or why
        self.close()
