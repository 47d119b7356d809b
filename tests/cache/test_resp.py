"""The codec: what is encoded is plain RESP, and replies are read the same however they are cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.cache.client import frames
from foreload.cache.client.resp import (
    MARKER,
    HmgetReply,
    PlainReply,
    ProtocolError,
    Reply,
    Request,
    bulk,
    decode,
    encode_command,
    hmget,
    hset,
    lay_out,
)

KEYS = st.binary(min_size=1, max_size=12)
FIELDS = st.lists(st.integers(0, 2**64 - 1), max_size=6)
MARKERS = st.none() | st.binary(max_size=9)


def feed(reply: Reply, data: bytes, cuts: list[int]) -> int:
    """Feed data to a reply in pieces that end at the cuts; returns the bytes taken."""
    array = np.frombuffer(data, np.uint8)
    start = 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        if reply.done:
            break
        start = reply.feed(array, start, max(end, start))
    return start


def sent(requests: list[Request], more_bytes: int) -> bytes:
    """What a connection sends for the requests, by way of a buffer that holds so many bytes more than the longest frame."""
    table, connection = lay_out(requests), np.zeros(frames.CONNECTION_COLUMNS, np.int64)
    connection[frames.LAST] = len(requests)
    out = np.zeros(max(request.frame_bytes for request in requests) + more_bytes, np.uint8)
    pieces = b""
    while True:
        frames.fill(table, connection, out)
        if not connection[frames.OUT_END]:
            return pieces
        pieces += out[: connection[frames.OUT_END]].tobytes()


@given(KEYS, FIELDS, st.integers(0, 200))
def test_hmget_is_the_command_written_word_by_word(key: bytes, fields: list[int], more_bytes: int) -> None:
    request = hmget(key, np.array(fields, np.uint64), np.zeros((len(fields), 5), np.uint8))
    expected = encode_command(b"HMGET", key, MARKER, *(field.to_bytes(8, "big") for field in fields))
    assert sent([request, request], more_bytes) == 2 * expected


@given(KEYS, FIELDS, st.integers(1, 20), MARKERS, st.integers(0, 3), st.integers(0, 200))
def test_hset_is_the_command_written_word_by_word(
    key: bytes, fields: list[int], row_bytes: int, marker: bytes | None, seed: int, more_bytes: int
) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (len(fields), row_bytes)).astype(np.uint8)
    request = hset(key, np.array(fields, np.uint64), rows, marker)
    words = [word for field, row in zip(fields, rows, strict=True) for word in (field.to_bytes(8, "big"), row.tobytes())]
    expected = encode_command(b"HSET", key, *([] if marker is None else [MARKER, marker]), *words)
    assert sent([request, request], more_bytes) == 2 * expected


@given(
    st.integers(1, 12),
    MARKERS,
    st.lists(st.sampled_from(["row", "row", "row", "nil", "other"]), max_size=8),
    st.lists(st.integers(0, 400), max_size=8),
    st.integers(0, 3),
)
def test_a_reply_reads_the_same_however_it_is_cut(
    row_bytes: int, marker: bytes | None, kinds: list[str], cuts: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)

    def value(kind: str) -> bytes | None:
        length = row_bytes if kind == "row" else int(rng.choice([0, row_bytes - 1, row_bytes + 1, 3 * row_bytes + 1]))
        # Values of the bytes that frames are made of, to tempt a parser that searches for them.
        return None if kind == "nil" else rng.choice(np.frombuffer(b"$-1\r\n12", np.uint8), length).tobytes()

    values = [value(kind) for kind in kinds]
    parts = [b"$-1\r\n" if v is None else bulk(v) for v in [marker, *values]]
    data = b"*%d\r\n" % len(parts) + b"".join(parts)
    rows = np.full((len(kinds), row_bytes), 255, np.uint8)
    reply = HmgetReply(rows)
    assert feed(reply, data + b"+NEXT\r\n", cuts) == len(data)
    assert reply.done
    assert reply.error is None
    assert reply.marker == marker
    others = [(i, len(v)) for i, v in enumerate(values) if v is not None and len(v) != row_bytes]
    assert reply.other_length == (others[0] if others else None)
    missing = reply.missing if reply.missing is not None else np.zeros(len(kinds), np.bool_)
    assert missing.tolist() == [v is None or len(v) != row_bytes for v in values]
    for row, v in zip(rows, values, strict=True):
        if v is not None and len(v) == row_bytes:
            assert row.tobytes() == v


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("cut", range(8))
def test_a_server_error_is_read_wherever_rows_were_expected(rows: int, cut: int) -> None:
    data = b"-WRONGTYPE Operation against a key\r\n"
    reply = HmgetReply(np.zeros((rows, 5), np.uint8))
    assert feed(reply, data, [cut]) == len(data)
    assert (reply.done, reply.error) == (True, "WRONGTYPE Operation against a key")
    reply.restart()
    assert not reply.done
    assert feed(reply, b"*%d\r\n$-1\r\n" % (rows + 1) + rows * b"$5\r\nabcde\r\n", [cut]) > 0
    assert (reply.done, reply.rows.tobytes()) == (True, rows * b"abcde")


# Where two rows of 5 bytes and a marker are awaited.
@pytest.mark.parametrize(
    "data",
    [
        b"*5\r\n",
        b"+OK\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"*3\r\n:1\r\n",
        b"*3\r\n$1\r\nmXX",
        b"*3\r\n$-1\r\n$5\r\nabcdeXX$5\r\nabcde\r\n",
        b"*3\r\n$-1\r\n$-2\r\n$5\r\nabcde\r\n",
        b"*3\r\n$-1\r\n:12345678\r\n$5\r\nabcde\r\n",
        b"*3\r\n$-1\r\n$5x\r\nabcde\r\n",
        b"*3\r\n$-1\r\n$" + 40 * b"1",
        b"*3\r\n$-1\r\n$\r\nabcde\r\n",
    ],
)
def test_what_is_not_a_reply_is_noticed_and_never_waited_for(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(HmgetReply(np.zeros((2, 5), np.uint8)), data, list(range(len(data))))


def test_a_reply_of_nils_is_whole_though_shorter_than_one_row() -> None:
    rows = np.zeros((2, 144), np.uint8)
    reply = HmgetReply(rows)
    feed(reply, b"*3\r\n$-1\r\n$-1\r\n$-1\r\n", [])
    assert reply.done
    assert reply.missing is not None
    assert reply.missing.all()


NESTED = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=9) | st.sampled_from(["OK", "QUEUED"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


def resp(value: object) -> bytes:
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(resp, value))
    if isinstance(value, bytes):
        return bulk(value)
    return b"$-1\r\n" if value is None else b":%d\r\n" % value if isinstance(value, int) else b"+%b\r\n" % str(value).encode()


@given(NESTED, st.lists(st.integers(0, 100), max_size=5))
def test_any_reply_is_read_once_it_is_whole(value: object, cuts: list[int]) -> None:
    data = resp(value)
    reply = PlainReply()
    assert feed(reply, data + b":7\r\n", cuts) == len(data)
    assert reply.value == value
    assert all(decode(data[:end]) is None for end in range(len(data)))
