"""Messages between processes of one program over a socket: JSON, bytes, and descriptors.

Descriptors need a Unix socket. Nothing that is received is ever executed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LENGTHS = struct.Struct("<IQ")
_MOST_DESCRIPTORS = 16


@dataclass(frozen=True, slots=True)
class Message:
    """A received message.

    Attributes:
        values: JSON values.
        payload: bytes beside them.
        descriptors: file descriptors. They are not inherited, and the receiver must close them.
    """

    values: dict[str, Any]
    payload: bytearray
    descriptors: list[int]


def send(
    to: socket.socket, values: Mapping[str, Any], payload: bytes | memoryview = b"", descriptors: Sequence[int] = ()
) -> None:
    """Send a whole message.

    Raises:
        OSError: the receiver has closed the connection.
    """
    payload = memoryview(payload).cast("B")
    head = packed_head(values, len(payload))
    # Descriptors are sent with the first bytes.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sent = to.sendmsg([head[: _LENGTHS.size]], rights)
    to.sendall(head[sent:])
    to.sendall(payload)


def packed_head(values: Mapping[str, Any], payload: int) -> bytes:
    """Return what is sent of a message before its payload.

    Args:
        payload: the bytes of the payload.
    """
    text = json.dumps(dict(values)).encode()
    return _LENGTHS.pack(len(text), payload) + text


def receive(source: socket.socket, most: int | None = None) -> Message | None:
    """Receive the next message.

    Args:
        most: the most bytes that the message may have. If None, any number.

    Returns:
        The message. None if the connection has ended, even within a message, or if the message is
        too long.
    """
    size = array("i").itemsize * _MOST_DESCRIPTORS
    descriptors = array("i")
    try:
        head, ancillary, _, _ = source.recvmsg(_LENGTHS.size, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        message = _rest(source, head, most) if head else None
    except ConnectionError:
        message = None
    if message is None:
        # No caller gets these descriptors, so nobody else can close them.
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return Message(*message, list(descriptors))


def _rest(source: socket.socket, head: bytes, most: int | None) -> tuple[Any, bytearray] | None:
    """Receive what follows the first bytes of a message: its values and its payload, as `receive` does."""
    lengths = _exactly(source, _LENGTHS.size, head)
    if lengths is None:
        return None
    text_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    if most is not None and text_bytes + payload_bytes > most:
        return None
    text, payload = _exactly(source, text_bytes), _exactly(source, payload_bytes)
    return None if text is None or payload is None else (json.loads(text), payload)


def _exactly(source: socket.socket, size: int, begun: bytes = b"") -> bytearray | None:
    """Receive `size` bytes. Returns None if the connection ends earlier.

    Args:
        begun: the first of these bytes, which were already received.
    """
    received = bytearray(size)
    received[: len(begun)] = begun
    rest = memoryview(received)[len(begun) :]
    while rest:
        count = source.recv_into(rest)
        if not count:
            return None
        rest = rest[count:]
    return received
