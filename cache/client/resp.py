"""RESP2, the protocol of Redis, for whole arrays.

Commands are made from templates, and replies are read as arrays of frames. A frame is one bulk
string, `$<length>\\r\\n<bytes>\\r\\n`. The rows of a table have the same length, so the frames of
an HMGET reply form an array, which is checked frame by frame as bytes arrive. At the first frame
that differs (nil, or another length), a compiled parser takes over for the rest of the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from foreload.base.compiled import nb
from foreload.cache.client import frames

MARKER = b"m"
MIGRATED = b"migrated"
_MARKER_FRAME = b"$1\r\nm\r\n"
_MIGRATED_FRAME = b"$8\r\nmigrated\r\n"
_FIELD_TEMPLATE = frames.FIELD_FRAME_HEAD + bytes(frames.FIELD_BYTES) + b"\r\n"
_LINE_BYTES = 32  # the longest line with a length
_ERROR_BYTES = 1 << 16  # the longest line of an error
_OUT_OF_BYTES, _COMPLETE, _OTHER_LENGTH, _NOT_A_BULK_STRING = 0, 1, 2, 3  # why `_parse` stops


class ProtocolError(Exception):
    """The bytes received are no reply to the command sent.

    The connection cannot be used any further.
    """


class Reply(Protocol):
    """The expected reply to a command. Bytes are fed to it as they arrive.

    Attributes:
        done: whether the whole reply was fed.
        error: the server's error line without the leading minus, or None.
    """

    done: bool
    error: str | None

    @property
    def frame_bytes(self) -> int:
        """The longest piece that a buffer must hold as a whole."""

    def feed(self, data: np.ndarray, start: int, end: int) -> int:
        """Take what can be used of data[start:end] (uint8), and return where the rest begins.

        Raises ProtocolError.
        """

    def restart(self) -> None:
        """Expect the whole reply again, because the command is sent again."""

    def encode_into(self, row: np.ndarray) -> None:
        """Describe the expected reply in a row of the table of requests.

        Compiled code records the progress of the reply in that row.
        """


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def bulk(value: bytes) -> bytes:
    """Return a bulk string as a frame."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def encode_command(*parts: bytes | str | int) -> bytes:
    """Return a whole command, made from its words."""
    words = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


@lru_cache(256)
def _head(name: bytes, key: bytes, words: int, template: bytes, more: bytes) -> np.ndarray:
    """Return the beginning of a command and, after it, the template of its frames.

    The result is cached, because most commands differ only in their fields.

    Args:
        words: the number of words in the whole command.
        more: frames between the key and the template.
    """
    return np.frombuffer(b"*%d\r\n" % words + bulk(name) + bulk(key) + more + template, np.uint8)


@dataclass(slots=True)
class Request:
    """A command and the reply that it expects.

    Attributes:
        head: uint8, the command's beginning, followed by the template of the frames of fields.
        template_bytes: the length of the template.
        fields: uint64 [n]. If rows are given, each field is followed by its row.
        rows: uint8 [n, row_bytes].
    """

    head: np.ndarray
    reply: Reply
    template_bytes: int = 0
    fields: np.ndarray | None = None
    rows: np.ndarray | None = None

    @property
    def frame_bytes(self) -> int:
        """The longest piece that a buffer must hold as a whole, outgoing or incoming."""
        return max(self.template_bytes + (self.rows.shape[1] if self.rows is not None else 0), self.reply.frame_bytes) + 2

    def encode_into(self, row: np.ndarray) -> None:
        """Write the request to a row of the table of requests."""
        start = _address(self.head)
        split = len(self.head) - self.template_bytes
        row[frames.HEAD : frames.TEMPLATE_BYTES + 1] = (start, split, start + split, self.template_bytes)
        if self.fields is not None:
            row[frames.FIELDS : frames.COUNT + 1] = (_address(self.fields), len(self.fields))
        if self.rows is not None and len(self.rows):
            row[frames.ROWS : frames.ROW_BYTES + 1] = (_address(self.rows), self.rows.strides[0], self.rows.shape[1])
        self.reply.encode_into(row)


