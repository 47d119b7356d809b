"""Links between two trainers of one host.

The bytes of a message go through memory that both processes have mapped, and a frame on a Unix
socket announces each message. A TCP connection would take the same bytes through the kernel twice,
in a thread that needs a core of its own meanwhile. Here the sender copies the bytes into its own
memory and the receiver copies them out. No other thread takes part.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from torch import Tensor

from foreload.trainer.step.link import Link, LinkClosed

_FRAME = struct.Struct("=iqq")  # kind, bytes, where they begin in the sender's memory
_HELLO = struct.Struct("=i")  # the sender's rank
# A message begins with a header of this size. The header's first byte is 1 until the message has
# been received.
_ALIGNED = 64  # bytes
# This is address space. Pages that were never written take no memory.
_REGION_BYTES = 1 << 36
# On these processors other cores see a program's loads and stores in its order, except that loads
# may overtake stores. The protocol needs this order, since a sender that sees a message as received
# may overwrite it at once. Trainers on other processors do not link over shared memory.
_ORDERED = ("x86_64", "AMD64")
_READ_BYTES = 1 << 12


def listen() -> tuple[str, socket.socket]:
    """Return a name that nobody can guess, and a socket of this host that listens under it."""
    name = f"foreload-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0" + name)
    listening.listen()
    return name, listening


class HostLink(Link):
    """A link over shared memory. Both ends call `introduce`, and then `meet`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._own = _Region(os.memfd_create("foreload-messages"), create=True)
        self._theirs: _Region | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._ended = select.poll()
        self._ended.register(connection, select.POLLRDHUP)
        self._unread = b""
        # (kind, number) -> (bytes, where they begin), for messages that have arrived.
        self._arrived: dict[tuple[int, int], tuple[int, int]] = {}
        # The number of messages of each kind that have arrived.
        self._frames: Counter[int] = Counter()
        # The number of messages of each kind that `expect` has requested.
        self._wanted: Counter[int] = Counter()
        # (kind, number) -> the tensor that receives the message.
        self._outs: dict[tuple[int, int], Tensor] = {}
        # (begin, end) of messages in this end's memory that may not have been received yet,
        # ascending.
        self._in_use: list[tuple[int, int]] = []

    def introduce(self, rank: int) -> None:
        """Send the other end this trainer's rank and the memory that this end sends from.

        Raises LinkClosed.
        """
        try:
            socket.send_fds(self._connection, [_HELLO.pack(rank)], [self._own.descriptor])
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def meet(self, timeout: timedelta) -> int:
        """Wait until the other end has introduced itself, and return its rank.

        Raises LinkClosed.
        """
        self._connection.settimeout(timeout.total_seconds())
        try:
            hello, descriptors, _, _ = socket.recv_fds(self._connection, _HELLO.size, 1)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if len(hello) < _HELLO.size or not descriptors:
            raise LinkClosed("it has left")
        self._connection.setblocking(False)
        self._theirs = _Region(descriptors[0], create=False)
        (rank,) = _HELLO.unpack(hello)
        return int(rank)

    def send(self, kind: int, tensor: Tensor) -> None:
        """See Link. The tensor may change as soon as this returns."""
        size = tensor.nbytes
        place = self._room(size)
        self._own.memory[place] = 1
        ctypes.memmove(self._own.address + place + _ALIGNED, tensor.data_ptr(), size)
        frame = _FRAME.pack(kind, size, place)
        while frame:
            try:
                frame = frame[self._connection.send(frame) :]
            except BlockingIOError:
                # The other end's socket may be full of frames too, and it may wait here as well.
                # Reading incoming frames meanwhile prevents a deadlock.
                writable = select.poll()
                writable.register(self._connection, select.POLLIN | select.POLLOUT)
                writable.poll()
                self._read()
            except OSError as error:
                raise LinkClosed(str(error)) from error

    def finish_sending(self, deadline: float) -> None:
        """See Link."""

    def expect(self, kind: int, out: Tensor) -> int:
        """See Link."""
        self._wanted[kind] += 1
        self._outs[kind, self._wanted[kind]] = out
        return self._wanted[kind]

    def receive(self, kind: int, number: int, deadline: float) -> None:
        """See Link."""
        while (kind, number) not in self._arrived:
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(1000 * left):
                raise TimeoutError("no message in time")
            self._read()
        out, (size, place) = self._outs.pop((kind, number)), self._arrived.pop((kind, number))
        if size != out.nbytes:
            raise ValueError(f"message of kind {kind}: must have {out.nbytes} bytes, got {size}")
        assert self._theirs is not None
        ctypes.memmove(out.data_ptr(), self._theirs.address + place + _ALIGNED, size)
        # This must be one store of one byte, and the last access: from here on the sender may put
        # another message in this place. (struct.pack_into would write a zero twice.)
        self._theirs.memory[place] = 0

    @property
    def has_left(self) -> bool:
        """See Link."""
        return bool(self._ended.poll(0))

    def interrupt(self) -> None:
        """See Link."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """See Link."""
        self.interrupt()
        self._connection.close()
        self._own.close()
        if self._theirs is not None:
            self._theirs.close()

    def _read(self) -> None:
        """Record the frames that have arrived.

        Raises LinkClosed if none are left and the connection is closed.
        """
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not data:
            raise LinkClosed("it has left")
        self._unread += data
        whole = len(self._unread) // _FRAME.size * _FRAME.size
        for kind, size, place in _FRAME.iter_unpack(self._unread[:whole]):
            self._frames[kind] += 1
            self._arrived[kind, self._frames[kind]] = size, place
        self._unread = self._unread[whole:]

    def _room(self, size: int) -> int:
        """Reserve room for a message in this end's memory, and return where it begins.

        It is the first gap that is large enough. Raises LinkClosed if the memory is full.
        """
        self._in_use = [block for block in self._in_use if self._own.memory[block[0]]]
        length = _ALIGNED + -(-size // _ALIGNED) * _ALIGNED
        number, place = _first_gap(self._in_use, length)
        if place + length > _REGION_BYTES:
            raise LinkClosed(f"{_REGION_BYTES} bytes are in transit")
        self._in_use.insert(number, (place, place + length))
        return place


def _first_gap(blocks: Iterable[tuple[int, int]], length: int) -> tuple[int, int]:
    """Return the first gap of at least `length` bytes.

    Args:
        blocks: (begin, end) of the blocks in use, ascending.

    Returns:
        The number of the block behind the gap, and where the gap begins.
    """
    number, end = 0, 0
    for begin, following in blocks:
        if begin - end >= length:
            break
        number, end = number + 1, following
    return number, end


class _Region:
    """The memory of one end's messages, mapped into this process. It owns the descriptor."""

    def __init__(self, descriptor: int, create: bool) -> None:
        self.descriptor = descriptor
        try:
            if create:
                os.ftruncate(descriptor, _REGION_BYTES)
            self.memory = mmap.mmap(descriptor, _REGION_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        view = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(view)
        del view

    def close(self) -> None:
        if not self.memory.closed:
            self.memory.close()
            os.close(self.descriptor)


def accept(listening: socket.socket) -> HostLink:
    """Return a link to the next process of this user that connects.

    Raises OSError, and its subclass TimeoutError if `listening` has a timeout.
    """
    while True:
        connection, _ = listening.accept()
        with contextlib.suppress(PermissionError):
            return _linked(connection)


def connect(name: str) -> HostLink | None:
    """Return a link to the process that listens under `name` on this host.

    Returns None if no process listens there, if it belongs to another user, or if the two cannot
    share memory.
    """
    if platform.machine() not in _ORDERED:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect("\0" + name)
        return _linked(connection)
    except OSError:
        connection.close()
        return None


def _linked(connection: socket.socket) -> HostLink:
    """Return a link over a connection.

    If the link cannot be made, the connection is closed and OSError is raised. It is
    PermissionError if the process at the other end belongs to another user.
    """
    try:
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise PermissionError(f"a process of user {user} is at the other end")
        return HostLink(connection)
    except OSError:
        connection.close()
        raise
