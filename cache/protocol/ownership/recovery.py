"""Finishing the write-back batch that a writer died in, from its log, so that no stripe is left inconsistent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.store import Read, Write
from foreload.cache.errors import CacheError, StoreAuth, StoreFull
from foreload.cache.parity.erasure import Code, accumulate
from foreload.cache.parity.stripes import ALL_STRIPES, Arrangement
from foreload.cache.protocol.ownership.batch_log import BatchLog, LoggedBatch
from foreload.cache.protocol.ownership.ownership import Ownership, fence_lanes, finish_migration, lose, lose_absent
from foreload.cache.protocol.ownership.verdict import Expect, Verdict, judge
from foreload.cache.protocol.shards.fence import Found
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.row_bytes import unpack

Exchange = Callable[[Sequence[Read], Sequence[Write]], object]


def recover(stored: StoredRows, lane: int, log: BatchLog, ownership: Ownership) -> int:
    """Fence a lane on every store shard, and bring each to the last batch in the log; returns its number.

    Where the parity of batch n is not there, parity ^= c * (old ^ new); once it is everywhere, the new rows go where the data is not. Each
    phase is one atomic command a shard, so none is ever half done, and a second recovery finds what is left of the first. Shards that are
    down, stale or were being rebuilt, or have not as many rows as the log says, are lost in stored.shards. For a store whose rows do not move.
    Raises Fenced, RowsLost, StoreError, CacheError.
    """
    found = fence_lanes(stored, [lane], ownership)
    for error in found.absent.values():
        # It has its rows, and whoever reads this can see to it that it takes writes.
        if isinstance(error, StoreFull | StoreAuth):
            raise error
    lose_absent(stored, found)
    # Not before the fence: until then the owner before may hold a further batch, and send it.
    batch = adopted_batch(log, lane, ownership.term)
    verdict = judge_logged(stored, lane, found.lanes[lane], batch)
    finish_migration(stored, lane, verdict, ownership.term, np.zeros(0, np.int64))
    for shard in [*verdict.refused, *verdict.stale]:
        lose(stored, shard)
    stored.shards.check_covered()
    for shard in verdict.doubtful():
        # One that is too many is kept: a scrub decodes what it lacks.
        if stored.lose(shard, f"store {stored.shards.urls[shard]}: lacks rows of lane {lane}"):
            del verdict.trusted[shard]
    play(stored, [Unfinished(lane, batch, verdict.trusted)], stored.store.exchange)
    return batch.number


def adopted_batch(log: BatchLog, lane: int, term: int) -> LoggedBatch:
    """The batch that the log holds for a lane; an empty one, of number 0, where it holds none.

    The log has it in this term before its first byte leaves: an owner before that still goes on may hold one more, which must not count, for then
    a further owner would take what this one finishes for stale.
    """
    return log.adopt(lane, term) or LoggedBatch.empty(0, 0, None)


def judge_logged(stored: StoredRows, lane: int, found: Mapping[int, Found], batch: LoggedBatch, released: int = 0) -> Verdict:
    """Return which shards can be trusted with a lane by the batch in its log. found: by shard; released: as `Expect.logged` has it.

    Raises CacheError if all shards are ahead of the log.
    """
    # Some may be: an owner before may have gone on with shards that a further one could not fence.
    if found and all(there.marker.parity > batch.number for there in found.values()):
        shard, there = next(iter(found.items()))
        raise CacheError(
            f"store {stored.shards.urls[shard]}: has batch {there.marker} of lane {lane}, later than the log's {batch.number}: the log is not "
            "the run's; put that one back"
        )
    return judge(stored.placement, found, Expect.logged(batch, released))


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A batch of a lane that may not be everywhere. trusted: what is there, by shard, of those that are trusted."""

    lane: int
    batch: LoggedBatch
    trusted: dict[int, Found]


def play(stored: StoredRows, all_unfinished: Sequence[Unfinished], exchange: Exchange) -> list[Write]:
    """Bring batches, of a lane each, to every shard that is trusted and lacks them; returns what was written.

    exchange: does reads and writes; it may take a shard that fails out of those that are trusted, which is then left as it is.
    """
    batches = [one for one in all_unfinished if len(one.batch.fields)]
    placed = {one.lane: _arranged(stored, one) for one in batches}
    written = _finish_parity(stored, [(one, placed[one.lane]) for one in batches], exchange)
    writes = []
    for one in all_unfinished:
        batch, whole = one.batch, Marker(one.batch.number, one.batch.number).stored()
        behind = [shard for shard, there in one.trusted.items() if there.marker.data != batch.number]
        # A batch of no rows is finished by its marker.
        inverse = np.argsort(placed[one.lane].position) if one.lane in placed else np.zeros(0, np.int64)
        for shard in behind:
            own = inverse[placed[one.lane].rows_of(shard)] if one.lane in placed else inverse
            writes.append(Write(shard, stored.key(one.lane, shard), batch.fields[own], batch.new[own], whole))
    exchange([], writes)
    return written + writes


def _arranged(stored: StoredRows, unfinished: Unfinished) -> Arrangement:
    """Where the rows and parity rows of a batch go, if every shard is to have its own."""
    stripes = stored.lane_stripes(unfinished.lane, np.zeros(len(stored.layouts), np.int64))
    table, ordinal = unpack(unfinished.batch.fields)
    everywhere = np.full(stored.placement.shard_count, ALL_STRIPES, np.uint64)
    return stripes.arrange(table, ordinal, everywhere)


def _finish_parity(stored: StoredRows, work: Sequence[tuple[Unfinished, Arrangement]], exchange: Exchange) -> list[Write]:
    """Bring the parity rows of batches to the shards that do not have them; returns the Writes."""
    code = Code.of(stored.placement)
    assert code is not None
    reads, parities = [], []
    for one, placed in work:
        parity = np.zeros((len(placed.entry_fields), one.batch.new.shape[1]), np.uint8)
        parities.append(parity)
        for shard in _without_parity(one):
            own = placed.entries_of(shard)
            reads.append(Read(shard, stored.key(one.lane, shard), placed.entry_fields[own], parity[own]))
    # A parity row that is not there under the right marker is one of a stripe that had no rows: it stays zeros.
    exchange(reads, [])
    writes = []
    for (one, placed), parity in zip(work, parities, strict=True):
        delta = one.batch.new ^ one.batch.old
        for i in range(code.r):
            factors = code.coefficients[i][placed.member]
            accumulate(delta, np.arange(len(delta)), factors, parity, placed.entry_of[:, i][placed.stripe_of])
        for shard in _without_parity(one):
            own = placed.entries_of(shard)
            stored_marker = Marker(one.batch.number, one.trusted[shard].marker.data).stored()
            writes.append(Write(shard, stored.key(one.lane, shard), placed.entry_fields[own], parity[own], stored_marker))
    exchange([], writes)
    return writes


def _without_parity(unfinished: Unfinished) -> list[int]:
    """The shards that have nothing of a batch yet."""
    return [shard for shard, there in unfinished.trusted.items() if there.marker.parity != unfinished.batch.number]