def lay_out(requests: Sequence[Request]) -> np.ndarray:
    """Return the table of requests: int64 [n, REQUEST_COLUMNS].

    It holds addresses of arrays that the requests keep alive.
    """
    table = np.zeros((len(requests), frames.REQUEST_COLUMNS), np.int64)
    for request, row in zip(requests, table, strict=True):
        request.encode_into(row)
    return table


def hmget(key: bytes, fields: np.ndarray, rows: np.ndarray) -> Request:
    """Return an HMGET of the marker and of fields.

    Args:
        fields: uint64 [n].
        rows: uint8 [n, row_bytes]; the reply fills them.
    """
    head = _head(b"HMGET", key, 3 + len(fields), _FIELD_TEMPLATE, _MARKER_FRAME)
    return Request(head, HmgetReply(rows), len(_FIELD_TEMPLATE), np.ascontiguousarray(fields))


def hset(key: bytes, fields: np.ndarray, rows: np.ndarray, marker: bytes | None, migrated: bytes | None = None) -> Request:
    """Return an HSET of rows under fields, and of further fields if given.

    Args:
        fields: uint64 [n].
        rows: uint8 [n, row_bytes].
        marker: the lane's marker.
        migrated: how far the lane's rows have migrated.
    """
    more = _MARKER_FRAME + bulk(marker) if marker is not None else b""
    more += _MIGRATED_FRAME + bulk(migrated) if migrated is not None else b""
    template = _FIELD_TEMPLATE + b"$%d\r\n" % rows.shape[1]
    head = _head(b"HSET", key, 2 + 2 * (len(fields) + (marker is not None) + (migrated is not None)), template, more)
    return Request(head, NumberReply(), len(template), np.ascontiguousarray(fields), rows)


def hdel(key: bytes, fields: np.ndarray) -> Request:
    """Return an HDEL of fields (uint64 [n])."""
    head = _head(b"HDEL", key, 2 + len(fields), _FIELD_TEMPLATE, b"")
    return Request(head, PlainReply(), len(_FIELD_TEMPLATE), np.ascontiguousarray(fields))


WRONG_TYPE = object()
"""The value of the reply to a command of `plain_of_any` whose key is of another type."""


def plain(*words: bytes | str | int) -> Request:
    """Return a command made from its words, with any reply."""
    return Request(np.frombuffer(encode_command(*words), np.uint8), PlainReply())


def plain_of_any(*words: bytes | str | int) -> Request:
    """Return a command as `plain` does, for a key of any type.

    If the key is of another type, the reply is WRONG_TYPE, and not an error.
    """
    return Request(np.frombuffer(encode_command(*words), np.uint8), PlainReply(of_any=True))


@nb.njit(nogil=True, cache=True)
def _parse(data, start, end, first, rows, missing):  # type: ignore[no-untyped-def]
    """Parse frames of any kind from data[start:end] into rows[first:] and missing[first:].

    Args:
        data: uint8, the incoming buffer.
        first: the row that comes next.
        rows: uint8 [n, row_bytes].
        missing: bool [n].

    Returns:
        (where the rest begins, next row, status, length). With _OTHER_LENGTH, the length is that of
        the value at which the parser stopped.
    """
    # 36 is $, 45 is -, 48 to 57 are the digits, 13 and 10 are CR and LF.
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
        # The only negative length is that of nil, -1.
        if data[start + 1] == 45:
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
        rows[i] = data[value : value + length]
        start = value + length + 2
        i += 1
    return start, i, _COMPLETE, 0


def _line(data: np.ndarray, start: int, end: int) -> bytes | None:
    """Return the line at `start`, without CR LF, or None while its end has not arrived.

    Raises ProtocolError for a line that is too long.
    """
    for most in (2 * _LINE_BYTES, _ERROR_BYTES):
        text = data[start : min(end, start + most)].tobytes()
        stop = text.find(b"\r\n")
        if stop >= 0:
            return text[:stop]
    if len(text) == _ERROR_BYTES:
        raise ProtocolError("a line without end")
    return None


