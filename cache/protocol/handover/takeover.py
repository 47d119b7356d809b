"""Taking over lanes whose owner is gone in the middle of its work, by who has a copy of them (docs/protocol.md, Takeover)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreload.cache.client.store import NO_ROWS, Read, Write
from foreload.cache.errors import CacheError, RowError, StoreError
from foreload.cache.parity.row_counts import count_rows
from foreload.cache.parity.stripes import Written
from foreload.cache.protocol.handover.unsure_rows import REMEDY, Look, UnsureRows
from foreload.cache.protocol.ownership.batch_log import BatchLog, LoggedBatch
from foreload.cache.protocol.ownership.interrupted_migration import Taking, finish_migration, joins
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.ownership.recovery import Unfinished, adopted_batch, finish_judged, judge, play
from foreload.cache.protocol.rounds.failover import connect_again
from foreload.cache.protocol.rounds.lanes import LanePlan, Plan
from foreload.cache.protocol.rounds.reconnection import check_answered
from foreload.cache.protocol.shards.fence import Found, fence_everywhere
from foreload.cache.protocol.shards.marker import Marker, first_number
from foreload.cache.protocol.shards.namespace import are_of
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.fields import fields
from foreload.cache.rows.staging import EndedRows, Rows
from foreload.pipelines.schedule.format import Occupants


@dataclass(frozen=True, slots=True)
class CopiedLane:
    """What a copy knows of a lane at the end of step c, the last that was committed; boundary c + 1 is not passed.

    ordinals: int64 [tables], given up to c. occupants: who sits in the training slots, all of them, in any order. owed: the rows that ended at
    boundaries up to c, each with its boundary, ascending: all boundaries that are not known to be released, also those without rows. ending: the
    rows that end at boundary c + 1, and may have been handed over; where these are not known, and where training is to stop after c, all
    that sit in slots. Both have no base. released: the last boundary that is known to be released, and the number of the lane's last batch then.
    """

    ordinals: np.ndarray
    occupants: Occupants
    owed: Sequence[tuple[int, EndedRows]]
    ending: EndedRows
    released: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TakenLane:
    """A lane that was taken over. last_batch: the number at which its new owner begins; released_boundary: as it begins; written: what the store
    has; held: int64 [shards], how many rows and parity rows that is.

    to_write: the rows that were owed and are not stored, with their base, by boundary, ascending; every boundary that was owed is there, so that
    each is released in time. ending: as in the copy, with the base of each row that is not stored; stored: bool [E], which of them are: the tag
    of these is their stored tag from now on.
    """

    lane: int
    last_batch: int
    released_boundary: int
    written: Written
    held: np.ndarray
    to_write: Sequence[tuple[int, EndedRows]]
    ending: EndedRows
    stored: np.ndarray

    def plan(self, arrivals: Plan) -> LanePlan:
        """What its traffic begins with; `to_write` is to be handed over next. arrivals: from step c on."""
        return LanePlan(self.lane, arrivals, self.last_batch, self.released_boundary, self.written, self.held)


def take_over_lost(
    stored: StoredRows,
    ownership: Ownership,
    log: BatchLog | None,
    copied: Mapping[int, CopiedLane],
    last_owner_dead: bool,
    on_action: Callable[[str], None] = lambda action: None,
) -> dict[int, TakenLane]:
    """Take over lanes, of each of which `copied` has what a copy knows, from owners that are gone or seem to be; all in one go.

    Where a Traffic serves other lanes of these rows, between two of its rounds. log: where owners hold their batches, needed with parity.
    last_owner_dead: whether the owners before are known to be dead. A shard that cannot be fenced is lost in stored.shards; one that cannot be
    trusted with a lane is to be rebuilt for it. A takeover that fails, or dies, may be followed by another, of a later term. on_action: called with
    what was done last, as the traffic's.

    Raises Fenced, StoreError, RowError for a row that is none of its versions, ShardsSilent and RowsLost where parity does not cover the shards that
    do not answer, or are lost, and CacheError.
    """
    takings = [_Taking.of(stored, lane, one, ownership.term) for lane, one in copied.items()]
    connect_again(stored, copied.keys())
    _fence(stored, ownership, takings)
    on_action("fenced")
    if not stored.placement.r:
        found = _look_unprotected(stored, takings, ownership.term, on_action)
        return {taking.lane: taking.taken(found[taking.lane]) for taking in takings}
    if log is None:
        raise CacheError("takeover: needs the log of the batches where there is parity")
    fenced = len(stored.placement.live) - len(stored.shards.lost)
    if fenced <= stored.placement.r and not last_owner_dead:
        raise CacheError(
            f"lanes {', '.join(map(str, copied))}: {fenced} of {len(stored.placement.live)} store shards could be fenced, must be more than "
            f"{stored.placement.r}, or the owner before may go on with the others; bring the servers back, or see that it is dead"
        )
    _finish_batches(stored, log, takings, ownership.term, on_action)
    found = _look(stored, takings)
    on_action("rows looked at")
    _begin(stored, log, takings, on_action)
    return {taking.lane: taking.taken(found[taking.lane]) for taking in takings}


@dataclass(slots=True)
class _Taking:
    """A lane that is being taken over.

    number: of the empty batch with which the new owner's begin. found: what the fence found, by shard. unfinished: with the markers of the shards
    that are trusted; fields: how many (the marker's among them) the lane's hash has there. unsure: rows of which the copy does not know
    whether they are stored; written: as far as that is known; held: by that, once it is, the rows and parity rows of a shard that lacks none.
    """

    lane: int
    copied: CopiedLane
    number: int
    unsure: UnsureRows
    written: Written
    unfinished: Unfinished
    held: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    found: dict[int, Found] = field(default_factory=dict)
    fields: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: StoredRows, lane: int, copied: CopiedLane, term: int) -> _Taking:
        written, occupants = Written(copied.ordinals, stored.placement.k), copied.occupants
        # Who sits in a slot, was never stored, and does not leave it before boundary c + 1 has passed, is nowhere in the store.
        never = (occupants.stored_tag == 0) & ~np.isin(_names(occupants), _names(copied.ending))
        written.forget(occupants.table[never], occupants.ordinal[never])
        unfinished = Unfinished(lane, LoggedBatch.empty(0, 0, None), {})
        return cls(lane, copied, first_number(term), UnsureRows.of(lane, copied.owed, copied.ending), written, unfinished)

    def note(self, found: Mapping[int, Found]) -> None:
        """What there is on shards, once the last chunk of a move has come to its end there."""
        for shard, one in found.items():
            self.found[shard] = one
            self.fields[shard] = one.rows + one.marked

    def forget_unwritten(self, stored: StoredRows, found: Rows) -> EndedRows:
        """Note which of the unsure rows were never written, and count what shards that lack none have; returns them. found: as a look has it."""
        latest = self.unsure.latest
        never = latest.select(np.flatnonzero(found.tag == 0))
        self.written.forget(never.table, never.ordinal)
        stripes = stored.lane_stripes(self.lane, self.written)
        self.held = count_rows(stripes, len(stored.layouts), stored.placement.shard_count).fields
        return never

    def rows_on(self, shard: int) -> int:
        """How many rows and parity rows a shard has that is trusted, once the batch in the log is there."""
        return self.fields[shard] - (self.found[shard].marked or self.unfinished.batch.number > 0)

    def distrust(self, stored: StoredRows, shard: int) -> None:
        """Do without what a shard has of the lane. Raises RowsLost where parity does not cover that."""
        self.unfinished.markers.pop(shard, None)
        stored.shards.of(self.lane).leftover[shard] = 0
        if shard not in stored.shards.lost:
            stored.shards.advance(self.lane, shard, 0)
        stored.shards.survivors(self.lane)

    def may_distrust(self, stored: StoredRows, shard: int) -> bool:
        """Whether parity covers that."""
        return stored.shards.covered(stored.shards.of(self.lane).unreadable | stored.placement.mask([shard]))

    def taken(self, found: Rows) -> TakenLane:
        """It is taken over. found: as `UnsureRows.sorted_out` has it."""
        to_write, ending, are_stored = self.unsure.sorted_out(found)
        released_boundary, _ = self.copied.released
        return TakenLane(self.lane, self.number, released_boundary, self.written, self.held, to_write, ending, are_stored)


def _names(rows: Occupants) -> np.ndarray:
    return fields(rows.table, rows.ordinal)


def _fence(stored: StoredRows, ownership: Ownership, takings: Sequence[_Taking]) -> None:
    """Fence the lanes on every shard; one that cannot be is lost, without parity an error."""
    shards, name = stored.placement.live, stored.namespace
    own = dict.fromkeys(shards, True) if ownership.identity is None else are_of(stored.store, name, ownership.identity)
    failures: dict[int, StoreError] = {
        shard: StoreError(f"store {stored.shards.urls[shard]}: is not shard {shard} of namespace {name}; check --store")
        for shard in shards
        if not own.get(shard, False)
    }
    failures |= stored.store.down
    for taking in takings:
        known = stored.shards.of(taking.lane).epochs
        there = [shard for shard in shards if shard not in failures]
        found, failed = fence_everywhere(
            stored.store, there, stored.namespace, taking.lane, ownership.term, {shard: known[shard] for shard in there}
        )
        failures |= failed
        taking.found = found
        for shard, one in found.items():
            known[shard] = one.epoch
            taking.fields[shard] = one.rows + one.marked
    check_answered(stored, failures)
    for shard, error in failures.items():
        if not stored.placement.r:
            raise error
        stored.shards.lose(shard, str(error))
    for taking in takings:
        taking.found = {shard: one for shard, one in taking.found.items() if shard not in failures}
    stored.shards.check_covered()


def _attempt(stored: StoredRows, takings: Sequence[_Taking], reads: Sequence[Read], writes: Sequence[Write]) -> bool:
    """Do reads and writes; returns whether all is done, or what is left undone belongs to shards that are lost now. Raises RowsLost."""
    failures = stored.store.attempt(reads, writes)
    check_answered(stored, failures)
    for shard, error in failures.items():
        stored.shards.lose(shard, str(error))
        for taking in takings:
            taking.unfinished.markers.pop(shard, None)
    for taking in takings:
        stored.shards.survivors(taking.lane)
    return not failures


# With parity.


def _finish_batches(
    stored: StoredRows, log: BatchLog, takings: Sequence[_Taking], term: int, on_action: Callable[[str], None]
) -> None:
    """Bring every lane to the batch in the log, on the shards that are trusted."""
    for taking in takings:
        batch, (_, released) = adopted_batch(log, taking.lane, term), taking.copied.released
        if not released <= batch.number < taking.number:
            raise CacheError(
                f"lane {taking.lane}: the log's last batch is {batch.number}, must be from {released} on, and of a term before {term}: it is not the "
                f"log of this run; {REMEDY}"
            )
        judged = judge(stored, taking.lane, batch, taking.found)
        taking.unfinished = judged.unfinished
        refused = [*judged.refused, *finish_judged(stored, judged, Taking(term, batch.number, taking.copied.ordinals))]
        taking.note(judged.found)
        stale = [shard for shard, marker in taking.unfinished.markers.items() if marker.data < released]
        for shard in [*refused, *judged.doubtful(), *stale]:
            taking.distrust(stored, shard)
    on_action("record held")
    unfinished = [taking.unfinished for taking in takings]
    written = play(stored, unfinished, lambda reads, writes: _attempt(stored, takings, reads, writes))
    by_key = {(key, shard): taking for taking in takings for shard, key in enumerate(stored.keys(taking.lane))}
    for write in written:
        if write.added is not None:
            by_key[write.key, write.shard].fields[write.shard] += write.added
    on_action("batch finished")


def _look(stored: StoredRows, takings: Sequence[_Taking]) -> dict[int, Rows]:
    """Look at the unsure rows of each lane, and note what was never written; returns them as the store has them, by lane."""
    found: dict[int, Rows] = {}
    while len(found) < len(takings):
        looks = {
            taking.lane: Look(stored, taking.unsure, stored.lane_stripes(taking.lane, taking.copied.ordinals))
            for taking in takings
            if taking.lane not in found
        }
        if not _attempt(stored, takings, [read for one in looks.values() for read in one.reads], []):
            continue
        for taking in (taking for taking in takings if taking.lane in looks):
            rows = _judge_rows(stored, taking, looks[taking.lane])
            if rows is not None:
                found[taking.lane] = rows
    return found


def _judge_rows(stored: StoredRows, taking: _Taking, look: Look) -> Rows | None:
    """What a look found; None where a shard is not trusted any more, and another look is to be taken."""

    def distrust(shard: int, error: RowError) -> None:
        if not taking.may_distrust(stored, shard):
            raise error
        taking.distrust(stored, shard)

    rows = look.finish(distrust)
    if rows is None:
        return None
    never = taking.forget_unwritten(stored, rows)
    own, keeping, trusted = stored.shards.of(taking.lane), stored.placement.keeping, taking.unfinished.markers
    others = [one for one in trusted if not own.has_all(one, taking.rows_on(one), int(taking.held[one]), one in keeping)]
    if not others:
        return rows
    taking.written.note(never.table, never.ordinal)
    for shard in others:
        if not taking.may_distrust(stored, shard):
            raise CacheError(
                f"store {stored.shards.urls[shard]}: has {taking.rows_on(shard)} rows and parity rows of lane {taking.lane}, must have "
                f"{taking.held[shard]} by what was written: it lost rows; {REMEDY}"
            )
        taking.distrust(stored, shard)
    return None


def _begin(stored: StoredRows, log: BatchLog, takings: Sequence[_Taking], on_action: Callable[[str], None]) -> None:
    """Write the empty batch with which the new owner's begin; what is not trusted with a lane is emptied of it, to be rebuilt."""
    writes: list[tuple[_Taking, Write]] = []
    emptied: dict[int, list[tuple[bytes | str, ...]]] = {}
    for taking in takings:
        own, marker = stored.shards.of(taking.lane), Marker(taking.number, taking.number)
        log.hold(taking.lane, LoggedBatch.empty(taking.number, taking.unfinished.batch.number, taking.held + own.leftover))
        for shard in taking.found:
            if shard in stored.shards.lost:
                continue
            trusted = shard in taking.unfinished.markers
            if not trusted:
                emptied.setdefault(shard, []).append(("UNLINK", stored.key(taking.lane, shard)))
                own.migrated[shard] = None
            marked = trusted and taking.fields[shard] > taking.rows_on(shard)
            own.held[shard] = taking.rows_on(shard) if marked else None
            marker = Marker(taking.number, taking.number, rebuilding=not trusted)
            writes.append((taking, stored.write(taking.lane, shard, *NO_ROWS, marker, 0)))
    on_action("empty record held")
    if emptied:
        stored.store.ask(emptied)  # one that fails here does so below
    _attempt(stored, takings, [], [write for _, write in writes])
    on_action("marker written")
    for taking, write in writes:
        if write.shard in stored.shards.lost:
            continue
        if write.surprise is not None:
            stored.shards.lose(
                write.shard, f"store {stored.shards.urls[write.shard]}: lost rows of lane {taking.lane}: {write.surprise}"
            )
            stored.shards.check_covered()
            continue
        stored.note(taking.lane, write)


# Without parity.


def _look_unprotected(
    stored: StoredRows, takings: Sequence[_Taking], term: int, on_action: Callable[[str], None]
) -> dict[int, Rows]:
    """Look at the unsure rows of each lane, and write the marker with which the new owner's batches begin; returns them as the store has them.

    Nothing else is written: who has another copy of the lane takes for stored what its schedule says.
    """
    for taking in takings:
        coming = joins(stored, taking.found)
        for shard, there in taking.found.items():
            if shard in coming:
                continue
            released = taking.copied.released[1]
            if not released <= there.marker.data < taking.number:
                what = f"its last write-back batch of lane {taking.lane} is {there.marker}, must be from {released} on, and before {taking.number}"
                raise StoreError(f"store {stored.shards.urls[shard]}: {what}: it lost rows; {REMEDY}")
    for taking in takings:
        _finish_unprotected(stored, taking, term)
    looks = [Look(stored, taking.unsure, stored.lane_stripes(taking.lane, taking.copied.ordinals)) for taking in takings]
    stored.store.exchange([read for look in looks for read in look.reads], [])
    found = {taking.lane: _judge_unprotected(stored, taking, look) for taking, look in zip(takings, looks, strict=True)}
    on_action("rows looked at")
    markers: list[tuple[_Taking, Write]] = []
    for taking in takings:
        for shard, there in taking.found.items():
            stored.shards.of(taking.lane).held[shard] = int(taking.held[shard]) if there.marked else None
            marker = Marker(taking.number, taking.number)
            markers.append((taking, stored.write(taking.lane, shard, *NO_ROWS, marker, 0)))
    stored.store.exchange([], [write for _, write in markers])
    on_action("marker written")
    for taking, write in markers:
        stored.note(taking.lane, write)
        stored.shards.of(taking.lane).held[write.shard] = int(taking.held[write.shard])
    return found


def _judge_unprotected(stored: StoredRows, taking: _Taking, look: Look) -> Rows:
    """What a look found. Raises RowError, and StoreError for a shard that lacks rows."""

    def fails(shard: int, error: RowError) -> None:
        raise error

    rows = look.finish(fails)
    assert rows is not None
    taking.forget_unwritten(stored, rows)
    for shard in taking.found:
        if taking.rows_on(shard) != taking.held[shard]:
            what = f"lost rows of lane {taking.lane}: has {taking.rows_on(shard)} of {taking.held[shard]}"
            raise StoreError(f"store {stored.shards.urls[shard]}: {what}; {REMEDY}")
    return rows


def _finish_unprotected(stored: StoredRows, taking: _Taking, term: int) -> None:
    """Bring the last chunk of a move to its end. Raises StoreError for a shard that fails, or is stale."""

    def fails(shard: int, error: StoreError) -> None:
        raise error

    found = dict(taking.found)
    number = max((there.marker.data for there in found.values()), default=0)
    for shard in finish_migration(stored, taking.lane, found, Taking(term, number, taking.copied.ordinals), fails):
        raise StoreError(f"store {stored.shards.urls[shard]}: lacks rows of lane {taking.lane} that moved there; {REMEDY}")
    taking.note(found)
