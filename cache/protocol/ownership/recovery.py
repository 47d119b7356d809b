"""Finishing the write-back batch that a writer died in, from its log, so that no stripe is left inconsistent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.store import Read, Write
from foreload.cache.errors import CacheError, StoreError
from foreload.cache.parity.erasure import Code, accumulate
from foreload.cache.parity.stripes import ALL_STRIPES, Arrangement
from foreload.cache.protocol.ownership.batch_log import BatchLog, LoggedBatch
from foreload.cache.protocol.ownership.interrupted_migration import Taking, counted, finish_migration, joins
from foreload.cache.protocol.ownership.ownership import Ownership, inspect_shards, lose
from foreload.cache.protocol.shards.fence import Found, fence_all
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.fields import unpack

Exchange = Callable[[Sequence[Read], Sequence[Write]], object]


def recover(stored: StoredRows, lane: int, log: BatchLog, ownership: Ownership) -> int:
    """Fence a lane on every store shard, and bring each to the last batch in the log; returns its number.

    Where the parity of batch n is not there, parity ^= c * (old ^ new); once it is everywhere, the new rows go where the data is not. Each
    phase is one atomic command a shard, so none is ever half done, and a second recovery finds what is left of the first. Shards that are
    down, stale or were being rebuilt, or have not as many rows as the log says, are lost in stored.shards. For a store whose rows do not move.
    Raises Fenced, RowsLost, StoreError, CacheError.
    """
    found = {shard: by_lane[lane] for shard, by_lane in fence_lanes(stored, [lane], ownership).items()}
    # Not before the fence: until then the owner before may hold a further batch, and send it.
    batch = adopted_batch(log, lane, ownership.term)
    judged = judge(stored, lane, batch, found)
    taking = Taking(ownership.term, batch.number, np.zeros(0, np.int64))
    for shard in finish_judged(stored, judged, taking):
        lose(stored, shard)
    for shard in judged.refused:
        lose(stored, shard)
    stored.shards.check_covered()
    for shard in judged.doubtful():
        # One that is too many is kept: a scrub decodes what it lacks.
        if stored.lose(shard, f"store {stored.shards.urls[shard]}: lacks rows of lane {lane}"):
            del judged.unfinished.markers[shard]
    play(stored, [judged.unfinished], stored.store.exchange)
    return batch.number


def fence_lanes(stored: StoredRows, lanes: Sequence[int], ownership: Ownership) -> dict[int, Mapping[int, Found]]:
    """Fence lanes on every store shard; returns what was found, by shard and lane. Those that cannot be fenced are lost in stored.shards.

    Raises Fenced, StoreError.
    """
    found = {}
    fenced_shards = inspect_shards(
        stored.store,
        stored.namespace,
        lambda shard: fence_all(stored.store, shard, stored.namespace, lanes, ownership.term),
        lambda shard: ownership.has(stored.store, stored.namespace, shard),
    )
    for shard, fenced in fenced_shards:
        if fenced is None:
            lose(stored, shard)
            continue
        found[shard] = fenced
        for lane, there in fenced.items():
            stored.shards.of(lane).epochs[shard] = there.epoch
    return found


def adopted_batch(log: BatchLog, lane: int, term: int) -> LoggedBatch:
    """The batch that the log holds for a lane; an empty one, of number 0, where it holds none.

    The log has it in this term before its first byte leaves: an owner before that still goes on may hold one more, which must not count, for then
    a further owner would take what this one finishes for stale.
    """
    return log.adopt(lane, term) or LoggedBatch.empty(0, 0, None)


@dataclass(slots=True)
class Unfinished:
    """A batch of a lane that may not be everywhere. markers: of each shard that is trusted, as it is."""

    lane: int
    batch: LoggedBatch
    markers: dict[int, Marker]


@dataclass(frozen=True, slots=True)
class Judged:
    """Which shards a batch in the log says can be trusted. found: what there is on these; refused: the others, which have none of its states."""

    unfinished: Unfinished
    found: dict[int, Found]
    refused: list[int]

    def by_log(self, shard: int, stage: int | None = None) -> int | None:
        """How many rows and parity rows a shard must have by the log, None where that does not say.

        stage: 0 where it has nothing of the batch, 1 where it has its parity, 2 where its data, too; None: as its marker says.
        """
        batch, marker = self.unfinished.batch, self.unfinished.markers[shard]
        if stage is None:
            stage = int(marker.parity == batch.number) + int(marker.data == batch.number)
        # Of a shard that has come in since it knows nothing: what that has, it has got by a move, which says so.
        return None if batch.held is None else int(batch.held[shard, stage]) if shard < len(batch.held) else 0

    def doubtful(self) -> list[int]:
        """Those with another number of rows than they must have; they are trusted, too."""
        by_log = {shard: self.by_log(shard) for shard in self.unfinished.markers}
        return [
            shard
            for shard, log in by_log.items()
            if log is not None and self.found[shard].rows != counted(self.found[shard], log)
        ]


def judge(stored: StoredRows, lane: int, batch: LoggedBatch, found: Mapping[int, Found]) -> Judged:
    """What a lane has on shards, by the batch in the log. found: by shard. Raises CacheError where all are ahead of the log."""
    judged = Judged(Unfinished(lane, batch, {}), {}, [])
    # Some may be: an owner before may have gone on with shards that a further one could not fence.
    if found and all(there.marker.parity > batch.number for there in found.values()):
        shard, there = next(iter(found.items()))
        raise CacheError(
            f"store {stored.shards.urls[shard]}: has batch {there.marker} of lane {lane}, later than the log's {batch.number}: the log is not "
            "the run's; put that one back"
        )
    coming = joins(stored, found)
    for shard, there in found.items():
        marker = Marker(batch.number, batch.number) if shard in coming else there.marker
        known = (batch.before, batch.number)
        if marker.rebuilding or marker.data not in known or marker.parity not in known:
            judged.refused.append(shard)
            continue
        judged.unfinished.markers[shard] = marker
        judged.found[shard] = there
    return judged


def finish_judged(stored: StoredRows, judged: Judged, taking: Taking) -> list[int]:
    """`finish_migration` of the shards that the log says can be trusted; returns those that are stale, which are trusted no more."""
    one = judged.unfinished

    def by_log(shard: int) -> int:
        said = judged.by_log(shard, stage=2)
        return judged.found[shard].rows if said is None else said

    def fails(shard: int, error: StoreError) -> None:
        stored.shards.lose(shard, str(error))

    stale = finish_migration(stored, one.lane, judged.found, taking, fails, by_log)
    one.markers = {shard: marker for shard, marker in one.markers.items() if shard in judged.found and shard not in stale}
    return stale


def play(stored: StoredRows, all_unfinished: Sequence[Unfinished], exchange: Exchange) -> list[Write]:
    """Bring batches, of a lane each, to every shard that is trusted and lacks them; returns what was written.

    exchange: does reads and writes; it may take a shard that fails out of the markers, which is then left as it is.
    """
    batches = [one for one in all_unfinished if len(one.batch.fields)]
    placed = {one.lane: _arranged(stored, one) for one in batches}
    written = _finish_parity(stored, [(one, placed[one.lane]) for one in batches], exchange)
    writes = []
    for one in all_unfinished:
        batch, whole = one.batch, Marker(one.batch.number, one.batch.number).stored()
        behind = [shard for shard, before in one.markers.items() if before.data != batch.number]
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
            stored_marker = Marker(one.batch.number, one.markers[shard].data).stored()
            writes.append(Write(shard, stored.key(one.lane, shard), placed.entry_fields[own], parity[own], stored_marker))
    exchange([], writes)
    return writes


def _without_parity(unfinished: Unfinished) -> list[int]:
    """The shards that have nothing of a batch yet."""
    return [shard for shard, marker in unfinished.markers.items() if marker.parity != unfinished.batch.number]
