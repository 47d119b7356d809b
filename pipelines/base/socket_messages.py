"""Messages between processes of one program over a Unix socket: JSON, bytes and descriptors. Nothing that is received is ever executed."""

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
    text = json.dumps(dict(values)).encode()
    payload = memoryview(payload).cast("B")
    # Descriptors come with the first bytes.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    to.sendmsg([_LENGTHS.pack(len(text), len(payload))], rights)
    to.sendall(text)
    to.sendall(payload)


def receive(source: socket.socket) -> Message | None:
    """The next message; None at the end, also where it comes within one."""
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
