"""Who owns lanes on the store, and what an owner, or a reader, finds there: each lane's fence epoch, and the shards that lack rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreload.cache.client.resp import MARKER, MIGRATED
from foreload.cache.client.store import COMMAND_ROWS, Command, Store
from foreload.cache.errors import ForeignKey, StoreAuth, StoreError, StoreFull
from foreload.cache.parity.shard_contents import select_rows
from foreload.cache.protocol.ownership.verdict import Expect, Halfway, Verdict, counted, judge
from foreload.cache.protocol.shards.fence import Found, fence_everywhere, foreign_key, look_at
from foreload.cache.protocol.shards.marker import ALL, Marker, Migrated, deletion
from foreload.cache.protocol.shards.namespace import are_of, is_of
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_table import cursor_place
from foreload.cache.rows.row_bytes import words


def stamp_of_nothing(stored: StoredRows, lane: int, term: int) -> Migrated | None:
    """What the shards say of a lane of which they have nothing; None where rows never moved."""
    placement = stored.placement
    if not placement.version:
        return None
    at = int(stored.shards.of(lane).places.migrated) if placement.migrating else ALL
    return Migrated(placement.version, term, at, at, False, 0, 0)


def finish_migration(stored: StoredRows, lane: int, verdict: Verdict, term: int, given: np.ndarray) -> None:
    """Bring the last chunk of a migration to its end, or back, on every shard that is trusted with a lane; the lane is fenced there.

    Then every shard records how far the lane has moved in the new owner's name: one that this does not reach may have done more, or less, and the
    next owner must tell it from these. A shard that fails is trusted no more.

    Args:
        term: of the new owner.
        given: int64 [tables], all ordinals below which a row may have been written.

    Raises:
        StoreError: without parity, a shard failed.
    """
    own, move, trusted = stored.shards.of(lane), verdict.move, verdict.trusted
    for shard, there in trusted.items():
        own.migrated[shard] = there.migrated
    if move is None:
        return
    _join(stored, lane, verdict, term)
    own.places.migrated = np.uint64(move.cursor)
    if move.chunk is not None and (move.unfinished or move.undone):
        _finish_chunk(stored, lane, verdict, move, move.chunk, _names(stored, lane, move, move.chunk, given), term)
    stamps: dict[int, list[Command]] = {}
    version, number = stored.placement.version, verdict.expect.number
    for shard, there in trusted.items():
        held, recorded = _rows_by_log(verdict, shard), there.migrated
        if recorded is not None and recorded.version == version and recorded.number == number:
            held = recorded.held
        stamp = Migrated(version, term, move.cursor, move.cursor, False, number, held)
        own.migrated[shard] = stamp
        trusted[shard] = replace(there, migrated=stamp)
        stamps[shard] = [("HSET", stored.key(lane, shard), MIGRATED, stamp.stored())]
    _ask(stored, stamps, verdict)


def _rows_by_log(verdict: Verdict, shard: int) -> int:
    """How many rows and parity rows a shard has once it has the last batch: by the log, or if that does not say, as many as it has."""
    number, there = verdict.expect.number, verdict.trusted[shard]
    by_log = verdict.expect.rows(shard, Marker(number, number))
    return there.rows if by_log is None else by_log


def _join(stored: StoredRows, lane: int, verdict: Verdict, term: int) -> None:
    """Have shards that come in take part."""
    number, trusted = verdict.expect.number, verdict.trusted
    marker, stamp = Marker(number, number), Migrated(stored.placement.version, term, 0, 0, False, number, 0)
    coming = [shard for shard in verdict.coming if shard in trusted]
    commands: dict[int, list[Command]] = {
        shard: [("HSET", stored.key(lane, shard), MARKER, marker.stored(), MIGRATED, stamp.stored())] for shard in coming
    }
    for shard in coming:
        trusted[shard] = replace(trusted[shard], marked=True, migrated=stamp)
    _ask(stored, commands, verdict)


def _finish_chunk(
    stored: StoredRows, lane: int, verdict: Verdict, move: Halfway, chunk: Migrated, leaving: Mapping[int, np.ndarray], term: int
) -> None:
    """Delete what the last chunk's owner has left: rows where they were, or copies. leaving: uint64 [n] by shard, the fields that may be there."""
    trusted, number = verdict.trusted, verdict.expect.number
    names = {shard: leaving.get(shard, np.empty(0, np.uint64)) for shard in [*move.unfinished, *move.undone]}
    there, failures = _present(stored, lane, names)
    commands: dict[int, list[Command]] = {}
    for shard, present in there.items():
        held = counted(trusted[shard], _rows_by_log(verdict, shard)) - len(present)
        if move.undone:
            after = Migrated(chunk.version, term, chunk.begin, chunk.begin, False, number, held)
        else:
            # It is the chunk's own end, whoever brings it about.
            after = replace(chunk, copied=False, number=number, held=held)
        trusted[shard] = replace(trusted[shard], rows=trusted[shard].rows - len(present), migrated=after)
        commands[shard] = deletion(stored.key(lane, shard), present, None, after)
    _ask(stored, commands, verdict)
    _go_without(stored, failures, verdict)


