"""Takeover of lanes whose owner crashed, from their replicas (docs/protocol.md, Takeover)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from foreload.cache.client.resp import HmgetReply
from foreload.cache.client.store import NO_ROWS, Read, Write
from foreload.cache.errors import CacheError, RowError, StoreError
from foreload.cache.parity.decoding import Decoding, StripePlaces, plan_decoding
from foreload.cache.parity.shard_contents import count_rows
from foreload.cache.parity.stripes import LaneStripes, Written
from foreload.cache.protocol.ownership.batch_log import BatchLog, LoggedBatch, checksum
from foreload.cache.protocol.ownership.ownership import Ownership, fence_lanes, finish_migration
from foreload.cache.protocol.ownership.recovery import Unfinished, adopted_batch, judge_logged, play
from foreload.cache.protocol.ownership.verdict import Expect, judge
from foreload.cache.protocol.rounds.failover import connect_again
from foreload.cache.protocol.rounds.lanes import LanePlan, Plan
from foreload.cache.protocol.rounds.reconnection import check_answered
from foreload.cache.protocol.shards.fence import Found
from foreload.cache.protocol.shards.marker import Marker, first_number
from foreload.cache.protocol.shards.reading import Expected, PlannedRead, StoredRows, plan_reads
from foreload.cache.rows.row_bytes import decode_rows, encode_rows, fields
from foreload.cache.rows.staging import EndedRows, Rows, put_rows
from foreload.pipelines.schedule.format import Occupants

REMEDY = "continue from a checkpoint, or start again with --overwrite"


@dataclass(frozen=True, slots=True)
class UnsureRows:
    """The rows of a lane that ended and that the store may have already, n in all.

    The rows of each boundary come first; the rows that are ending come last. Only the last version
    of a row counts, because the row's own arrival waited for the version before.

    Attributes:
        boundaries: the boundaries at which the rows ended.
        starts: where the rows of each boundary begin, where the ending rows begin, and n.
        rows: the rows, [n].
        newest: int64 [m], the place of the last version of each distinct row.
        version_of: int64 [n], the index in `newest` of the last version of the same row.
    """

    lane: int
    boundaries: Sequence[int]
    starts: Sequence[int]
    rows: EndedRows
    newest: np.ndarray
    version_of: np.ndarray

    @classmethod
    def of(cls, lane: int, owed: Sequence[tuple[int, EndedRows]], ending: EndedRows) -> UnsureRows:
        """Collect the unsure rows of a lane.

        Args:
            owed: the rows that ended at earlier boundaries, by boundary, ascending.
            ending: the rows that end at the boundary that was not passed.
        """
        parts = [*(rows for _, rows in owed), ending]
        names = ("table", "ordinal", "id", "tag", "stored_tag", "weights", "state")
        rows = EndedRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        _, version_of = np.unique(fields(rows.table, rows.ordinal), return_inverse=True)
        newest = np.zeros(int(version_of.max(initial=-1)) + 1, np.int64)
        # The rows come in the order of their boundaries, so the last place of a row holds its last
        # version.
        np.maximum.at(newest, version_of, np.arange(len(rows)))
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        return cls(lane, [boundary for boundary, _ in owed], starts, rows, newest, version_of)

    @property
    def latest(self) -> EndedRows:
        """The last version of each row: [m]."""
        return self.rows.select(self.newest)

    def sorted_out(self, found: Rows) -> tuple[list[tuple[int, EndedRows]], EndedRows, np.ndarray]:
        """Separate the rows that must be written from the rows that the store has.

        Args:
            found: [m], the rows as the store has them, with tag 0 for a row that it does not have.

        Returns:
            The rows to write of each boundary, with their base; the rows that are ending, with
            their base; and a bool mask of the ending rows that are stored.
        """
        is_newest = self.newest[self.version_of] == np.arange(len(self.rows))
        # Only the last version of a row is written, and only if the store does not have it.
        to_write = is_newest & (found.tag[self.version_of] != self.rows.tag)
        rows = replace(self.rows, base_weights=found.weights[self.version_of], base_state=found.state[self.version_of])
        places = [np.arange(start, end) for start, end in pairwise(self.starts)]
        owed = [(boundary, rows.select(own[to_write[own]])) for boundary, own in zip(self.boundaries, places[:-1], strict=True)]
        return owed, rows.select(places[-1]), ~to_write[places[-1]]


class Look:
    """The reads that find out which version of each unsure row the store has, and their results.

    A shard that is not readable for the lane, by stored.shards, is not read: its rows are decoded.
    A row of a stripe that is missing where it is read counts as zeros.

    Args:
        unsure: the rows to look at.
        given: the lane's stripes, of all rows that may have been written.
    """

    def __init__(self, stored: StoredRows, unsure: UnsureRows, given: LaneStripes) -> None:
        self._stored, self._unsure = stored, unsure
        self._latest = unsure.latest
        own, k = stored.shards.of(unsure.lane), stored.placement.k
        self._planned = plan_reads(stored, Expected(*self._latest.columns(), unsure.lane)) if len(self._latest) else []
        self._decodings: dict[int, Decoding] = {}
        for place, planned in enumerate(self._planned):
            if not own.readable(planned.read.shard):
                rows = self._latest.select(planned.places)
                wanted = StripePlaces.of_rows(rows.table, rows.ordinal, k)
                survivors, keys = stored.shards.survivors(unsure.lane), stored.keys(unsure.lane)
                self._decodings[place] = plan_decoding(given, survivors, wanted, planned.read.rows.shape[1], keys)

    @property
    def reads(self) -> list[Read]:
        """The reads to do before `finish`."""
        direct = [planned.read for place, planned in enumerate(self._planned) if place not in self._decodings]
        return direct + [read for decoding in self._decodings.values() for read in decoding.reads]

    def finish(self, distrust: Callable[[int, RowError], None]) -> Rows | None:
        """Return the rows as the store has them, [m], with tag 0 for a row that it never had.

        Args:
            distrust: called with a shard that has a row which it must not have. `finish` then
                returns None, and the caller must look again without that shard.

        Raises:
            RowError: a decoded row is none of its versions.
        """
        found = Rows.zeros(len(self._latest), self._stored.shapes)
        for place, planned in enumerate(self._planned):
            decoding = self._decodings.get(place)
            if decoding is not None:
                for read in decoding.reads:
                    _clear_missing(read)
                planned.read.rows[:] = decoding.decode()
            else:
                _clear_missing(planned.read)
            error = self._take(planned, found)
            if error is None:
                continue
            if decoding is not None:
                raise error
            distrust(planned.read.shard, error)
            return None
        return found

    def _take(self, planned: PlannedRead, found: Rows) -> RowError | None:
        """Check the rows of a read, in which a missing row is all zeros, and copy them to `found`.

        Returns an error if a row is neither the new nor the stored version.
        """
        read, latest = planned.read, self._latest.select(planned.places)
        width, state_width = self._stored.shapes.shapes[planned.shape]
        weights, state = np.empty((len(latest), width), np.float32), np.empty((len(latest), state_width), np.float32)
        ids, tags = np.empty(len(latest), np.int64), np.empty(len(latest), np.int32)
        decode_rows(read.rows, width, state_width, weights, state, ids, tags)
        nothing = ~read.rows.any(axis=1)
        # A row must be its new or its stored version. A row of zeros is right only where its stored
        # version is "never stored", tag 0.
        right = ((tags == latest.tag) | (tags == latest.stored_tag)) & ((ids == latest.id) & (tags > 0) | nothing)
        if not right.all():
            return self._error(planned, latest, int(np.flatnonzero(~right)[0]), tags)
        put_rows(weights, planned.places, found.weights)
        put_rows(state, planned.places, found.state)
        found.tag[planned.places] = tags
        return None

    def _error(self, planned: PlannedRead, latest: EndedRows, place: int, tags: np.ndarray) -> RowError:
        table = self._stored.layouts[int(latest.table[place])].name
        row = f"table {table}, row id {int(latest.id[place])} (lane {self._unsure.lane}, ordinal {int(latest.ordinal[place])})"
        return RowError(
            f"{row} has an unexpected version on store {self._stored.shards.urls[planned.read.shard]}: tag must be {int(latest.tag[place])} or "
            f"{int(latest.stored_tag[place])}; got {int(tags[place]) or 'none'}; the store lost or mixed up writes: {REMEDY}"
        )


def _clear_missing(read: Read) -> None:
    """Set the rows that a shard does not have to zeros."""
    if read.missing is not None:
        read.rows[read.missing] = 0


@dataclass(frozen=True, slots=True)
class CopiedLane:
    """What a replica knows of a lane at the end of step c, the last committed step.

    Boundary c + 1 is not passed.

    Attributes:
        ordinals: int64 [tables], the ordinals given up to c.
        occupants: all rows in the training slots, in any order.
        owed: the rows that ended at each boundary up to c that is not known to be released,
            ascending, also boundaries without rows. The rows have no base.
        ending: the rows that end at boundary c + 1, and that the owner may have handed over. If
            these are not known, or if training is to stop after c, all rows in slots. The rows have
            no base.
        released: the last boundary that is known to be released, and the number of the lane's last
            batch then.
    """

    ordinals: np.ndarray
    occupants: Occupants
    owed: Sequence[tuple[int, EndedRows]]
    ending: EndedRows
    released: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TakenLane:
    """A lane that was taken over.

    Attributes:
        last_batch: the batch number at which the new owner begins.
        released_boundary: the last released boundary as the new owner begins.
        written: which rows the store has.
        held: int64 [shards], how many rows and parity rows that is on each shard.
        to_write: the owed rows that are not stored, with their base, by boundary, ascending. Every
            owed boundary is in it, so that each is released in time.
        ending: the ending rows of the replica, each row that is not stored with its base.
        stored: bool [E], which of the ending rows are stored. From now on their tag is their stored
            tag.
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
        """Return the plan with which the lane's traffic begins.

        The caller hands over `to_write` next.

        Args:
            arrivals: the arrivals from step c on.
        """
        return LanePlan(self.lane, arrivals, self.last_batch, self.released_boundary, self.written, self.held)


