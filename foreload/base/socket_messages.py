"""Messages between processes of one program over a socket: JSON, bytes and, over Unix sockets, descriptors. Nothing received is ever executed."""

from __future__ import annotations

import json
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
    """What came: JSON values, bytes beside them, and descriptors, which are the receiver's to close and not inherited."""

    values: dict[str, Any]
    payload: bytearray
    descriptors: list[int]


def send(
    to: socket.socket, values: Mapping[str, Any], payload: bytes | memoryview = b"", descriptors: Sequence[int] = ()
) -> None:
    """Send a message, whole. Raises OSError where nobody is there to receive it."""
    payload = memoryview(payload).cast("B")
    head = packed_head(values, len(payload))
    # Descriptors come with the first bytes.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sent = to.sendmsg([head[: _LENGTHS.size]], rights)
    to.sendall(head[sent:])
    to.sendall(payload)


def packed_head(values: Mapping[str, Any], payload: int) -> bytes:
    """What a message is sent as before its payload, which has so many bytes."""
    text = json.dumps(dict(values)).encode()
    return _LENGTHS.pack(len(text), payload) + text


def receive(source: socket.socket, most: int | None = None) -> Message | None:
    """The next message; None at the end, also where it comes within one. most: bytes that it may have; a longer one counts as the end, too."""
    size = array("i").itemsize * _MOST_DESCRIPTORS
    try:
        head, ancillary, _, _ = source.recvmsg(_LENGTHS.size, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
        descriptors = array("i")
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        lengths = _exactly(source, _LENGTHS.size, head) if head else None
        if lengths is None:
            return None
        text_bytes, payload_bytes = _LENGTHS.unpack(lengths)
        if most is not None and text_bytes + payload_bytes > most:
            return None
        text, payload = _exactly(source, text_bytes), _exactly(source, payload_bytes)
    except ConnectionError:
        return None
    if text is None or payload is None:
        return None
    return Message(json.loads(text), payload, list(descriptors))


def _exactly(source: socket.socket, size: int, begun: bytes = b"") -> bytearray | None:
    """So many bytes, of which some have come; None where fewer come."""
    received = bytearray(size)
    received[: len(begun)] = begun
    rest = memoryview(received)[len(begun) :]
    while rest:
        count = source.recv_into(rest)
        if not count:
            return None
        rest = rest[count:]
    return received
