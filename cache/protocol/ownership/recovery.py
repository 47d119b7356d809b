"""Recovery: finish, from the log, the write-back batch during which a lane's owner died.

Without it, stripes could stay inconsistent.
"""

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
    """Fence a lane on every store shard, and bring each shard to the last batch in the log.

    On shards that lack the parity of batch n, parity ^= c * (old ^ new). Once all have it, the new
    rows go to the shards that lack them. Each phase is one atomic command per shard, so no phase is
    ever half done on a shard, and a second recovery continues where the first one stopped. Shards
    become lost in `stored.shards` if they are down, stale or were being rebuilt, or if their number
    of rows differs from the log's. Rows of the store must not be migrating.

    Returns:
        The number of the batch.

    Raises:
        Fenced: An owner of a later term has fenced the lane.
        RowsLost: Parity does not cover the lost shards.
        StoreError: A shard refuses writes, or stops answering.
        CacheError: The log is not the run's, or is not a log.
    """
    found = fence_lanes(stored, [lane], ownership)
    for error in found.absent.values():
        # The shard has its rows. The user can make it accept writes, so it must not count as lost.
        if isinstance(error, StoreFull | StoreAuth):
            raise error
    lose_absent(stored, found)
    # The log must be read after the fence. Until then the earlier owner may log and send a further
    # batch.
    batch = adopted_batch(log, lane, ownership.term)
    verdict = judge_logged(stored, lane, found.lanes[lane], batch)
    finish_migration(stored, lane, verdict, ownership.term, np.zeros(0, np.int64))
    for shard in [*verdict.refused, *verdict.stale]:
        lose(stored, shard)
    stored.shards.check_covered()
    for shard in verdict.doubtful():
        # A shard is kept if parity does not cover its loss. A scrub decodes the rows that it lacks.
        if stored.lose(shard, f"store {stored.shards.urls[shard]}: lacks rows of lane {lane}"):
            del verdict.trusted[shard]
    play(stored, [Unfinished(lane, batch, verdict.trusted)], stored.store.exchange)
    return batch.number


def adopted_batch(log: BatchLog, lane: int, term: int) -> LoggedBatch:
    """Return the batch that the log holds for a lane, or an empty one with number 0.

    The log then also holds the batch in this term, before its first byte is sent. An earlier owner
    that still runs may log one more batch. That batch must not count, or the next owner would take
    the shards that this owner has finished for stale.
    """
    return log.adopt(lane, term) or LoggedBatch.empty(0, 0, None)


def judge_logged(stored: StoredRows, lane: int, found: Mapping[int, Found], batch: LoggedBatch, released: int = 0) -> Verdict:
    """Return which shards can be trusted with a lane, by the batch in its log.

    Args:
        found: By shard.
        released: As in `Expect.logged`.

    Raises:
        CacheError: All shards are ahead of the log.
    """
    # Some shards may be ahead of the log: an earlier owner may have continued with shards that a
    # later owner could not fence.
    if found and all(there.marker.parity > batch.number for there in found.values()):
        shard, there = next(iter(found.items()))
        raise CacheError(
            f"store {stored.shards.urls[shard]}: has batch {there.marker} of lane {lane}, later than the log's last, {batch.number}: the log is not "
            "the run's newest; put the newest log back"
        )
    return judge(stored.placement, found, Expect.logged(batch, released))


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A batch of a lane that some shards may lack.

    Attributes:
        trusted: What was found on each trusted shard.
    """

    lane: int
    batch: LoggedBatch
    trusted: dict[int, Found]


def play(stored: StoredRows, all_unfinished: Sequence[Unfinished], exchange: Exchange) -> list[Write]:
    """Bring batches, one per lane, to every trusted shard that lacks them.

    Args:
        exchange: Does reads and writes. It may remove a shard that fails from those that are
            trusted; that shard is then left as it is.

    Returns:
        What was written.
    """
    batches = [one for one in all_unfinished if len(one.batch.fields)]
    placed = {one.lane: _arranged(stored, one) for one in batches}
    # Parity first, and acknowledged everywhere, as in an ordinary round (docs/protocol.md).
    written = _finish_parity(stored, [(one, placed[one.lane]) for one in batches], exchange)
    writes = []
    for one in all_unfinished:
        batch, whole = one.batch, Marker(one.batch.number, one.batch.number).stored()
        behind = [shard for shard, there in one.trusted.items() if there.marker.data != batch.number]
        # A batch without rows is finished by writing its marker.
        # `position` has the place by shard of each row of the batch. Its inverse lists the rows by
        # shard.
        inverse = np.argsort(placed[one.lane].position) if one.lane in placed else np.zeros(0, np.int64)
        for shard in behind:
            own = inverse[placed[one.lane].rows_of(shard)] if one.lane in placed else inverse
            writes.append(Write(shard, stored.key(one.lane, shard), batch.fields[own], batch.new[own], whole))
    exchange([], writes)
    return written + writes


def _arranged(stored: StoredRows, unfinished: Unfinished) -> Arrangement:
    """Arrange the rows and parity rows of a batch as if every shard were live."""
    stripes = stored.lane_stripes(unfinished.lane, np.zeros(len(stored.layouts), np.int64))
    table, ordinal = unpack(unfinished.batch.fields)
    everywhere = np.full(stored.placement.shard_count, ALL_STRIPES, np.uint64)
    return stripes.arrange(table, ordinal, everywhere)


def _finish_parity(stored: StoredRows, work: Sequence[tuple[Unfinished, Arrangement]], exchange: Exchange) -> list[Write]:
    """Bring the parity rows of batches to the shards that lack them. Returns the Writes."""
    code = Code.of(stored.placement)
    assert code is not None
    reads, parities = [], []
    for one, placed in work:
        parity = np.zeros((len(placed.entry_fields), one.batch.new.shape[1]), np.uint8)
        parities.append(parity)
        for shard in _without_parity(one):
            own = placed.entries_of(shard)
            reads.append(Read(shard, stored.key(one.lane, shard), placed.entry_fields[own], parity[own]))
    # A parity row that is missing under the right marker belongs to a stripe that had no rows. It
    # stays zeros.
    exchange(reads, [])
    writes = []
    for (one, placed), parity in zip(work, parities, strict=True):
        delta = one.batch.new ^ one.batch.old
        for i in range(code.r):
            factors = code.coefficients[i][placed.member]
            accumulate(delta, np.arange(len(delta)), factors, parity, placed.entry_of[:, i][placed.stripe_of])
        for shard in _without_parity(one):
            own = placed.entries_of(shard)
            # The marker advances the parity only. The data stays what it was until every shard has
            # the parity.
            stored_marker = Marker(one.batch.number, one.trusted[shard].marker.data).stored()
            writes.append(Write(shard, stored.key(one.lane, shard), placed.entry_fields[own], parity[own], stored_marker))
    exchange([], writes)
    return writes


def _without_parity(unfinished: Unfinished) -> list[int]:
    """Return the shards that lack the parity, and so have nothing of a batch yet."""
    return [shard for shard, there in unfinished.trusted.items() if there.marker.parity != unfinished.batch.number]