def take_over_lost(
    stored: StoredRows,
    ownership: Ownership,
    log: BatchLog | None,
    copied: Mapping[int, CopiedLane],
    last_owner_dead: bool,
    on_action: Callable[[str], None] = lambda action: None,
) -> dict[int, TakenLane]:
    """Take over lanes from owners that crashed, or seem to have crashed, all lanes at once.

    If a Traffic serves other lanes of the same rows, this runs between two of its rounds. A shard
    that cannot be fenced is lost in stored.shards. A shard that cannot be trusted with a lane is to
    be rebuilt for that lane. If a takeover fails or crashes, another one of a later term may
    follow.

    Args:
        ownership: the new owner's.
        log: the log that holds the owners' batches. Required with parity.
        copied: lane -> what a replica knows of it.
        last_owner_dead: whether the owners before are known to be dead.
        on_action: called with the name of each step that is done.

    Raises:
        Fenced: an owner of a later term took over.
        StoreError: a server failed.
        RowError: a row is none of its versions.
        ShardsSilent: more shards do not answer than parity covers.
        RowsLost: more shards are lost than parity covers.
        CacheError: the log is missing or not the run's, or too few shards could be fenced.
    """
    takings = [_Taking.of(stored, lane, one, ownership.term) for lane, one in copied.items()]
    connect_again(stored, copied.keys())
    # The fence comes first. Until then the owner before may still log and send batches.
    found = fence_lanes(stored, copied, ownership)
    _lose(stored, takings, found.absent)
    stored.shards.check_covered()
    on_action("fenced")
    if stored.placement.r:
        if log is None:
            raise CacheError("takeover: needs the batch log if there is parity")
        _check_fenced(stored, copied, last_owner_dead)
        for taking in takings:
            _judge_logged(stored, taking, found.lanes[taking.lane], log, ownership.term)
        # The batch is in this term's log by now, so a further owner finds what is being played.
        on_action("record held")
        _play(stored, takings)
        on_action("batch finished")
    else:
        for taking in takings:
            _judge_marked(stored, taking, found.lanes[taking.lane], ownership.term)
    rows = _look(stored, takings)
    on_action("rows looked at")
    _begin(stored, log if stored.placement.r else None, takings, on_action)
    return {taking.lane: taking.taken(rows[taking.lane]) for taking in takings}


