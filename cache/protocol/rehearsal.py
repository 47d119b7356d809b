"""Compiled code that a takeover runs and a training may not have run before: loaded beforehand, since a loss must not wait for a compiler."""

from __future__ import annotations

import numpy as np

from foreload.cache.client.resp import HmgetReply
from foreload.cache.protocol.batch_log import checksum
from foreload.cache.rows.layout import decode_rows, encode_rows

_NOTHING_THERE = b"*2\r\n$-1\r\n$-1\r\n"  # the reply to an HMGET of the marker and a row, where there is neither


def rehearse_takeover() -> None:
    """Compile it, or read it from numba's cache: once a process, some 0.1 s, or 20 where nothing was compiled on this machine before."""
    reply = HmgetReply(np.zeros((1, 16), np.uint8))
    reply.feed(np.frombuffer(bytearray(_NOTHING_THERE), np.uint8), 0, len(_NOTHING_THERE))
    weights, state, ids, tags = (
        np.zeros((1, 1), np.float32),
        np.zeros((1, 1), np.float32),
        np.zeros(1, np.int64),
        np.zeros(1, np.int32),
    )
    stored = np.zeros((1, 20), np.uint8)
    encode_rows(weights, state, ids, tags, 1, 1, stored)
    decode_rows(stored, 1, 1, weights, state, ids, tags)
    checksum(np.zeros(8, np.int64), np.zeros(8, np.uint8))
