"""Compiled: commands and replies of rows as arrays of RESP frames, moved over many sockets.

Requests are rows of an int64 table, connections are rows of another; the columns are named here. So
one call does a whole exchange without Python's lock, and the thread that trains is not disturbed.

Replies other than a row of the expected length, a marker of 8 bytes, nil for the marker, or a
number are left to `foreload.cache.client.resp`. Errors of sockets are left to
`foreload.cache.client.connections`.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from foreload.base.compiled import nb

# Bytes in this file: 13 10 is CR LF, 36 is $ (a string), 42 is * (an array), 58 is : (a number), 45
# is -, 48 to 57 are the digits.
FIELD_BYTES = 8
FIELD_FRAME_HEAD = b"$8\r\n"
MARKER_BYTES = 8

# A request, to send: a head, then for each field a frame made from a template, followed by its row
# if there are rows. HEAD, TEMPLATE, FIELDS, ROWS and INTO are addresses; ROWS is 0 if there are no
# rows. COUNT is the number of fields. Strides are in bytes.
(HEAD, HEAD_BYTES, TEMPLATE, TEMPLATE_BYTES, FIELDS, COUNT, ROWS, ROW_STRIDE, ROW_BYTES) = range(9)
# A request, to receive: the kind of reply. For rows: where they go, the beginning of a row's frame
# as up to 8 bytes, what comes next, and the marker. For a number: NEXT is the number, or NEXT_HEAD
# before it has arrived.
(KIND, INTO, INTO_STRIDE, INTO_BYTES, FRAME_HEAD, FRAME_HEAD_BYTES, NEXT, HAS_MARKER, MARKER) = range(9, 18)
REQUEST_COLUMNS = 18
ANY_REPLY, NUMBER_REPLY, ROWS_REPLY = range(3)
NEXT_HEAD, NEXT_MARKER = -2, -1  # from 0 on: the next row

# A connection: its socket, its requests [ANSWERED, LAST) of the table, and how much of the request
# FILLING is written to the outgoing buffer.
(FD, ANSWERED, LAST, FILLING, FILLED_HEAD, FILLED_ROWS) = range(6)
(OUT_START, OUT_END, IN_START, IN_END, SENT_BYTES, RECEIVED_BYTES, PROGRESSED_NS) = range(6, 13)
CONNECTION_COLUMNS = 13

MORE, COMPLETE, IRREGULAR = range(3)  # what `take` returns about a reply
ALL_ANSWERED, PAUSED, IN_PYTHON, SILENT = range(4)  # why `run_exchange` returns
# If this process did not run for so much longer than it asked to wait, it cannot conclude that
# others were silent.
_STALL_NS = 100_000_000
_POLLIN, _POLLOUT = 1, 4
_LINE_BYTES = 32  # the longest line with a number

_poll: Any = types.ExternalFunction("poll", types.intc(types.uintp, types.uintp, types.intc))
_send: Any = types.ExternalFunction("send", types.intp(types.intc, types.uintp, types.uintp, types.intc))
_recv: Any = types.ExternalFunction("recv", types.intp(types.intc, types.uintp, types.uintp, types.intc))
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))


def _byte_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@intrinsic
def copy_bytes(typing, target, source, count):  # type: ignore[no-untyped-def]
    """Copy bytes between addresses; the two ranges may overlap.

    A loop over bytes in numba takes ten times as long.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of, count = arguments
        cgutils.raw_memmove(builder, _byte_pointer(builder, to), _byte_pointer(builder, of), count, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _load(typing, address):  # type: ignore[no-untyped-def]
    """Return the 8 bytes at an address, in memory order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.int64), generate


@intrinsic
def _store_big_endian(typing, address, value):  # type: ignore[no-untyped-def]
    """Write 8 bytes, the highest first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store(builder.bswap(arguments[1]), pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@nb.njit(nogil=True, cache=True)
def fill(requests, connection, out):  # type: ignore[no-untyped-def]
    """Write as much of a connection's next commands as fits to `out`, which must be empty.

    A frame is never cut; a head may be.

    Args:
        requests: int64 [n, REQUEST_COLUMNS].
        connection: int64 [CONNECTION_COLUMNS].
        out: uint8; holds at least the longest frame of any request.
    """
    base = np.int64(out.ctypes.data)
    at = 0
    while connection[FILLING] < connection[LAST]:
        request = requests[connection[FILLING]]
        # The head goes out first. FILLED_HEAD and FILLED_ROWS keep the progress if `out` is full.
        head = min(request[HEAD_BYTES] - connection[FILLED_HEAD], out.size - at)
        copy_bytes(base + at, request[HEAD] + connection[FILLED_HEAD], head)
        connection[FILLED_HEAD] += head
        at += head
        if connection[FILLED_HEAD] < request[HEAD_BYTES]:
            break
        with_row = request[ROWS] != 0
        row_bytes, template_bytes = request[ROW_BYTES], request[TEMPLATE_BYTES]
        frame = template_bytes + (row_bytes + 2 if with_row else 0)
        first = connection[FILLED_ROWS]
        # Only whole frames are written, so a frame always lies in one piece.
        last = min(request[COUNT], first + (out.size - at) // frame) if frame else first
        row = request[ROWS] + first * request[ROW_STRIDE]
        for i in range(first, last):
            copy_bytes(base + at, request[TEMPLATE], template_bytes)
            field = _load(request[FIELDS] + i * FIELD_BYTES)
            _store_big_endian(base + at + len(FIELD_FRAME_HEAD), field)
            at += template_bytes
            if with_row:
                copy_bytes(base + at, row, row_bytes)
                row += request[ROW_STRIDE]
                at += row_bytes + 2
                out[at - 2] = 13
                out[at - 1] = 10
        connection[FILLED_ROWS] = last
        if last < request[COUNT]:
            break
        connection[FILLING] += 1
        connection[FILLED_HEAD] = connection[FILLED_ROWS] = 0
    connection[OUT_START] = 0
    connection[OUT_END] = at


@nb.njit(nogil=True, cache=True)
def _number(data, start, end, kind):  # type: ignore[no-untyped-def]
    """Parse a line of the byte `kind` and digits at data[start:end].

    Returns:
        (COMPLETE, the number, where the line ends), or (MORE or IRREGULAR, 0, start).
    """
    if data[start] != kind:
        return IRREGULAR, 0, start
    value = 0
    for at in range(start + 1, min(end, start + _LINE_BYTES)):
        if data[at] == 13:
            if at == start + 1:
                break
            if at + 1 == end:
                return MORE, 0, start
            return COMPLETE if data[at + 1] == 10 else IRREGULAR, value, at + 2
        if data[at] < 48 or data[at] > 57 or value > 1 << 50:
            break
        value = value * 10 + int(data[at]) - 48
    else:
        return MORE if end < start + _LINE_BYTES else IRREGULAR, 0, start
    return IRREGULAR, 0, start


@nb.njit(nogil=True, cache=True)
def _take_marker(data, start, end, request):  # type: ignore[no-untyped-def]
    """Take the marker's frame: "$8" and 8 bytes, or nil, "$-1", if there is no marker.

    Returns:
        (where the rest begins, MORE, COMPLETE or IRREGULAR).
    """
    # 5 is the length of nil; a value of any length is longer.
    if end - start < 5:
        return start, IRREGULAR if data[start] != 36 else MORE
    if data[start] == 36 and data[start + 1] == 56 and data[start + 2] == 13 and data[start + 3] == 10:
        after = start + 4 + MARKER_BYTES + 2
        if after > end:
            return start, MORE
        if data[after - 2] != 13 or data[after - 1] != 10:
            return start, IRREGULAR
        request[MARKER] = np.int64(_load(np.int64(data.ctypes.data) + start + 4))
        request[HAS_MARKER] = 1
        return after, COMPLETE
    if data[start] == 36 and data[start + 1] == 45 and data[start + 2] == 49 and data[start + 3] == 13 and data[start + 4] == 10:
        request[HAS_MARKER] = 0
        return start + 5, COMPLETE
    return start, IRREGULAR


@nb.njit(nogil=True, cache=True)
def _take_rows(data, start, end, request):  # type: ignore[no-untyped-def]
    """Take the frames of rows that have arrived, up to the first that is incomplete or differs.

    Each frame must begin with FRAME_HEAD.

    Returns:
        (where the rest begins, MORE, COMPLETE or IRREGULAR).
    """
    head_bytes, row_bytes = request[FRAME_HEAD_BYTES], request[INTO_BYTES]
    frame = head_bytes + row_bytes + 2
    head = np.uint64(request[FRAME_HEAD])
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(8 * (8 - head_bytes))
    base = np.int64(data.ctypes.data)
    i, count = request[NEXT], request[COUNT]
    into = request[INTO] + i * request[INTO_STRIDE]
    while i < count and end - start >= frame and end - start >= 8:
        last = start + frame
        # The whole head of the frame is compared as one masked word.
        if _load(base + start) & mask != head or data[last - 2] != 13 or data[last - 1] != 10:
            request[NEXT] = i
            return start, IRREGULAR
        copy_bytes(into, base + start + head_bytes, row_bytes)
        into += request[INTO_STRIDE]
        start = last
        i += 1
    request[NEXT] = i
    if i == count:
        return start, COMPLETE
    # A shorter frame may be all that comes, so the rest of a frame whose beginning already differs
    # is never waited for.
    for j in range(min(head_bytes, end - start)):
        if np.uint64(data[start + j]) != (head >> np.uint64(8 * j)) & np.uint64(255):
            return start, IRREGULAR
    # A frame shorter than 8 bytes cannot be loaded as a word, so the caller reads it in its slower
    # way.
    return start, IRREGULAR if end - start >= frame else MORE


@nb.njit(nogil=True, cache=True)
def take(data, start, end, request):  # type: ignore[no-untyped-def]
    """Take what can be used of a reply from data[start:end].

    Args:
        data: uint8.
        request: int64 [REQUEST_COLUMNS], which keeps the progress of its reply.

    Returns:
        (where the rest begins, status). The status is IRREGULAR if the rest is not what the request
        usually gets, or is nothing that this module can read; else MORE or COMPLETE.
    """
    # From here on, COMPLETE means that the piece before is taken, and the next one may be.
    status = IRREGULAR if request[KIND] == ANY_REPLY else COMPLETE
    if status == COMPLETE and request[KIND] == NUMBER_REPLY:
        if start == end:
            return start, MORE
        status, number, start = _number(data, start, end, 58)
        if status == COMPLETE:
            request[NEXT] = number
        return start, status
    if status == COMPLETE and request[NEXT] == NEXT_HEAD:
        if start == end:
            return start, MORE
        status, count, after = _number(data, start, end, 42)
        if status == COMPLETE and count != request[COUNT] + 1:
            status = IRREGULAR
        if status == COMPLETE:
            start = after
            request[NEXT] = NEXT_MARKER
    if status == COMPLETE and request[NEXT] == NEXT_MARKER:
        if start == end:
            return start, MORE
        start, status = _take_marker(data, start, end, request)
        if status == COMPLETE:
            request[NEXT] = 0
    if status == COMPLETE:
        start, status = _take_rows(data, start, end, request)
    return start, status


@nb.njit(nogil=True, cache=True)
def _send_some(requests, connection, out, now, polled):  # type: ignore[no-untyped-def]
    """Send as much as the socket takes.

    Args:
        polled: whether poll reported that the socket takes bytes.

    Returns:
        False if poll reported that, but the socket takes nothing, because it is broken.
    """
    fresh = not polled
    while True:
        if connection[OUT_START] == connection[OUT_END]:
            fill(requests, connection, out)
            if connection[OUT_END] == 0:
                return True
        left = connection[OUT_END] - connection[OUT_START]
        sent = _send(np.int32(connection[FD]), np.uint64(out.ctypes.data + connection[OUT_START]), np.uint64(left), np.int32(0))
        if sent <= 0:
            return fresh
        fresh = True
        connection[OUT_START] += sent
        connection[SENT_BYTES] += sent
        connection[PROGRESSED_NS] = now
        if sent < left:
            return True


@nb.njit(nogil=True, cache=True)
def _receive_some(requests, connection, data, now):  # type: ignore[no-untyped-def]
    """Receive once, and take the replies in what was received.

    Returns:
        False if the socket is broken or closed, or if a reply cannot be read here.
    """
    space = data.size - connection[IN_END]
    count = _recv(np.int32(connection[FD]), np.uint64(data.ctypes.data + connection[IN_END]), np.uint64(space), np.int32(0))
    if count <= 0:
        return False
    connection[IN_END] += count
    connection[RECEIVED_BYTES] += count
    connection[PROGRESSED_NS] = now
    start, end = connection[IN_START], connection[IN_END]
    status = COMPLETE
    while status == COMPLETE and start < end:
        if connection[ANSWERED] == connection[LAST]:
            status = IRREGULAR
            break
        start, status = take(data, start, end, requests[connection[ANSWERED]])
        # A reply without rows may be complete before any byte of the next reply arrives.
        if status == COMPLETE:
            connection[ANSWERED] += 1
    connection[IN_START] = start
    to_front(connection, data)
    return status != IRREGULAR


@nb.njit(nogil=True, cache=True)
def to_front(connection, data):  # type: ignore[no-untyped-def]
    """Move the bytes that are not taken yet to the front of the incoming buffer."""
    left = connection[IN_END] - connection[IN_START]
    base = np.int64(data.ctypes.data)
    copy_bytes(base, base + connection[IN_START], left)
    connection[IN_START] = 0
    connection[IN_END] = left


@nb.njit(nogil=True, cache=True)
def discount_stall(connections, lapse_ns):  # type: ignore[no-untyped-def]
    """Do not count a time in which this process itself did not run as silence of others.

    The process may have been stopped, or may have got no processor.
    """
    if lapse_ns > _STALL_NS:
        for c in range(connections.shape[0]):
            connections[c, PROGRESSED_NS] += lapse_ns


@nb.njit(nogil=True, cache=True)
def run_exchange(requests, connections, out, data, clock, timeout_ns, pause_ns):  # type: ignore[no-untyped-def]
    """Send and receive on all connections until every request is answered.

    Before each turn, every connection's requests below ANSWERED are answered completely, and those
    below FILLING are in `out` or have been sent. The table keeps the progress of a reply that is
    half received. So the function can be called again to continue, in whichever way it returned,
    and Python may feed a reply in between (`Channel.handle_in_python`).

    A turn asks `poll` for what each busy connection waits for, sends before it receives, and takes
    replies in the order of the requests. It blocks only in `poll`, and there no longer than until
    the first connection is overdue.

    Args:
        requests: int64 [n, REQUEST_COLUMNS].
        connections: int64 [c, CONNECTION_COLUMNS].
        out: uint8 [c, bytes], the outgoing buffers.
        data: uint8 [c, bytes], the incoming buffers.
        clock: the id of the clock to read.
        timeout_ns: the longest silence of a connection.
        pause_ns: the longest time to wait in `poll`.

    Returns:
        (ALL_ANSWERED, 0); (PAUSED, 0) after a signal, or if nothing moved for pause_ns; (SILENT, c)
        if connection c was silent for timeout_ns; or (IN_PYTHON, c) if connection c needs something
        that only Python can do.
    """
    # struct pollfd: the socket, then the events and, in the upper half, the events that came.
    polls = np.zeros((connections.shape[0], 2), np.int32)
    busy = np.empty(connections.shape[0], np.int64)
    clock_time = np.zeros(2, np.int64)
    # Sockets are mostly ready at once, so the first turn sends without polling.
    fresh = True
    seen = np.int64(0)
    while True:
        _clock_gettime(np.int32(clock), np.uint64(clock_time.ctypes.data))
        now = clock_time[0] * 1_000_000_000 + clock_time[1]
        if seen:
            discount_stall(connections, now - seen)
        wait_ns = np.int64(pause_ns)
        n = 0
        for c in range(connections.shape[0]):
            connection = connections[c]
            if connection[ANSWERED] == connection[LAST]:
                continue
            if fresh and not _send_some(requests, connection, out[c], now, False):
                return IN_PYTHON, c
            wants_write = connection[OUT_START] < connection[OUT_END] or connection[FILLING] < connection[LAST]
            polls[n, 0] = connection[FD]
            polls[n, 1] = _POLLIN | _POLLOUT if wants_write else _POLLIN
            busy[n] = c
            n += 1
            wait_ns = min(wait_ns, connection[PROGRESSED_NS] + timeout_ns - now)
        if n == 0:
            return ALL_ANSWERED, 0
        fresh = False
        # Overdue connections are polled all the same, because replies may have arrived while this
        # process did not run.
        wait_ns = max(wait_ns, np.int64(0))
        ready = _poll(np.uint64(polls.ctypes.data), np.uint64(n), np.int32((wait_ns + 999_999) // 1_000_000))
        _clock_gettime(np.int32(clock), np.uint64(clock_time.ctypes.data))
        seen = clock_time[0] * 1_000_000_000 + clock_time[1]
        discount_stall(connections, seen - now - wait_ns)
        now = seen
        # What each socket is ready for: sending comes before receiving.
        for place in range(n if ready > 0 else 0):
            c = busy[place]
            came = polls[place, 1] >> 16
            if came & _POLLOUT and not _send_some(requests, connections[c], out[c], now, True):
                return IN_PYTHON, c
            if came & ~_POLLOUT and not _receive_some(requests, connections[c], data[c], now):
                return IN_PYTHON, c
        for place in range(n):
            connection = connections[busy[place]]
            if connection[ANSWERED] < connection[LAST] and now - connection[PROGRESSED_NS] >= timeout_ns:
                return SILENT, busy[place]
        # Nothing moved, or a signal came, so Python gets a chance to handle signals.
        if ready <= 0:
            return PAUSED, 0