class HmgetReply:
    """The reply to an HMGET of the marker and n fields. It fills rows in place.

    Attributes:
        rows: uint8 [n, row_bytes].
        missing: bool [n], or None if nothing is missing.
        marker: the marker's bytes, or None.
        other_length: (row, bytes) of the first value that is not as long as a row, or None. All
            such rows count as missing.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        # The reply has a row of its own until `lay_out` gives it one of a table.
        self.encode_into(np.zeros(frames.REQUEST_COLUMNS, np.int64))

    def encode_into(self, row: np.ndarray) -> None:
        """Describe the expected reply in a row of the table of requests.

        Progress and the marker are kept in that row from now on.
        """
        count, row_bytes = self.rows.shape
        head = b"$%d\r\n" % row_bytes
        self._request = row
        row[frames.COUNT] = count
        # Kernels compare a frame's beginning as one word. A reply with a longer one stays ANY_REPLY
        # and is read here.
        if len(head) <= 8:
            into = _address(self.rows), self.rows.strides[0], row_bytes
            row[frames.KIND : frames.FRAME_HEAD_BYTES + 1] = (
                frames.ROWS_REPLY,
                *into,
                int.from_bytes(head.ljust(8, b"\0"), "little", signed=True),
                len(head),
            )
        self.restart()

    def restart(self) -> None:
        """Expect the whole reply again, because the command is sent again."""
        self.done = False
        self.error: str | None = None
        self.other_length: tuple[int, int] | None = None
        self._request[frames.NEXT] = frames.NEXT_HEAD
        self._request[frames.HAS_MARKER] = 0
        self._other_marker: bytes | None = None
        self._missing: np.ndarray | None = None  # set once something is irregular
        self._skip = 0  # bytes of a value of another length that are still to be skipped

    @property
    def frame_bytes(self) -> int:
        """The longest piece that a buffer must hold as a whole."""
        return _LINE_BYTES + self.rows.shape[1]

    @property
    def missing(self) -> np.ndarray | None:
        """bool [n], or None if nothing is missing."""
        return self._missing if self._missing is not None and self._missing.any() else None

    @property
    def marker(self) -> bytes | None:
        """The marker's bytes, or None if there is no marker."""
        if self._request[frames.HAS_MARKER]:
            return self._request[frames.MARKER].tobytes()
        return self._other_marker

    def feed(self, data: np.ndarray, start: int, end: int) -> int:
        """Take what can be used of data[start:end], and return where the rest begins.

        Raises ProtocolError.
        """
        # The kernel reads expected frames. From the first irregular frame on, the parser that knows
        # nil and other lengths reads the rest.
        if self._missing is None:
            start, status = frames.take(data, start, end, self._request)
            self.done = status == frames.COMPLETE
            if status != frames.IRREGULAR:
                return start
            self._missing = np.zeros(len(self.rows), np.bool_)
        if self._request[frames.NEXT] < 0:
            start = self._feed_head(data, start, end)
        if self._request[frames.NEXT] >= 0 and not self.done:
            start = self._feed_any(data, start, end)
            self.done = self._request[frames.NEXT] == len(self.rows) and self._skip == 0
        return start

    def _feed_head(self, data: np.ndarray, start: int, end: int) -> int:
        if self._request[frames.NEXT] == frames.NEXT_HEAD:
            line = _line(data, start, end)
            if line is None:
                return start
            start += len(line) + 2
            if line[:1] == b"-":
                self.error, self.done = line[1:].decode(errors="replace"), True
                return start
            if line != b"*%d" % (len(self.rows) + 1):
                raise ProtocolError(f"expected an array of {len(self.rows) + 1}, got {line[:_LINE_BYTES]!r}")
            self._request[frames.NEXT] = frames.NEXT_MARKER
        value = decode(data[start : min(end, start + 4 * _LINE_BYTES)].tobytes())
        if value is not None:
            marker, used = value
            if marker is not None and not isinstance(marker, bytes):
                raise ProtocolError(f"expected a marker, got {marker!r}")
            self._other_marker = marker
            start += used
            self._request[frames.NEXT] = 0
        elif end - start >= 4 * _LINE_BYTES:
            raise ProtocolError("a marker of the wrong length")
        return start

    def _feed_any(self, data: np.ndarray, start: int, end: int) -> int:
        assert self._missing is not None
        while True:
            passed = min(self._skip, end - start)
            self._skip -= passed
            start += passed
            if self._skip:
                return start
            row = int(self._request[frames.NEXT])
            start, row, status, length = _parse(data, start, end, row, self.rows, self._missing)
            if status == _NOT_A_BULK_STRING:
                raise ProtocolError(f"expected a row, got {data[start : min(end, start + _LINE_BYTES)].tobytes()!r}")
            self._request[frames.NEXT] = row
            if status != _OTHER_LENGTH:
                return int(start)
            self.other_length = self.other_length or (row, int(length))
            self._missing[row] = True
            self._skip = int(length) + 2
            self._request[frames.NEXT] = row + 1


