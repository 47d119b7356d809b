"""RESP2, the protocol of Redis, for whole arrays: commands are byte arrays made from templates, replies are read as arrays of frames.

A frame is one bulk string, `$<length>\\r\\n<bytes>\\r\\n`. Rows of one table have one length, so the frames of an HMGET reply form an array,
checked frame by frame as bytes arrive; at the first that differs (nil, another length) a compiled parser takes over for the command.
"""

from __future__ import annotations

from typing import Any, Protocol

import numba as nb
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

FIELD_BYTES = 8
MARKER = b"m"
_FIELD_FRAME = 4 + FIELD_BYTES + 2
_MARKER_FRAME = b"$1\r\nm\r\n"
_NIL = b"$-1\r\n"
_LINE_BYTES = 32  # the longest line that gives a length
_ERROR_BYTES = 1 << 16  # the longest line of an error
_OUT_OF_BYTES, _COMPLETE, _OTHER_LENGTH, _NOT_A_BULK_STRING = 0, 1, 2, 3


class ProtocolError(Exception):
    """The bytes received are not a reply to what was asked; the connection cannot be used further."""


class Reply(Protocol):
    """What a command expects. Bytes are fed as they arrive; `error` holds the server's error line, without the leading minus."""

    done: bool
    error: str | None

    def feed(self, data: np.ndarray, start: int, end: int) -> int:
        """Take what can be used of data[start:end] (uint8) and return where the rest begins. Raises ProtocolError."""

    def restart(self) -> None:
        """Expect the whole reply again, for a command that is sent again."""


@intrinsic
def _memcpy(typing, target, at, source, start, count):  # type: ignore[no-untyped-def]
    """Copy count bytes from byte `start` of an array to byte `at` of another: in numba, a loop over bytes takes ten times as long."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def pointer(place: int) -> Any:
            array = context.make_array(signature.args[place])(context, builder, arguments[place])
            return builder.gep(array.data, [arguments[place + 1]])

        cgutils.raw_memcpy(builder, pointer(0), pointer(2), arguments[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp), generate


@nb.njit(nogil=True, cache=True)
def _put_frames(out, at, before, fields, rows):  # type: ignore[no-untyped-def]
    """Per row: `before` with the field, big-endian, from its byte 4 on; the row; CR LF. Returns where they end."""
    row_bytes = rows.shape[1]
    for i in range(fields.size):
        _memcpy(out, at, before, 0, before.size)
        field = fields[i]
        for j in range(FIELD_BYTES):
            out[at + 4 + j] = np.uint8(field >> np.uint64(56 - 8 * j))
        at += before.size
        _memcpy(out, at, rows, i * rows.strides[0], row_bytes)
        out[at + row_bytes] = 13
        out[at + row_bytes + 1] = 10
        at += row_bytes + 2
    return at


def bulk(value: bytes) -> bytes:
    """One bulk string as a frame."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def encode_command(*parts: bytes | str | int) -> bytes:
    """A whole command from its words."""
    words = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


def hmget_bytes(key: bytes, count: int) -> int:
    """Bytes of an HMGET of the marker and `count` fields."""
    return len(_head(b"HMGET", key, 3 + count)) + len(_MARKER_FRAME) + count * _FIELD_FRAME


def hset_bytes(key: bytes, count: int, row_bytes: int, marker: bytes | None) -> int:
    """Bytes of an HSET of `count` rows of `row_bytes` each and the marker, if there is one."""
    words = 2 + 2 * count + (2 if marker is not None else 0)
    frame = _FIELD_FRAME + len(b"$%d\r\n" % row_bytes) + row_bytes + 2
    return len(_head(b"HSET", key, words)) + (len(_MARKER_FRAME) + len(bulk(marker)) if marker is not None else 0) + count * frame


def encode_hmget(out: np.ndarray, key: bytes, fields: np.ndarray) -> int:
    """Write HMGET of the marker and then of the fields (uint64 [n]) to the front of out (uint8); returns the bytes written."""
    at = _put(out, 0, _head(b"HMGET", key, 3 + len(fields)) + _MARKER_FRAME)
    before = np.frombuffer(b"$8\r\n" + bytes(FIELD_BYTES), np.uint8)
    return int(_put_frames(out, at, before, fields, np.empty((len(fields), 0), np.uint8)))


