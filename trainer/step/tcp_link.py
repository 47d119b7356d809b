"""Links between trainers of different hosts: messages as frames over TCP.

A message goes from its tensor into the connection, and from there into the tensor that receives it.
The link leaves a message in the connection until it knows that tensor, so a sender takes no memory
here. The thread that waits for a message also sends and receives, without handing over to another
thread. The link has a thread of its own for the time in which more is under way than the connection
holds and the trainer computes. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from foreload.trainer.step.link import Link, LinkClosed, as_bytes

_FRAME = struct.Struct("=iq")  # kind, bytes
_HELLO = struct.Struct("=i")  # the sender's rank
_TOGETHER = 16  # buffers sent in one system call, at most
_SMALL = 1 << 18  # bytes; the connection holds smaller messages until they are waited for
_ROUSED_BYTES = 1 << 12


class TcpLink(Link):
    """A link over a connection whose other end has shown the right token.

    Both ends call `introduce`, then `meet`, and then `carry` in a thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ended = select.poll()
        self._ended.register(connection, select.POLLRDHUP)
        self._lock = threading.Lock()  # for all attributes below
        # What is left to send. Each view keeps its tensor alive.
        self._outgoing: deque[memoryview] = deque()
        # The number of messages of each kind that `expect` has requested.
        self._asked: Counter[int] = Counter()
        # (kind, number) -> the memory that receives the message, until it has arrived.
        self._awaited: dict[tuple[int, int], memoryview] = {}
        self._reading = _Reading(connection, self._awaited)
        # Whether a thread waits in `_wait`. If so, that thread sends and receives.
        self._waited_for = False
        # Why the link is closed, or None while it is open.
        self._why: str | None = None
        self._rouser, self._roused = socket.socketpair()
        for one in (self._rouser, self._roused):
            one.setblocking(False)
        # Set when the link's thread has finished. None before `meet`.
        self._over: threading.Event | None = None

    def introduce(self, rank: int) -> None:
        """Send the other end this trainer's rank. Raises LinkClosed."""
        try:
            self._connection.sendall(_HELLO.pack(rank))
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def meet(self, timeout: timedelta) -> int:
        """Wait until the other end has introduced itself, and return its rank.

        Raises LinkClosed.
        """
        self._connection.settimeout(timeout.total_seconds())
        try:
            hello = self._connection.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if len(hello) < _HELLO.size:
            raise LinkClosed("it has left")
        self._connection.setblocking(False)
        self._over = threading.Event()
        (rank,) = _HELLO.unpack(hello)
        return int(rank)

    def send(self, kind: int, tensor: Tensor) -> None:
        """See Link."""
        body = as_bytes(tensor).numpy().data  # keeps the tensor alive
        with self._lock:
            self._check_open()
            self._outgoing.extend((memoryview(_FRAME.pack(kind, body.nbytes)), body))
            self._carry(select.POLLOUT)
            left = bool(self._outgoing)
        if left:
            self._rouse()

    def finish_sending(self, deadline: float) -> None:
        """See Link."""
        self._wait(lambda: not self._outgoing, deadline)

    def expect(self, kind: int, out: Tensor) -> int:
        """See Link."""
        view = as_bytes(out).numpy().data
        with self._lock:
            self._asked[kind] += 1
            number = self._asked[kind]
            self._awaited[kind, number] = view
        if view.nbytes > _SMALL:
            self._rouse()
        return number

    def receive(self, kind: int, number: int, deadline: float) -> None:
        """See Link."""
        self._wait(lambda: (kind, number) not in self._awaited, deadline)

    @property
    def has_left(self) -> bool:
        """See Link."""
        return bool(self._ended.poll(0))

    def interrupt(self) -> None:
        """See Link."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._why = self._why or "the term is over"
        self._rouse()

    def close(self) -> None:
        """See Link. After this no thread accesses the tensors' memory."""
        self.interrupt()
        if self._over is not None:
            self._over.wait()
        for one in (self._connection, self._rouser, self._roused):
            one.close()

    def carry(self) -> None:
        """Send and receive while no other thread waits, until either end closes the link.

        This runs in a thread of its own.
        """
        assert self._over is not None
        try:
            self._carry_on()
        finally:
            self._over.set()

    def _carry_on(self) -> None:
        ready = select.poll()
        ready.register(self._roused, select.POLLIN)
        while True:
            with self._lock:
                if self._why is not None:
                    return
                wanted = 0 if self._waited_for else self._wanted
            if wanted:
                ready.register(self._connection, wanted)
            events = dict(ready.poll())
            if wanted:
                ready.unregister(self._connection)
            if self._roused.fileno() in events:
                with contextlib.suppress(BlockingIOError):
                    self._roused.recv(_ROUSED_BYTES)
            if came := events.get(self._connection.fileno(), 0):
                with self._lock:
                    # A thread that waits polls for itself. It would miss what this thread receives.
                    if not self._waited_for:
                        self._carry(came)

    def _wait(self, satisfied: Callable[[], bool], deadline: float) -> None:
        """Send and receive until `satisfied` returns true. Raises LinkClosed, TimeoutError."""
        ready = select.poll()
        with self._lock:
            self._carry(select.POLLIN | select.POLLOUT)
            self._waited_for = True
        try:
            while True:
                with self._lock:
                    if satisfied():
                        return
                    self._check_open()
                    ready.register(self._connection, self._wanted)
                left = deadline - time.monotonic()
                if left <= 0 or not (events := ready.poll(1000 * left)):
                    raise TimeoutError("no message in time")
                with self._lock:
                    self._carry(events[0][1])
        finally:
            with self._lock:
                self._waited_for = False
                large = any(view.nbytes > _SMALL for view in self._awaited.values())
                more = self._why is None and (large or bool(self._outgoing))
            if more:
                self._rouse()

    def _rouse(self) -> None:
        """Wake the link's thread, so that it looks for work."""
        # An error means that wake-ups are pending already, or that the thread is over.
        with contextlib.suppress(OSError):
            self._rouser.send(b"\0")

    # The methods below are called with the lock held.

    def _check_open(self) -> None:
        if self._why is not None:
            raise LinkClosed(self._why)

    @property
    def _wanted(self) -> int:
        """The events to poll the connection for.

        A message that has not been requested stays in the connection.
        """
        return select.POLLIN * self._reading.goes_on | select.POLLOUT * bool(self._outgoing)

    def _carry(self, events: int) -> None:
        """Send and receive as much as possible. An error closes the link.

        Args:
            events: what a poll reported for the connection.
        """
        if self._why is not None:
            return
        try:
            if events & select.POLLOUT:
                self._send_some()
            if events & ~select.POLLOUT:
                self._reading.read()
            if events & (select.POLLERR | select.POLLHUP) and not self._reading.goes_on:
                self._why = "it has left"
        except (OSError, ValueError) as error:
            self._why = str(error)
            self._outgoing.clear()

    def _send_some(self) -> None:
        """Send as much as the connection takes. Raises OSError."""
        outgoing = self._outgoing
        while outgoing:
            try:
                sent = self._connection.sendmsg([outgoing[place] for place in range(min(len(outgoing), _TOGETHER))])
            except BlockingIOError:
                return
            while outgoing and sent >= outgoing[0].nbytes:
                sent -= outgoing.popleft().nbytes
            if sent:
                outgoing[0] = outgoing[0][sent:]