@dataclass(slots=True)
class _Taking:
    """A lane during its takeover.

    Attributes:
        copied: what a replica knows of the lane.
        number: the number of the new owner's opening (empty) batch.
        unsure: the rows of which the replica does not know whether they are stored.
        written: which rows the store has, as far as that is known.
        held: how many rows and parity rows a shard has that lacks none, once `written` is known.
        batch: the last batch in the log.
        trusted: shard -> what the fence found there, for each shard that is trusted.
    """

    lane: int
    copied: CopiedLane
    number: int
    unsure: UnsureRows
    written: Written
    held: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    batch: LoggedBatch = field(default_factory=lambda: LoggedBatch.empty(0, 0, None))
    trusted: dict[int, Found] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: StoredRows, lane: int, copied: CopiedLane, term: int) -> _Taking:
        written, occupants = Written(copied.ordinals, stored.placement.k), copied.occupants
        # A row in a slot that was never stored, and that does not leave before boundary c + 1,
        # cannot be in the store.
        never = (occupants.stored_tag == 0) & ~np.isin(_names(occupants), _names(copied.ending))
        written.forget(occupants.table[never], occupants.ordinal[never])
        return cls(lane, copied, first_number(term), UnsureRows.of(lane, copied.owed, copied.ending), written)

    def note(self, write: Write) -> None:
        """Count the fields that a write of the batch added to its shard.

        A marker that it added is not counted, because it is no row.
        """
        there = self.trusted.get(write.shard)
        if there is not None and write.added is not None:
            self.trusted[write.shard] = replace(there, rows=there.rows + write.added - (not there.marked), marked=True)

    def forget_unwritten(self, stored: StoredRows, found: Rows) -> EndedRows:
        """Note which unsure rows were never written, and count what a shard has that lacks none.

        Args:
            found: the rows that a look found.

        Returns:
            The rows that were never written.
        """
        latest = self.unsure.latest
        never = latest.select(np.flatnonzero(found.tag == 0))
        self.written.forget(never.table, never.ordinal)
        stripes = stored.lane_stripes(self.lane, self.written)
        self.held = count_rows(stripes, len(stored.layouts), stored.placement.shard_count).fields
        return never

    def distrust(self, stored: StoredRows, shard: int) -> None:
        """Continue without what a shard has of the lane.

        Raises:
            RowsLost: parity does not cover the loss.
        """
        self.trusted.pop(shard, None)
        stored.shards.of(self.lane).leftover[shard] = 0
        if shard not in stored.shards.lost:
            stored.shards.advance(self.lane, shard, 0)
        stored.shards.survivors(self.lane)

    def may_distrust(self, stored: StoredRows, shard: int) -> bool:
        """Return whether parity covers the loss of what a shard has of the lane."""
        return stored.shards.covered(stored.shards.of(self.lane).unreadable | stored.placement.mask([shard]))

    def taken(self, found: Rows) -> TakenLane:
        """Return the lane that was taken over.

        Args:
            found: as `UnsureRows.sorted_out` has it.
        """
        to_write, ending, are_stored = self.unsure.sorted_out(found)
        released_boundary, _ = self.copied.released
        return TakenLane(self.lane, self.number, released_boundary, self.written, self.held, to_write, ending, are_stored)