def encode_hset(out: np.ndarray, key: bytes, fields: np.ndarray, rows: np.ndarray, marker: bytes | None) -> int:
    """Write HSET of rows (uint8 [n, row_bytes]) under fields (uint64 [n]) and of the marker to out (uint8); returns the bytes written."""
    count, row_bytes = rows.shape
    head = _head(b"HSET", key, 2 + 2 * count + (2 if marker is not None else 0))
    at = _put(out, 0, head + (_MARKER_FRAME + bulk(marker) if marker is not None else b""))
    before = np.frombuffer(b"$8\r\n" + bytes(FIELD_BYTES) + b"\r\n$%d\r\n" % row_bytes, np.uint8)
    return int(_put_frames(out, at, before, fields, rows))


def _head(name: bytes, key: bytes, words: int) -> bytes:
    return b"*%d\r\n" % words + bulk(name) + bulk(key)


def _put(out: np.ndarray, at: int, data: bytes) -> int:
    out[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return at + len(data)


@nb.njit(nogil=True, cache=True)
def _regular(data, start, end, header, rows, first):  # type: ignore[no-untyped-def]
    """Frames that begin with `header` and end in CR LF from data[start:end] into rows[first:].

    Returns (where the rest begins, next row, whether the next frame, as far as it has arrived, is another).
    """
    row_bytes = rows.shape[1]
    frame = header.size + row_bytes + 2
    i = first
    while i < rows.shape[0]:
        # A shorter frame may be all that comes: never wait for the rest of one whose beginning already differs.
        for j in range(min(header.size, end - start)):
            if data[start + j] != header[j]:
                return start, i, True
        if end - start < frame:
            break
        if data[start + frame - 2] != 13 or data[start + frame - 1] != 10:
            return start, i, True
        _memcpy(rows, i * rows.strides[0], data, start + header.size, row_bytes)
        start += frame
        i += 1
    return start, i, False


@nb.njit(nogil=True, cache=True)
def _parse(data, start, end, first, rows, missing):  # type: ignore[no-untyped-def]
    """Frames of any kind from data[start:end] into rows[first:] and missing[first:].

    Returns (where the rest begins, next row, status, length): the length is that of the value at which it stopped, for _OTHER_LENGTH.
    """
    row_bytes = rows.shape[1]
    i = first
    while i < rows.shape[0]:
        line = start
        while line < end and data[line] != 13:
            line += 1
        if line + 1 >= end:
            return start, i, _NOT_A_BULK_STRING if line - start > _LINE_BYTES else _OUT_OF_BYTES, 0
        if data[start] != 36 or line == start + 1 or line - start > _LINE_BYTES or data[line + 1] != 10:
            return start, i, _NOT_A_BULK_STRING, 0
        if data[start + 1] == 45:  # the only negative length is that of nil, -1
            if line != start + 3 or data[start + 2] != 49:
                return start, i, _NOT_A_BULK_STRING, 0
            missing[i] = True
            start = line + 2
            i += 1
            continue
        length = 0
        for j in range(start + 1, line):
            if data[j] < 48 or data[j] > 57 or length > 1 << 40:
                return start, i, _NOT_A_BULK_STRING, 0
            length = length * 10 + int(data[j]) - 48
        value = line + 2
        if length != row_bytes:
            return value, i, _OTHER_LENGTH, length
        if value + length + 2 > end:
            return start, i, _OUT_OF_BYTES, 0
        if data[value + length] != 13 or data[value + length + 1] != 10:
            return start, i, _NOT_A_BULK_STRING, 0
        _memcpy(rows, i * rows.strides[0], data, value, length)
        start = value + length + 2
        i += 1
    return start, i, _COMPLETE, 0


def _line(data: np.ndarray, start: int, end: int) -> bytes | None:
    """The line at start, without CR LF; None while its end has not arrived."""
    for most in (2 * _LINE_BYTES, _ERROR_BYTES):
        text = data[start : min(end, start + most)].tobytes()
        stop = text.find(b"\r\n")
        if stop >= 0:
            return text[:stop]
    if len(text) == _ERROR_BYTES:
        raise ProtocolError("a line without end")
    return None


class HmgetReply:
    """The reply to encode_hmget: fills rows in place.

    rows: uint8 [n, row_bytes]. Afterwards `missing` is bool [n] or None where nothing is missing, `marker` the marker's bytes or None, and
    `other_length` the first (row, bytes) whose value is not a row of this length, or None.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._expected_head = np.frombuffer(b"$%d\r\n" % rows.shape[1], np.uint8)
        self.restart()

    def restart(self) -> None:
        """Expect the whole reply again, for a command that is sent again."""
        self.done = False
        self.error: str | None = None
        self.marker: bytes | None = None
        self.other_length: tuple[int, int] | None = None
        self._missing: np.ndarray | None = None  # set once frames are irregular
        self._row = -2  # -2: the array's line comes next; -1: the marker; else the row
        self._skip = 0  # bytes of a value of another length still to be passed over

    @property
    def missing(self) -> np.ndarray | None:
        """bool [n], or None where nothing is missing."""
        return self._missing if self._missing is not None and self._missing.any() else None

    def feed(self, data: np.ndarray, start: int, end: int) -> int:
        """Take what can be used of data[start:end] and return where the rest begins. Raises ProtocolError."""
        if self._row < 0:
            start = self._feed_head(data, start, end)
        if self._row >= 0 and not self.done:
            if self._missing is None:
                start, self._row, irregular = _regular(data, start, end, self._expected_head, self.rows, self._row)
                if irregular:
                    self._missing = np.zeros(len(self.rows), np.bool_)
            if self._missing is not None:
                start = self._feed_any(data, start, end)
            self.done = self._row == len(self.rows) and self._skip == 0
        return start

    def _feed_head(self, data: np.ndarray, start: int, end: int) -> int:
        if self._row == -2:
            line = _line(data, start, end)
            if line is None:
                return start
            start += len(line) + 2
            if line[:1] == b"-":
                self.error, self.done = line[1:].decode(errors="replace"), True
                return start
            if line != b"*%d" % (len(self.rows) + 1):
                raise ProtocolError(f"expected an array of {len(self.rows) + 1}, got {line[:_LINE_BYTES]!r}")
            self._row = -1
        value = decode(data[start : min(end, start + 4 * _LINE_BYTES)].tobytes())
        if value is not None:
            marker, used = value
            if marker is not None and not isinstance(marker, bytes):
                raise ProtocolError(f"expected a marker, got {marker!r}")
            self.marker = marker
            start += used
            self._row = 0
        elif end - start >= 4 * _LINE_BYTES:
            raise ProtocolError("a marker of another length")
        return start

    def _feed_any(self, data: np.ndarray, start: int, end: int) -> int:
        assert self._missing is not None
        while True:
            passed = min(self._skip, end - start)
            self._skip -= passed
            start += passed
            if self._skip:
                return start
            start, self._row, status, length = _parse(data, start, end, self._row, self.rows, self._missing)
            if status == _NOT_A_BULK_STRING:
                raise ProtocolError(f"expected a row, got {data[start : min(end, start + _LINE_BYTES)].tobytes()!r}")
            if status != _OTHER_LENGTH:
                return int(start)
            self.other_length = self.other_length or (self._row, int(length))
            self._skip = int(length) + 2
            self._row += 1


class PlainReply:
    """The reply to any command, as `value`: bytes, int, None or a list of these; str for a status line."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Expect the whole reply again, for a command that is sent again."""
        self.done = False
        self.error: str | None = None
        self.value: object = None

    def feed(self, data: np.ndarray, start: int, end: int) -> int:
        """Take the reply from data[start:end] once it is there as a whole. Raises ProtocolError."""
        if start == end:
            return start
        if data[start] == 45:
            line = _line(data, start, end)
            if line is None:
                return start
            self.error, self.done = line[1:].decode(errors="replace"), True
            return start + len(line) + 2
        reply = decode(data[start:end].tobytes())
        if reply is None:
            return start
        self.value, used = reply
        self.done = True
        return start + used


def decode(data: bytes, start: int = 0) -> tuple[object, int] | None:
    """One reply of any kind at data[start:]: (value, where it ends), or None while it is incomplete. Raises ProtocolError."""
    stop = data.find(b"\r\n", start)
    if stop < 0:
        return None
    kind, line = data[start : start + 1], data[start + 1 : stop]
    after = stop + 2
    if kind == b"+":
        return line.decode(errors="replace"), after
    if kind == b"-":
        raise ProtocolError(f"an error inside a reply: {line.decode(errors='replace')}")
    if kind not in (b":", b"$", b"*") or not line.removeprefix(b"-").isdigit():
        raise ProtocolError(f"not a reply: {data[start : start + _LINE_BYTES]!r}")
    number = int(line)
    if kind == b":":
        return number, after
    if number < -1:
        raise ProtocolError(f"a length of {number}")
    if number == -1:
        return None, after
    if kind == b"$":
        if len(data) < after + number + 2:
            return None
        if data[after + number : after + number + 2] != b"\r\n":
            raise ProtocolError("a value that does not end where its length says")
        return data[after : after + number], after + number + 2
    values: list[object] = []
    for _ in range(number):
        reply = decode(data, after)
        if reply is None:
            return None
        value, after = reply
        values.append(value)
    return values, after
