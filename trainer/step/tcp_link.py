"""Messages between trainers of different hosts: frames over TCP.

A message goes from its tensor into the connection, and from there into the tensor that it is for: it is left in the connection until that is known,
so who sends takes no memory here. Who waits for a message carries it, without a thread in between; a thread of the link goes on where more is under
way than the connection holds, and the trainer computes. Nothing is encrypted.
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
_TOGETHER = 16  # pieces that are sent at once, at most
_SMALL = 1 << 18  # bytes that the connection holds until they are waited for
_ROUSED_BYTES = 1 << 12


class TcpLink(Link):
    """Over a connection whose other end has shown that it belongs here. Both ends call `introduce`, `meet`, and then, in a thread, `carry`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ended = select.poll()
        self._ended.register(connection, select.POLLRDHUP)
        self._lock = threading.Lock()  # for all that follows
        self._outgoing: deque[memoryview] = deque()  # left to be sent; each keeps its tensor
        self._asked: Counter[int] = Counter()  # by kind, how many messages were asked for
        self._awaited: dict[tuple[int, int], memoryview] = {}  # (kind, number) -> where it goes
        self._reading = _Reading(connection, self._awaited)
        self._waited_for = False  # somebody waits, and so carries
        self._why: str | None = None  # why nothing more comes or goes
        self._rouser, self._roused = socket.socketpair()
        for one in (self._rouser, self._roused):
            one.setblocking(False)
        self._over: threading.Event | None = None  # when the thread is, once there is one

    def introduce(self, rank: int) -> None:
        """Tell the other end who this is. Raises LinkClosed."""
        try:
            self._connection.sendall(_HELLO.pack(rank))
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def meet(self, timeout: timedelta) -> int:
        """Wait until the other end has introduced itself: its rank. Raises LinkClosed."""
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
        body = as_bytes(tensor).numpy().data  # which keeps the tensor
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
        """See Link. From here on nobody touches the tensors' memory."""
        self.interrupt()
        if self._over is not None:
            self._over.wait()
        for one in (self._connection, self._rouser, self._roused):
            one.close()

    def carry(self) -> None:
        """In a thread of its own: send and receive while nobody waits, until the link is closed, or its other end."""
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
                    # Who waits would not see by its own poll what is received here.
                    if not self._waited_for:
                        self._carry(came)

    def _wait(self, satisfied: Callable[[], bool], deadline: float) -> None:
        """Send and receive until something is so. Raises LinkClosed, TimeoutError."""
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
        """Have the thread look what there is to do."""
        with contextlib.suppress(OSError):  # it has enough to be roused by, or it is over
            self._rouser.send(b"\0")

    # With the lock.

    def _check_open(self) -> None:
        if self._why is not None:
            raise LinkClosed(self._why)

    @property
    def _wanted(self) -> int:
        """What to poll the connection for. What nobody has asked for stays in it."""
        return select.POLLIN * self._reading.goes_on | select.POLLOUT * bool(self._outgoing)

    def _carry(self, events: int) -> None:
        """Send and receive what can be, by what a poll says of the connection. What goes wrong closes the link."""
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
        """Send what the connection takes. Raises OSError."""
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
    """What comes next over a connection. awaited: (kind, number) -> where a message goes, until it is there."""

    def __init__(self, connection: socket.socket, awaited: dict[tuple[int, int], memoryview]) -> None:
        self._connection, self._awaited = connection, awaited
        self._came: Counter[int] = Counter()  # by kind, how many messages have begun to come
        self._head = memoryview(bytearray(_FRAME.size))
        self._left = self._head  # what of the head, or of the message, has still to be filled
        self._message: tuple[int, int] | None = None  # (kind, number), once its head is there
        self._size = 0  # of it
        self._placed = False  # whether it is known where it goes

    @property
    def goes_on(self) -> bool:
        """Whether what comes next can be received: a head, or a message that is awaited."""
        return self._message is None or self._placed or self._message in self._awaited

    def read(self) -> None:
        """Receive what is there, as far as it is known where it goes. Raises OSError, and ValueError for a message of another size."""
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
