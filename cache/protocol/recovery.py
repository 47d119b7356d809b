"""Finishing the write-back batch that a writer died in, from its log, so that no stripe is left inconsistent."""

from __future__ import annotations

import numpy as np

from foreload.cache.client.store import NO_ROWS, Read, Write
from foreload.cache.errors import CacheError
from foreload.cache.parity.erasure import accumulate
from foreload.cache.parity.stripes import ALL_STRIPES, Arrangement
from foreload.cache.protocol.batch_log import BatchLog, LoggedBatch
from foreload.cache.protocol.fence import fence
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.ownership import Ownership, inspect_shards, lose
from foreload.cache.protocol.reading import StoredRows
from foreload.cache.rows.fields import unpack


def recover(stored: StoredRows, lane: int, log: BatchLog, ownership: Ownership) -> int:
    """Fence a lane on every store shard, and bring each to the last batch in the log; returns its number.

    Where the parity of batch n is not there, parity ^= c * (old ^ new); once it is everywhere, the new rows go where the data is not. Each
    phase is one atomic command a shard, so none is ever half done, and a second recovery finds what is left of the first. Shards that are
    down, stale or were being rebuilt, or have not as many rows as the log says, are lost in stored.shards. Raises Fenced, RowsLost, StoreError,
    CacheError.
    """
    code = stored.placement.code
    assert code is not None
    batch = log.held(lane) or LoggedBatch(0, NO_ROWS[0], NO_ROWS[1], NO_ROWS[1])
    markers: dict[int, Marker] = {}
    doubtful: list[int] = []
    fenced_shards = inspect_shards(
        stored.store,
        lambda shard: {lane: fence(stored.store, shard, stored.namespace, lane, ownership.term)},
        lambda shard: ownership.has(stored.store, stored.namespace, shard),
    )
    for shard, fenced in fenced_shards:
        if fenced is None:
            lose(stored, shard)
            continue
        there = fenced[lane]
        stored.shards.of(lane).epochs[shard], marker = there.epoch, there.marker
        if max(marker.parity, marker.data) > batch.number:
            raise CacheError(
                f"store {stored.shards.urls[shard]}: has batch {marker} of lane {lane}, later than the log's {batch.number}: the log is not "
                "the run's; put that one back"
            )
        if marker.rebuilding or marker.data < batch.number - 1:
            lose(stored, shard)
            continue
        markers[shard] = marker
        # 0: the shard has nothing of the batch, 1: its parity, 2: its data, too.
        stage = int(marker.parity == batch.number) + int(marker.data == batch.number)
        if batch.held is not None and there.rows != batch.held[shard, stage]:
            doubtful.append(shard)
    stored.shards.check_covered()
    for shard in doubtful:
        # One that is too many is kept: a scrub decodes what it lacks.
        if stored.lose(shard, f"store {stored.shards.urls[shard]}: lacks rows of lane {lane}"):
            del markers[shard]
    if not len(batch.fields):
        return batch.number
    stripes = stored.placement.stripes(lane, np.zeros(len(stored.layouts), np.int64))
    table, ordinal = unpack(batch.fields)
    everywhere = np.full(stored.placement.shard_count, ALL_STRIPES, np.uint64)
    placed = stripes.arrange(table, ordinal, everywhere)
    _finish_parity(stored, lane, batch, placed, {s: m for s, m in markers.items() if m.parity < batch.number})
    inverse = np.argsort(placed.position)  # of rows by shard, the places in the log
    whole = Marker(batch.number, batch.number).stored()
    writes = []
    for shard in (shard for shard, before in markers.items() if before.data < batch.number):
        own = inverse[placed.rows_of(shard)]
        writes.append(Write(shard, stored.key(lane, shard), batch.fields[own], batch.new[own], whole))
    stored.store.exchange([], writes)
    return batch.number


def _finish_parity(stored: StoredRows, lane: int, batch: LoggedBatch, placed: Arrangement, behind: dict[int, Marker]) -> None:
    """Bring the parity rows of a batch to the shards that do not have them."""
    code = stored.placement.code
    assert code is not None
    parity = np.zeros((len(placed.entry_fields), batch.new.shape[1]), np.uint8)
    reads = []
    for shard in behind:
        own = placed.entries_of(shard)
        reads.append(Read(shard, stored.key(lane, shard), placed.entry_fields[own], parity[own]))
    # A parity row that is not there under the right marker is one of a stripe that had no rows: it stays zeros.
    stored.store.exchange(reads, [])
    delta = batch.new ^ batch.old
    for i in range(code.r):
        factors = code.coefficients[i][placed.member]
        accumulate(delta, np.arange(len(delta)), factors, parity, placed.entry_of[:, i][placed.stripe_of])
    writes = []
    for shard, marker in behind.items():
        own = placed.entries_of(shard)
        stored_marker = Marker(batch.number, marker.data).stored()
        writes.append(Write(shard, stored.key(lane, shard), placed.entry_fields[own], parity[own], stored_marker))
    stored.store.exchange([], writes)