class PlainReply:
    """The reply to any command.

    Attributes:
        value: bytes, int, None or a list of these; str for a status line.
    """

    frame_bytes = 0  # this class buffers the bytes itself

    def __init__(self, of_any: bool = False) -> None:
        self._of_any = of_any
        self.restart()

    def encode_into(self, row: np.ndarray) -> None:
        """Describe the expected reply in a row of the table of requests."""
        row[frames.KIND] = frames.ANY_REPLY

    def restart(self) -> None:
        """Expect the whole reply again, because the command is sent again."""
        self.done = False
        self.error: str | None = None
        self.value: object = None
        self._begun = bytearray()

    def feed(self, data: np.ndarray, start: int, end: int) -> int:
        """Take data[start:end], up to the reply's end. Raises ProtocolError."""
        before = len(self._begun)
        self._begun += data[start:end].tobytes()
        if self._begun[:1] == b"-":
            stop = self._begun.find(b"\r\n", max(before - 1, 0))
            if stop < 0 and len(self._begun) > _ERROR_BYTES:
                raise ProtocolError("a line without end")
            if stop < 0:
                return end
            self.error, used = self._begun[1:stop].decode(errors="replace"), stop + 2
            if self._of_any and self.error.startswith("WRONGTYPE"):
                self.error, self.value = None, WRONG_TYPE
        else:
            reply = decode(bytes(self._begun))
            if reply is None:
                return end
            self.value, used = reply
        self.done = True
        return start + used - before


class NumberReply(PlainReply):
    """The reply to a command that counts, as HSET counts the fields that were new.

    A repeated command counts only the fields that its first attempt did not write, so the numbers
    of all its replies are added up.
    """

    def __init__(self) -> None:
        self._before = 0
        self._request = np.full(frames.REQUEST_COLUMNS, frames.NEXT_HEAD, np.int64)
        super().__init__()

    def encode_into(self, row: np.ndarray) -> None:
        """Describe the expected reply in a row of the table of requests.

        The number is kept in that row from now on.
        """
        self._request = row
        row[frames.KIND], row[frames.NEXT] = frames.NUMBER_REPLY, frames.NEXT_HEAD

    def restart(self) -> None:
        """Expect the whole reply again, because the command is sent again."""
        self._before = self.number or 0
        self._request[frames.NEXT] = frames.NEXT_HEAD
        super().restart()

    def feed(self, data: np.ndarray, start: int, end: int) -> int:
        """Take data[start:end], up to the reply's end. Raises ProtocolError."""
        start = super().feed(data, start, end)
        if self.done and self.error is None:
            if not isinstance(self.value, int):
                raise ProtocolError(f"expected a number, got {self.value!r}")
            self._request[frames.NEXT] = self.value
        return start

    @property
    def number(self) -> int | None:
        """The sum of all counts, or None if nothing was counted yet."""
        counted = int(self._request[frames.NEXT])
        return self._before + counted if counted >= 0 else self._before or None


def decode(data: bytes, start: int = 0) -> tuple[object, int] | None:
    """Parse one reply of any kind at data[start:].

    Returns:
        (value, where it ends), or None while the reply is incomplete.

    Raises:
        ProtocolError: the bytes are no reply, or an error is nested in one.
    """
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
        raise ProtocolError(f"the impossible length {number}")
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