def _names(rows: Occupants) -> np.ndarray:
    return fields(rows.table, rows.ordinal)


def _lose(stored: StoredRows, takings: Sequence[_Taking], failures: Mapping[int, StoreError]) -> None:
    """Continue without the shards that failed.

    Raises:
        ShardsSilent: more shards do not answer than parity covers.
        StoreError: a shard failed, and there is no parity.
    """
    check_answered(stored, failures)
    for shard, error in failures.items():
        stored.go_without(shard, error)
        for taking in takings:
            taking.trusted.pop(shard, None)


def _attempt(stored: StoredRows, takings: Sequence[_Taking], reads: Sequence[Read], writes: Sequence[Write]) -> bool:
    """Perform reads and writes. Returns whether all were done.

    An item that was not done belongs to a shard that is lost now.

    Raises:
        RowsLost: parity does not cover the loss.
    """
    failures = stored.store.attempt(reads, writes)
    _lose(stored, takings, failures)
    for taking in takings if stored.placement.r else ():
        stored.shards.survivors(taking.lane)
    return not failures


def _check_fenced(stored: StoredRows, lanes: Iterable[int], last_owner_dead: bool) -> None:
    """Check that so many shards are fenced that a living owner cannot continue with the others.

    Raises:
        CacheError: too few shards are fenced, and the last owner is not known to be dead.
    """
    # An owner continues with all shards but r. Any r + 1 fenced shards include one of those.
    fenced = len(stored.placement.live) - len(stored.shards.lost)
    if fenced <= stored.placement.r and not last_owner_dead:
        raise CacheError(
            f"lanes {', '.join(map(str, lanes))}: only {fenced} of {len(stored.placement.live)} store shards could be fenced, must be more than "
            f"{stored.placement.r}, or the previous owner could continue with the rest; bring the servers back, or make sure that this owner is dead"
        )