def _ask(stored: StoredRows, commands: Mapping[int, list[Command]], verdict: Verdict) -> None:
    _go_without(stored, stored.store.ask(commands)[1], verdict)


def _go_without(stored: StoredRows, failures: Mapping[int, StoreError], verdict: Verdict) -> None:
    for shard, error in failures.items():
        verdict.trusted.pop(shard, None)
        stored.go_without(shard, error)


def _present(
    stored: StoredRows, lane: int, names: Mapping[int, np.ndarray]
) -> tuple[dict[int, np.ndarray], dict[int, StoreError]]:
    """Which of these fields of a lane are there, by shard, and why there is nothing of the others."""
    parts = {
        shard: [own[first : first + COMMAND_ROWS] for first in range(0, len(own), COMMAND_ROWS)] for shard, own in names.items()
    }
    asked: dict[int, list[Command]] = {
        shard: [("HMGET", stored.key(lane, shard), *words(part)) for part in of_shard] for shard, of_shard in parts.items()
    }
    answers, failures = stored.store.ask(asked)
    present = {}
    for shard, values in answers.items():
        mask = [value is not None for answer in values if isinstance(answer, list) for value in answer]
        present[shard] = names[shard][np.array(mask, bool)]
    return present, failures


def _names(stored: StoredRows, lane: int, move: Halfway, chunk: Migrated, given: np.ndarray) -> dict[int, np.ndarray]:
    """The fields, uint64 [n], of all rows and parity rows that a chunk may leave: where they were, or, if it is undone, where they go."""
    parts: dict[int, list[np.ndarray]] = {}
    stripes, shards = stored.lane_stripes(lane, given), stored.placement.shard_count
    (table, first), (last_table, last) = cursor_place(chunk.begin), cursor_place(chunk.end)
    while table <= last_table and table < len(stored.layouts):
        end = last if table == last_table else -(-int(given[table]) // stripes.k)
        moving = select_rows(stripes, table, first, COMMAND_ROWS, shards, end=end)
        at = moving.target if move.undone else moving.source
        for shard in np.unique(at).tolist():
            parts.setdefault(shard, []).append(moving.fields[at == shard])
        table, first = (table + 1, 0) if moving.whole else (table, moving.end)
    return {shard: np.concatenate(of_shard) for shard, of_shard in parts.items()}


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns the lanes: its term, and the identity that a server of the run has noted, None where none is noted."""

    term: int = 0
    identity: Mapping[str, Any] | None = None

    def has(self, store: Store, namespace: str, shard: int, at: int | None = None) -> bool:
        """Whether the store's shard (its number `at` of the Store, the same by default) is noted as shard `shard` of the owner's run."""
        return self.identity is None or is_of(store, namespace, self.identity, shard, at)


UNFENCED = Ownership()
_REFUSALS = (ForeignKey, StoreFull, StoreAuth)  # of a shard that answers


@dataclass(frozen=True, slots=True)
class FoundLanes:
    """What lanes have on the store shards.

    lanes: by lane and shard. absent: why nothing is known of the other shards. failed: those of them that neither refused what they were asked, nor
    were down before, but stopped answering meanwhile.
    """

    lanes: Mapping[int, Mapping[int, Found]]
    absent: Mapping[int, StoreError]
    failed: Collection[int] = ()


def look(store: Store, namespace: str, lanes: Collection[int]) -> FoundLanes:
    """Look at lanes on every store shard, and change nothing. Raises StoreError for a shard that fails meanwhile."""
    found: dict[int, dict[int, Found]] = {lane: {} for lane in lanes}
    absent = store.down
    for shard in store.used:
        by_lane = {} if shard in absent else look_at(store, shard, namespace, list(lanes))
        if (foreign := foreign_key(by_lane)) is not None:
            absent[shard] = foreign
            store.give_up(shard, foreign)
            continue
        for lane, there in by_lane.items():
            found[lane][shard] = there
    return FoundLanes(found, absent)


def fence_lanes(stored: StoredRows, lanes: Collection[int], ownership: Ownership) -> FoundLanes:
    """Fence lanes on every store shard, on all shards at once. The shards must be noted as the run's. Raises Fenced, StoreError."""
    store, name, shards, down = stored.store, stored.namespace, stored.placement.live, stored.store.down
    absent: dict[int, StoreError] = {}
    if ownership.identity is not None:
        own = are_of(store, name, ownership.identity)
        absent = {
            shard: StoreError(f"store {stored.shards.urls[shard]}: is not shard {shard} of namespace {name}; check --store")
            for shard in shards
            if not own.get(shard, False)
        }
    absent |= store.down
    found = {}
    for lane in lanes:
        epochs = stored.shards.of(lane).epochs
        asked = {shard: epochs[shard] for shard in shards if shard not in absent}
        found[lane], failures = fence_everywhere(store, list(asked), name, lane, ownership.term, asked)
        absent |= failures
        for shard, there in found[lane].items():
            epochs[shard] = there.epoch
    failed = [shard for shard in store.down if shard not in down and not isinstance(absent[shard], _REFUSALS)]
    for shard, error in absent.items():
        if isinstance(error, ForeignKey):
            store.give_up(shard, error)
    known = {lane: {shard: there for shard, there in of_lane.items() if shard not in absent} for lane, of_lane in found.items()}
    return FoundLanes(known, absent, failed)


def take_over(stored: StoredRows, ownership: Ownership, last_batches: Mapping[int, int]) -> None:
    """Fence lanes of a stopped run on every store shard, and lose (in stored.shards) those that do not have all of their rows.

    stored must know the lanes' stripes. last_batches: of each lane the number of its last write-back batch. Raises Fenced, StoreError, and RowsLost
    where parity does not cover what is lost.
    """
    found = fence_lanes(stored, last_batches, ownership)
    lose_absent(stored, found)
    verdicts = {}
    for lane, number in last_batches.items():
        verdict = verdicts[lane] = judge(stored.placement, found.lanes[lane], Expect.stopped(number))
        finish_migration(stored, lane, verdict, ownership.term, stored.stripes_of(lane).written.counts)
        for shard in verdict.stale:
            stored.go_without(shard, StoreError(_lacks_rows(stored, shard)))
    doubtful: dict[int, None] = {}  # shards with the right marker and another number of rows; a dict keeps them in order
    for lane, verdict in verdicts.items():
        known = {**found.lanes[lane], **verdict.trusted}
        there = {shard: one for shard, one in known.items() if shard not in stored.shards.lost}
        if verdict.expect.number:
            doubtful |= dict.fromkeys(_count(stored, lane, verdict, there))
        else:
            _empty(stored, lane, there, ownership.term)
    stored.shards.check_covered()
    for shard in doubtful:
        # One that is too many is kept: the rows that it lacks are decoded when they are asked for.
        stored.lose(shard, _lacks_rows(stored, shard))


def _count(stored: StoredRows, lane: int, verdict: Verdict, found: Mapping[int, Found]) -> list[int]:
    """Lose the shards that are not trusted with a lane, and compare how many rows the others have with how many a stopped run must have there.

    found: what there is, by shard. Returns the shards with another number. Without parity, raises StoreError for these, too.
    """
    own, expected, number, doubtful = stored.shards.of(lane), stored.expected(lane), verdict.expect.number, []
    for shard, there in found.items():
        has_all = own.has_all(shard, there.rows, int(expected[shard]), shard in stored.placement.keeping)
        must = int(expected[shard] + own.leftover[shard])
        if there.marked:
            own.held[shard] = must
        if not stored.placement.r and not (has_all and shard in verdict.trusted):
            raise StoreError(
                f"store {stored.shards.urls[shard]}: lost rows of lane {lane}: has {there.rows} of {must}, up to write-back "
                f"batch {there.marker} of {number}; restore it and --resume, or start again with --overwrite"
            )
        if shard not in verdict.trusted:
            lose(stored, shard)
        elif not has_all:
            doubtful.append(shard)
    return doubtful


def _empty(stored: StoredRows, lane: int, found: Mapping[int, Found], term: int) -> None:
    """Begin with a lane that has no batch yet: what is there, an earlier owner wrote between the removal of its rows and the fence."""
    own, stamp = stored.shards.of(lane), stamp_of_nothing(stored, lane, term)
    for shard, there in found.items():
        if there.marked or there.rows:
            stored.store.command(shard, "UNLINK", stored.key(lane, shard))
            own.migrated[shard] = None
        if stamp is not None:
            stored.store.command(shard, "HSET", stored.key(lane, shard), MIGRATED, stamp.stored())
            own.migrated[shard] = stamp


def lose_absent(stored: StoredRows, found: FoundLanes) -> None:
    """Go on without the shards of which nothing is known. Raises the error of one that stopped answering; without parity, of any."""
    for shard, error in found.absent.items():
        if shard in found.failed or not stored.placement.r:
            raise error
        lose(stored, shard)


def lose(stored: StoredRows, shard: int) -> None:
    """Go on without a shard that does not answer, or lacks rows."""
    failure = stored.store.down.get(shard)
    stored.shards.lose(shard, _lacks_rows(stored, shard) if failure is None else str(failure))


def _lacks_rows(stored: StoredRows, shard: int) -> str:
    return f"store {stored.shards.urls[shard]}: lacks rows of the run"


def find_rows(stored: StoredRows, last_batches: Sequence[int]) -> None:
    """What `take_over` finds, for a reader, which fences nothing: each lane's fence epoch on every store shard; those that lack rows are lost.

    last_batches: as for `stale_shards`. Without parity a shard that lacks rows is noticed when it is read. Raises StoreError, RowsLost.
    """
    found = look(stored.store, stored.namespace, range(len(last_batches)))
    lose_absent(stored, found)
    for lane, number in enumerate(last_batches):
        own = stored.shards.of(lane)
        for shard, there in found.lanes[lane].items():
            own.epochs[shard] = there.epoch
        verdict = judge(stored.placement, found.lanes[lane], Expect.stopped(number))
        if verdict.move is not None:
            own.places.migrated = np.uint64(verdict.move.cursor)
        for shard in [*verdict.refused, *verdict.stale] if stored.placement.r else ():
            lose(stored, shard)
    stored.shards.check_covered()


def stale_shards(store: Store, namespace: str, last_batches: Sequence[int]) -> list[int]:
    """The store shards that cannot be reached, or whose marker of a lane is not that of the lane's write-back batch `last_batches[lane]`."""
    found = look(store, namespace, range(len(last_batches)))
    wrong = {
        shard
        for lane, number in enumerate(last_batches)
        for shard, there in found.lanes[lane].items()
        if there.marker != Marker(number, number)
    }
    return sorted(wrong | found.absent.keys())
