"""Messages between two trainers of one host: their bytes through memory that both have mapped, and a frame on a Unix socket for each.

A TCP connection takes the same bytes through the kernel twice, in a thread that wants a core of its own while it does. Here who sends copies them
into its own memory, who receives copies them out, and nobody else takes part.
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
_ALIGNED = 64  # bytes; so many stand before those of a message, and the first of them is 1 until they have been received
_REGION_BYTES = 1 << 36  # of addresses: pages of which nothing was ever written take no memory
# Whose loads and stores are seen by others in the order of the program, but for loads that overtake stores: who finds a message received may write
# over it at once. Trainers on other processors have no links.
_ORDERED = ("x86_64", "AMD64")
_READ_BYTES = 1 << 12


def listen() -> tuple[str, socket.socket]:
    """A name that nobody can guess, and a socket of this host that listens there."""
    name = f"foreload-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0" + name)
    listening.listen()
    return name, listening


class HostLink(Link):
    """Over shared memory. Both ends call `introduce`, and then `meet`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._own = _Region(os.memfd_create("foreload-messages"), create=True)
        self._theirs: _Region | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._ended = select.poll()
        self._ended.register(connection, select.POLLRDHUP)
        self._unread = b""
        self._arrived: dict[tuple[int, int], tuple[int, int]] = {}  # (kind, number) -> bytes, where they begin
        self._frames: Counter[int] = Counter()  # by kind, how many have come
        self._wanted: Counter[int] = Counter()  # by kind, how many messages were asked for
        self._outs: dict[tuple[int, int], Tensor] = {}  # (kind, number) -> where it goes
        self._in_use: list[tuple[int, int]] = []  # where messages begin and end that may not be received yet, ascending

    def introduce(self, rank: int) -> None:
        """Tell the other end who this is, and let it map what this end sends. Raises LinkClosed."""
        try:
            socket.send_fds(self._connection, [_HELLO.pack(rank)], [self._own.descriptor])
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def meet(self, timeout: timedelta) -> int:
        """Wait until the other end has introduced itself: its rank. Raises LinkClosed."""
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
        """See Link; the tensor may change at once."""
        size = tensor.nbytes
        place = self._room(size)
        self._own.memory[place] = 1
        ctypes.memmove(self._own.address + place + _ALIGNED, tensor.data_ptr(), size)
        frame = _FRAME.pack(kind, size, place)
        while frame:
            try:
                frame = frame[self._connection.send(frame) :]
            except BlockingIOError:
                # The other end may be as full of frames, and wait likewise: so what comes is read meanwhile.
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
        # A single store, of a byte, and the last: from here on the place may be another message's. (struct.pack_into would write zeros twice.)
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
        """Note the frames that have come. Raises LinkClosed where there are none, and none will come."""
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
        """The first place in this end's memory with room for a message, which is in use from here on."""
        self._in_use = [block for block in self._in_use if self._own.memory[block[0]]]
        length = _ALIGNED + -(-size // _ALIGNED) * _ALIGNED
        number, place = _first_gap(self._in_use, length)
        if place + length > _REGION_BYTES:
            raise LinkClosed(f"{_REGION_BYTES} bytes are on their way")
        self._in_use.insert(number, (place, place + length))
        return place


def _first_gap(blocks: Iterable[tuple[int, int]], length: int) -> tuple[int, int]:
    """(before which block, where) there is room first; blocks: (begin, end), ascending."""
    number, end = 0, 0
    for begin, following in blocks:
        if begin - end >= length:
            break
        number, end = number + 1, following
    return number, end


class _Region:
    """The memory of one end's messages, mapped here; owns the descriptor."""

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
    """A link to the next process of this user that connects. Raises OSError, also TimeoutError where `listening` has a timeout."""
    while True:
        connection, _ = listening.accept()
        with contextlib.suppress(PermissionError):
            return _linked(connection)


def connect(name: str) -> HostLink | None:
    """A link to who listens there; None where nobody does on this host, somebody else's process does, or memory cannot be shared."""
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
    """A link over a connection, which is closed where OSError is raised, as it is if another user's process is at the other end."""
    try:
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise PermissionError(f"a process of user {user} is at the other end")
        return HostLink(connection)
    except OSError:
        connection.close()
        raise