def _judge_logged(stored: StoredRows, taking: _Taking, found: Mapping[int, Found], log: BatchLog, term: int) -> None:
    """Decide by the log which shards to trust, and finish the last chunk of a migration there.

    This is for a run with parity.

    Raises:
        CacheError: the log is not the run's.
    """
    batch, (_, released) = adopted_batch(log, taking.lane, term), taking.copied.released
    # The log must hold the last released batch or a later one, and none of this term yet.
    if not released <= batch.number < taking.number:
        raise CacheError(
            f"lane {taking.lane}: the log's last batch is {batch.number}, must be at least {released}, and of a term before {term}: it is not the "
            f"log of this run; {REMEDY}"
        )
    verdict = judge_logged(stored, taking.lane, found, batch, released)
    taking.batch, taking.trusted = batch, verdict.trusted
    finish_migration(stored, taking.lane, verdict, term, taking.copied.ordinals)
    for shard in [*verdict.refused, *verdict.stale, *verdict.doubtful()]:
        taking.distrust(stored, shard)


def _judge_marked(stored: StoredRows, taking: _Taking, found: Mapping[int, Found], term: int) -> None:
    """Check that every shard has what was released, and finish the last chunk of a migration.

    This is for a run without parity.

    Raises:
        StoreError: a shard lacks rows.
    """
    (_, released), newest = taking.copied.released, max((there.marker.data for there in found.values()), default=0)
    verdict = judge(stored.placement, found, Expect(newest, range(released, taking.number)))
    for shard in verdict.refused:
        what = f"its last write-back batch of lane {taking.lane} is {found[shard].marker}, must be at least {released}, and before {taking.number}"
        raise StoreError(f"store {stored.shards.urls[shard]}: {what}: the server lost rows; {REMEDY}")
    for shard in verdict.stale:
        raise StoreError(f"store {stored.shards.urls[shard]}: lacks rows of lane {taking.lane} that migrated to it; {REMEDY}")
    taking.trusted = verdict.trusted
    finish_migration(stored, taking.lane, verdict, term, taking.copied.ordinals)


def _play(stored: StoredRows, takings: Sequence[_Taking]) -> None:
    """Bring every lane to the batch in the log, on the shards that are trusted."""
    unfinished = [Unfinished(taking.lane, taking.batch, taking.trusted) for taking in takings]
    written = play(stored, unfinished, lambda reads, writes: _attempt(stored, takings, reads, writes))
    # A write does not name its lane, but its key does.
    by_key = {key: taking for taking in takings for key in stored.keys(taking.lane)}
    for write in written:
        by_key[write.key].note(write)


def _look(stored: StoredRows, takings: Sequence[_Taking]) -> dict[int, Rows]:
    """Look at the unsure rows of each lane, and note which rows were never written.

    Returns the rows as the store has them, by lane.
    """
    found: dict[int, Rows] = {}
    while len(found) < len(takings):
        looks = {
            taking.lane: Look(stored, taking.unsure, stored.lane_stripes(taking.lane, taking.copied.ordinals))
            for taking in takings
            if taking.lane not in found
        }
        # If a shard was lost during the reads, the looks are planned again without it.
        if not _attempt(stored, takings, [read for one in looks.values() for read in one.reads], []):
            continue
        for taking in (taking for taking in takings if taking.lane in looks):
            rows = _judge_rows(stored, taking, looks[taking.lane])
            if rows is not None:
                found[taking.lane] = rows
    return found


