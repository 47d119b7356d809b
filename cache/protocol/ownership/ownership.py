"""Taking lanes over, and what an owner or a reader finds on the store when it begins.

It finds each lane's fence epoch on every store shard, and the shards that lack rows.
"""

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
    """Return the migration record of a hash that has nothing of a lane.

    Returns None if rows of the run never migrated.
    """
    placement = stored.placement
    if not placement.version:
        return None
    at = int(stored.shards.of(lane).places.migrated) if placement.migrating else ALL
    return Migrated(placement.version, term, at, at, False, 0, 0)


def finish_migration(stored: StoredRows, lane: int, verdict: Verdict, term: int, given: np.ndarray) -> None:
    """Finish the last chunk of a migration, or undo it, on every shard that is trusted with a lane.

    The lane must be fenced on these shards. Afterwards every shard records how far the lane has
    migrated, in the new owner's term: a shard out of this owner's reach may have done more or less
    of the chunk, and the next owner must be able to recognize it. A shard that fails is no longer
    trusted.

    Args:
        term: The new owner's term.
        given: int64 [tables], all ordinals below which a row may have been written.

    Raises:
        StoreError: A shard failed, and the run has no parity.
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
        # The log does not know of migrations. A record made after the last batch says better how
        # many rows the hash has.
        if recorded is not None and recorded.version == version and recorded.number == number:
            held = recorded.held
        stamp = Migrated(version, term, move.cursor, move.cursor, False, number, held)
        own.migrated[shard] = stamp
        trusted[shard] = replace(there, migrated=stamp)
        stamps[shard] = [("HSET", stored.key(lane, shard), MIGRATED, stamp.stored())]
    _ask(stored, stamps, verdict)


def _rows_by_log(verdict: Verdict, shard: int) -> int:
    """Return how many rows and parity rows a shard has once it has the last batch.

    The number is the log's. If the log does not have it, it is the number that the shard has now.
    """
    number, there = verdict.expect.number, verdict.trusted[shard]
    by_log = verdict.expect.rows(shard, Marker(number, number))
    return there.rows if by_log is None else by_log


def _join(stored: StoredRows, lane: int, verdict: Verdict, term: int) -> None:
    """Write the marker and the migration record on the shards that join."""
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
    """Delete the rows that the last chunk's owner left: migrated rows at their source, or copies.

    Args:
        leaving: By shard, uint64 [n], the fields that may exist there and must not.
    """
    trusted, number = verdict.trusted, verdict.expect.number
    names = {shard: leaving.get(shard, np.empty(0, np.uint64)) for shard in [*move.unfinished, *move.undone]}
    there, failures = _present(stored, lane, names)
    commands: dict[int, list[Command]] = {}
    for shard, present in there.items():
        # Only fields that exist are deleted, so the record's count is exact.
        held = counted(trusted[shard], _rows_by_log(verdict, shard)) - len(present)
        if move.undone:
            after = Migrated(chunk.version, term, chunk.begin, chunk.begin, False, number, held)
        else:
            # The chunk ends as its own owner would have ended it, so the record keeps that owner's
            # term.
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
    """Return which of these fields of a lane exist, by shard, and the errors of other shards."""
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
    """Return the fields of all rows and parity rows that a chunk may leave behind.

    They are at the rows' sources or, if the chunk is undone, at their targets.

    Returns:
        uint64 [n], by shard.
    """
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
    """The owner of lanes.

    Attributes:
        term: Its term.
        identity: The identity that the run's servers have in their notes. If None, notes are not
            checked.
    """

    term: int = 0
    identity: Mapping[str, Any] | None = None

    def has(self, store: Store, namespace: str, shard: int, at: int | None = None) -> bool:
        """Return whether a shard of the Store is noted as shard `shard` of the owner's run.

        Args:
            at: The number of the shard in the Store. If None, it is `shard`.
        """
        return self.identity is None or is_of(store, namespace, self.identity, shard, at)


UNFENCED = Ownership()
# The errors by which a shard that answers refuses a request.
_REFUSALS = (ForeignKey, StoreFull, StoreAuth)


@dataclass(frozen=True, slots=True)
class FoundLanes:
    """What lanes have on the store shards.

    Attributes:
        lanes: By lane and shard.
        absent: The shards of which nothing is known, with the reason.
        failed: Those of `absent` that stopped answering just now. They did not refuse a request and
            were not down before.
    """

    lanes: Mapping[int, Mapping[int, Found]]
    absent: Mapping[int, StoreError]
    failed: Collection[int] = ()


def look(store: Store, namespace: str, lanes: Collection[int]) -> FoundLanes:
    """Read what lanes have on every store shard, and change nothing.

    Raises:
        StoreError: A shard failed meanwhile.
    """
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
    """Fence lanes on every store shard, on all shards at once.

    Shards that are not noted as the run's are absent from the result, like those that fail.

    Raises:
        Fenced: An owner of a later term has fenced a lane.
        StoreError: Other fences interfered in every attempt.
    """
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
    # A shard that failed for one lane counts as absent for all.
    known = {lane: {shard: there for shard, there in of_lane.items() if shard not in absent} for lane, of_lane in found.items()}
    return FoundLanes(known, absent, failed)


def take_over(stored: StoredRows, ownership: Ownership, last_batches: Mapping[int, int]) -> None:
    """Fence the lanes of a stopped run on every store shard, and find the shards that lack rows.

    Those shards become lost in `stored.shards`. `stored` must know the lanes' stripes.

    Args:
        last_batches: The number of each lane's last write-back batch.

    Raises:
        Fenced: An owner of a later term has fenced a lane.
        RowsLost: Parity does not cover the lost shards.
        StoreError: A shard stopped answering or, without parity, lacks rows.
    """
    found = fence_lanes(stored, last_batches, ownership)
    lose_absent(stored, found)
    verdicts = {}
    for lane, number in last_batches.items():
        verdict = verdicts[lane] = judge(stored.placement, found.lanes[lane], Expect.stopped(number))
        finish_migration(stored, lane, verdict, ownership.term, stored.stripes_of(lane).written.counts)
        # `finish_migration` has set the lane's cursor. The counts expected below depend on it.
        for shard in verdict.stale:
            stored.go_without(shard, StoreError(_lacks_rows(stored, shard)))
    # Shards with the right marker but the wrong number of rows. A dict keeps them in order.
    doubtful: dict[int, None] = {}
    for lane, verdict in verdicts.items():
        known = {**found.lanes[lane], **verdict.trusted}
        there = {shard: one for shard, one in known.items() if shard not in stored.shards.lost}
        if verdict.expect.number:
            doubtful |= dict.fromkeys(_count(stored, lane, verdict, there))
        else:
            _empty(stored, lane, there, ownership.term)
    stored.shards.check_covered()
    for shard in doubtful:
        # A shard is kept if parity does not cover its loss. The rows that it lacks are decoded when
        # they are read.
        stored.lose(shard, _lacks_rows(stored, shard))


def _count(stored: StoredRows, lane: int, verdict: Verdict, found: Mapping[int, Found]) -> list[int]:
    """Compare the number of rows on each shard with the number that a stopped run must have there.

    Shards that are not trusted with the lane become lost.

    Args:
        found: What there is, by shard.

    Returns:
        The trusted shards with a different number of rows.

    Raises:
        StoreError: Without parity, a shard is not trusted or has a different number of rows.
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
                f"batch {there.marker} of {number}; restore its data and --resume, or start again with --overwrite"
            )
        if shard not in verdict.trusted:
            lose(stored, shard)
        elif not has_all:
            doubtful.append(shard)
    return doubtful