class _Reading:
    """The receiving side of a connection."""

    def __init__(self, connection: socket.socket, awaited: dict[tuple[int, int], memoryview]) -> None:
        """Begin in front of the first frame.

        Args:
            awaited: (kind, number) -> the memory that receives the message. Messages are removed
                when they have arrived.
        """
        self._connection, self._awaited = connection, awaited
        # The number of messages of each kind of which the head has arrived.
        self._came: Counter[int] = Counter()
        self._head = memoryview(bytearray(_FRAME.size))
        # The part of the head, or of the message, that is still to be filled.
        self._left = self._head
        # (kind, number) of the message being received, once its head has arrived.
        self._message: tuple[int, int] | None = None
        # The size of that message in bytes.
        self._size = 0
        # Whether `_left` is in the memory of the tensor that receives the message.
        self._placed = False

    @property
    def goes_on(self) -> bool:
        """Whether the next bytes can be received: a head, or a message that was requested."""
        return self._message is None or self._placed or self._message in self._awaited

    def read(self) -> None:
        """Receive what has arrived, as far as its destination is known.

        Raises OSError, and ValueError for a message of another size than requested.
        """
        while self.goes_on:
            if self._message is not None and not self._placed:
                out = self._awaited[self._message]
                if out.nbytes != self._size:
                    raise ValueError(f"message of kind {self._message[0]}: must have {out.nbytes} bytes, got {self._size}")
                self._left, self._placed = out, True
            try:
                count = self._connection.recv_into(self._left)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("it has left")
            self._left = self._left[count:]
            if self._left.nbytes:
                continue
            if self._message is None:
                kind, self._size = _FRAME.unpack(self._head)
                self._came[kind] += 1
                self._message = kind, self._came[kind]
            else:
                del self._awaited[self._message]
                self._message, self._placed = None, False
            self._left = self._head
