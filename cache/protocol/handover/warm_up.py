"""Compiled code that a training may not have run before, loaded beforehand: neither a takeover nor rounds beside a move may wait for a compiler."""

from __future__ import annotations

import numpy as np

from foreload.cache.client.resp import HmgetReply
from foreload.cache.parity.decoding import Survivors, plan_decoding
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.selecting import select_rows
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import checksum
from foreload.cache.rows.row_bytes import decode_rows, encode_rows

_NOTHING_THERE = b"*2\r\n$-1\r\n$-1\r\n"  # the reply to an HMGET of the marker and a row, where there is neither


def warm_up_takeover() -> None:
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


def warm_up_migration(placement: Placement) -> None:
    """Compile what finds which rows move, and what decodes them, or read it from numba's cache: once a process, some 0.1 s. placement: of the run."""
    if not placement.migrating:
        placement = placement.with_migrated(placement.live[0])
    stripes = LaneStripes.of(placement, 0, np.array([placement.k]))
    selected = select_rows(stripes, 0, 0, 1, placement.shard_count)
    if placement.r:
        survivors = Survivors.of(placement, placement.mask(placement.leaving[:1]))
        plan_decoding(stripes, survivors, selected.stripe_places, 16, [b""] * placement.shard_count).decode()


def warm_up(placement: Placement, takeover: bool) -> None:
    """All that training may come to. placement: of the run; takeover: whether it survives the loss of a trainer."""
    warm_up_migration(placement)
    if takeover:
        warm_up_takeover()