def _empty(stored: StoredRows, lane: int, found: Mapping[int, Found], term: int) -> None:
    """Empty the shards of a lane that has no batch yet.

    Any rows there were written by an earlier owner, after its rows were removed and before the
    fence.
    """
    own, stamp = stored.shards.of(lane), stamp_of_nothing(stored, lane, term)
    for shard, there in found.items():
        if there.marked or there.rows:
            stored.store.command(shard, "UNLINK", stored.key(lane, shard))
            own.migrated[shard] = None
        if stamp is not None:
            stored.store.command(shard, "HSET", stored.key(lane, shard), MIGRATED, stamp.stored())
            own.migrated[shard] = stamp


def lose_absent(stored: StoredRows, found: FoundLanes) -> None:
    """Count the absent shards as lost.

    Raises the error of a shard that stopped answering just now and, without parity, of any.
    """
    for shard, error in found.absent.items():
        if shard in found.failed or not stored.placement.r:
            raise error
        lose(stored, shard)


def lose(stored: StoredRows, shard: int) -> None:
    """Count a shard as lost because it does not answer or lacks rows."""
    failure = stored.store.down.get(shard)
    stored.shards.lose(shard, _lacks_rows(stored, shard) if failure is None else str(failure))


def _lacks_rows(stored: StoredRows, shard: int) -> str:
    return f"store {stored.shards.urls[shard]}: lacks rows of the run"


def find_rows(stored: StoredRows, last_batches: Sequence[int]) -> None:
    """Find what `take_over` finds, for a reader, which fences nothing.

    Sets each lane's fence epoch on every store shard, and counts shards that lack rows as lost.
    Without parity, missing rows are noticed only when they are read.

    Args:
        last_batches: The number of the last write-back batch of each lane, in order.

    Raises:
        RowsLost: Parity does not cover the lost shards.
        StoreError: A shard fails or, without parity, is down.
    """
    found = look(stored.store, stored.namespace, range(len(last_batches)))
    lose_absent(stored, found)
    for lane, number in enumerate(last_batches):
        own = stored.shards.of(lane)
        for shard, there in found.lanes[lane].items():
            own.epochs[shard] = there.epoch
        verdict = judge(stored.placement, found.lanes[lane], Expect.stopped(number))
        # A reader finishes no chunk. It reads by the cursor on which the records agree.
        if verdict.move is not None:
            own.places.migrated = np.uint64(verdict.move.cursor)
        for shard in [*verdict.refused, *verdict.stale] if stored.placement.r else ():
            lose(stored, shard)
    stored.shards.check_covered()


def stale_shards(store: Store, namespace: str, last_batches: Sequence[int]) -> list[int]:
    """Return the store shards that are down or stale.

    A shard is stale if its marker of a lane is not that of the lane's last batch.

    Args:
        last_batches: The number of the last write-back batch of each lane, in order.
    """
    found = look(store, namespace, range(len(last_batches)))
    wrong = {
        shard
        for lane, number in enumerate(last_batches)
        for shard, there in found.lanes[lane].items()
        if there.marker != Marker(number, number)
    }
    return sorted(wrong | found.absent.keys())