def _judge_rows(stored: StoredRows, taking: _Taking, look: Look) -> Rows | None:
    """Return what a look found, or None if a shard is no longer trusted.

    After None the caller must look again.
    """

    def distrust(shard: int, error: RowError) -> None:
        if not taking.may_distrust(stored, shard):
            raise error
        taking.distrust(stored, shard)

    rows = look.finish(distrust)
    if rows is None:
        return None
    never = taking.forget_unwritten(stored, rows)
    own, keeping = stored.shards.of(taking.lane), stored.placement.keeping
    others = [
        shard
        for shard, there in taking.trusted.items()
        if not own.has_all(shard, there.rows, int(taking.held[shard]), shard in keeping)
    ]
    if not others:
        return rows
    # Another look decides anew which rows were never written, so undo what this one noted.
    taking.written.note(never.table, never.ordinal)
    for shard in others:
        if not taking.may_distrust(stored, shard):
            raise _lost_rows(stored, taking, shard)
        taking.distrust(stored, shard)
    return None


def _lost_rows(stored: StoredRows, taking: _Taking, shard: int) -> CacheError:
    there, must, url = taking.trusted[shard].rows, taking.held[shard], stored.shards.urls[shard]
    if not stored.placement.r:
        return StoreError(f"store {url}: lost rows of lane {taking.lane}: has {there} of {must}; {REMEDY}")
    return CacheError(
        f"store {url}: has {there} rows and parity rows of lane {taking.lane}, but {must} were written to it: it lost rows; {REMEDY}"
    )


def _begin(stored: StoredRows, log: BatchLog | None, takings: Sequence[_Taking], on_action: Callable[[str], None]) -> None:
    """Write the new owner's opening (empty) batch to every live shard.

    A shard that is not trusted with a lane is emptied of the lane, to be rebuilt. Nothing else is
    written: without parity, the holder of another replica of the lane takes as stored what its
    schedule says.

    Args:
        log: None without parity.
        takings: the lanes that are taken over.
        on_action: as `take_over_lost` has it.
    """
    writes: list[tuple[int, Write]] = []
    emptied: dict[int, list[tuple[bytes | str, ...]]] = {}
    for taking in takings:
        own = stored.shards.of(taking.lane)
        if log is not None:
            # The log holds the empty record before the first marker leaves.
            log.hold(taking.lane, LoggedBatch.empty(taking.number, taking.batch.number, taking.held + own.leftover))
        for shard in stored.placement.live:
            if shard in stored.shards.lost:
                continue
            there = taking.trusted.get(shard)
            # A shard that is not trusted is emptied, and its marker says `rebuilding`, so no reader
            # trusts it.
            if there is None:
                emptied.setdefault(shard, []).append(("UNLINK", stored.key(taking.lane, shard)))
                own.migrated[shard] = None
            own.held[shard] = there.rows if there is not None and there.marked else None
            marker = Marker(taking.number, taking.number, rebuilding=there is None)
            writes.append((taking.lane, stored.write(taking.lane, shard, *NO_ROWS, marker, 0)))
    if log is not None:
        on_action("empty record held")
    if emptied:
        stored.store.ask(emptied)  # a shard that fails here fails again below
    _attempt(stored, takings, [], [write for _, write in writes])
    on_action("marker written")
    for lane, write in writes:
        if write.shard in stored.shards.lost:
            continue
        if write.surprise is not None:
            what = f"store {stored.shards.urls[write.shard]}: lost rows of lane {lane}: {write.surprise}"
            stored.go_without(write.shard, StoreError(what))
            stored.shards.check_covered()
            continue
        stored.note(lane, write)


# The reply to an HMGET of the marker and a row if neither exists.
_NOTHING_THERE = b"*2\r\n$-1\r\n$-1\r\n"


def warm_up_takeover() -> None:
    """Compile the kernels of a takeover, or load them from numba's cache, once in a process.

    Loading takes about 0.1 s; compiling, where nothing is cached on the machine, takes about 20 s.
    """
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
