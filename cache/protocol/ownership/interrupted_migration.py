"""The chunk that a lane's owner left half moved: who takes the lane over brings it to its end, or back (docs/protocol.md, Rows move)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from foreload.cache.client.resp import MARKER, MIGRATED
from foreload.cache.client.store import COMMAND_ROWS, Command
from foreload.cache.errors import StoreError
from foreload.cache.parity.selecting import select_rows
from foreload.cache.protocol.ownership.verdict import Halfway, Verdict, counted
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.migrated import ALL, Migrated, deletion
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_table import cursor_place
from foreload.cache.rows.fields import words


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
