"""How far a lane has moved, as who takes it over finds it, and the chunk that its owner left half moved (docs/protocol.md, Rows move)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from foreload.cache.client.resp import MARKER, MIGRATED
from foreload.cache.client.store import COMMAND_ROWS, Command
from foreload.cache.errors import StoreError
from foreload.cache.parity.migrating_rows import migrating_rows
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.fence import Found
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.migrated import ALL, Migrated, deletion
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_table import cursor_place
from foreload.cache.rows.fields import words


@dataclass(frozen=True, slots=True)
class Taking:
    """Who takes a lane over. term: its own. number: of the last write-back batch that the lane's log, or the run, knows of.

    given: int64 [tables], all ordinals below which a row may have been written.
    """

    term: int
    number: int
    given: np.ndarray


@dataclass(slots=True)
class Halfway:
    """How far a lane has moved by what its shards say. cursor: of the lane; begin, end, targets: of the last chunk, begin None where
    there was none; term: of its owner.

    stale: shards that say what they cannot say by now. unfinished: whose part of the last chunk is not done; undone: those with copies of it where no
    shard has it done, so that it did not come to pass.
    """

    cursor: int
    begin: int | None = None
    end: int = 0
    term: int = 0
    targets: tuple[int, ...] = ()
    stale: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    undone: list[int] = field(default_factory=list)


def halfway(version: int, found: Mapping[int, Found], number: int) -> Halfway:
    """What shards say of a move to a placement of this version, put together. found: what those have that can be trusted otherwise.

    number: of the last write-back batch that the lane's log, or the run, knows of. Raises StoreError for what a later placement's move left.
    """
    said = {shard: there.migrated for shard, there in found.items()}
    if any(one is not None and one.version > version for one in said.values()):
        raise StoreError(
            "store: rows have moved by a later placement than the run's; RUN/placement.json is not the run's last: put that one back"
        )
    mine = {shard: own for shard, one in said.items() if (own := _of_this(version, one, number)) is not None}
    others = [shard for shard in found if shard not in mine]
    last = max((one.place for one in mine.values()), default=(0, 0))
    latest = [one for one in mine.values() if one.place == last]
    chunk = next((one for one in latest if one.begin < one.end), None)
    if chunk is None:
        # The last word is that of a takeover: there may be copies that it has not come to undo.
        half = next((one for one in mine.values() if one.copied and one.begin == last[1] and one.number == number), None)
        at = (
            Halfway(last[1], stale=others)
            if half is None
            else Halfway(last[1], half.begin, half.end, half.term, half.targets, others)
        )
        for shard, one in mine.items():
            if half is not None and (one.copied, one.begin, one.end) == (True, half.begin, half.end):
                at.undone.append(shard)
            elif one.copied or one.end != at.cursor:
                at.stale.append(shard)
        return at
    done = any(not one.copied for one in latest)
    at = Halfway(chunk.end if done else chunk.begin, chunk.begin, chunk.end, chunk.term, chunk.targets, others)
    whole = Marker(chunk.number, chunk.number)
    for shard, one in mine.items():
        if one.place == last and not one.copied:
            continue
        # A batch after the chunk began only when every shard had it done.
        if chunk.number != number or found[shard].marker != whole:
            at.stale.append(shard)
        elif one.place == last:
            (at.unfinished if done else at.undone).append(shard)
        elif one.copied or one.end != chunk.begin or (done and shard in chunk.targets):
            at.stale.append(shard)
        elif done:
            at.unfinished.append(shard)
    return at


def _of_this(version: int, one: Migrated | None, number: int) -> Migrated | None:
    """What a shard says of a move to a placement of this version: where the one before ended, this begins. None for one that says neither.

    Moves change no number of a batch, so that what a server says that came back with what it had in the middle of another move looks right otherwise.
    """
    if one is not None and one.version == version:
        return one
    if version == 1 if one is None else one.version == version - 1 and complete(one):
        return Migrated(version, 0, 0, 0, False, number, 0)
    return None


def complete(one: Migrated) -> bool:
    """Whether all of a lane has moved."""
    return one.end == ALL and not one.copied


def strangers(placement: Placement, found: Mapping[int, Found]) -> list[int]:
    """The shards that do not say that all of a lane is where a placement has it by which nothing moves any more."""
    if not placement.version:
        return []
    said = {shard: there.migrated for shard, there in found.items()}
    return [shard for shard, one in said.items() if one is None or one.version != placement.version or not complete(one)]


def agreed(placement: Placement, found: Mapping[int, Found], number: int) -> Halfway:
    """How far a lane has moved: the furthest by which no more shards are stale than parity covers, with those that cannot be trusted otherwise.

    An owner before may have gone on where the next one did not reach: what it alone says is then not what counts. found, number: as in `halfway`.
    """
    spared = placement.r - (len(placement.live) - len(found))
    first = at = halfway(placement.version, found, number)
    left = dict(found)
    while len(at.stale) + len(found) - len(left) > spared:
        ones = {shard: _of_this(placement.version, there.migrated, number) for shard, there in left.items()}
        said = {shard: (-1, 0) if one is None else one.place for shard, one in ones.items()}
        furthest = max(said.values())
        left = {shard: there for shard, there in left.items() if said[shard] != furthest}
        if not left:
            return first
        at = halfway(placement.version, left, number)
    at.stale += [shard for shard in found if shard not in left]
    return at


def stamp_of_nothing(stored: StoredRows, lane: int, term: int) -> Migrated | None:
    """What the shards say of a lane of which they have nothing; None where rows never moved."""
    placement = stored.placement
    if not placement.version:
        return None
    at = int(stored.shards.of(lane).places.migrated) if placement.migrating else ALL
    return Migrated(placement.version, term, at, at, False, 0, 0)


def counted(there: Found, by_log: int) -> int:
    """How many rows and parity rows a shard must have that is as its marker says. by_log: as the log has it, which knows of no move since."""
    migrated, marker = there.migrated, there.marker
    if migrated is not None and marker.parity == marker.data == migrated.number:
        return migrated.held
    return by_log


def finish_migration(
    stored: StoredRows,
    lane: int,
    found: dict[int, Found],
    taking: Taking,
    lose: Callable[[int, StoreError], None],
    by_log: Callable[[int], int] | None = None,
) -> list[int]:
    """Find how far a lane has moved, and bring the last chunk to its end, or back, on every shard; the lane is fenced there.

    Then every shard records it in the new owner's name: one that this does not reach may have done more, or less, and the next owner must tell
    it from these. found: by shard, what the fence found, of those that can be trusted otherwise; it is brought up to date. lose: called for a shard
    that fails. by_log: how many rows a shard has by the log once it has its last batch; None: as many as it has. Returns the shards that are stale.
    Raises StoreError.
    """
    own, placement = stored.shards.of(lane), stored.placement
    for shard, one in found.items():
        own.migrated[shard] = one.migrated
    if not placement.migrating:
        return strangers(placement, {shard: one for shard, one in found.items() if taking.number and not one.marker.rebuilding})
    _join(stored, lane, found, taking, lose)
    trusted = {shard: one for shard, one in found.items() if not one.marker.rebuilding}
    at = agreed(placement, trusted, taking.number)
    own.places.migrated = np.uint64(at.cursor)
    _finish_chunk(stored, lane, at, found, taking, lose, by_log)
    stamps: dict[int, list[Command]] = {}
    for shard in trusted.keys() & found.keys() - set(at.stale):
        recorded = found[shard].migrated
        held = found[shard].rows if by_log is None else by_log(shard)
        if recorded is not None and recorded.version == placement.version and recorded.number == taking.number:
            held = recorded.held
        stamp = Migrated(placement.version, taking.term, at.cursor, at.cursor, False, taking.number, held)
        own.migrated[shard] = stamp
        found[shard] = replace(found[shard], migrated=stamp)
        stamps[shard] = [("HSET", stored.key(lane, shard), MIGRATED, stamp.stored())]
    _ask(stored, stamps, found, lose)
    return at.stale


def _finish_chunk(
    stored: StoredRows,
    lane: int,
    at: Halfway,
    found: dict[int, Found],
    taking: Taking,
    lose: Callable[[int, StoreError], None],
    by_log: Callable[[int], int] | None,
) -> None:
    """Delete what the last chunk's owner has left: rows where they were, or copies."""
    if at.begin is None or not (at.unfinished or at.undone):
        return
    leaving = _names(stored, lane, at, taking.given)[bool(at.undone)]
    names = {shard: leaving.get(shard, np.empty(0, np.uint64)) for shard in [*at.unfinished, *at.undone]}
    there, failures = _present(stored, lane, names)
    commands: dict[int, list[Command]] = {}
    version = stored.placement.version
    for shard, present in there.items():
        before = counted(found[shard], found[shard].rows if by_log is None else by_log(shard))
        held = before - len(present)
        if at.undone:
            after = Migrated(version, taking.term, at.begin, at.begin, False, taking.number, held)
        else:
            # It is the chunk's own end, whoever brings it about.
            after = Migrated(version, at.term, at.begin, at.end, False, taking.number, held, at.targets)
        found[shard] = replace(found[shard], rows=found[shard].rows - len(present), migrated=after)
        commands[shard] = deletion(stored.key(lane, shard), present, None, after)
    _ask(stored, commands, found, lose)
    for shard, error in failures.items():
        found.pop(shard, None)
        lose(shard, error)


def _ask(
    stored: StoredRows, commands: dict[int, list[Command]], found: dict[int, Found], lose: Callable[[int, StoreError], None]
) -> None:
    for shard, error in stored.store.ask(commands)[1].items():
        found.pop(shard, None)
        lose(shard, error)


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


def joins(stored: StoredRows, found: Mapping[int, Found]) -> list[int]:
    """The shards that come in, and that no owner before has come to: nothing of a lane is there, and nothing of it has moved. found: by shard."""
    said = [there.migrated for there in found.values() if there.migrated is not None]
    if any(one.version == stored.placement.version and one.end for one in said):
        return []
    return [shard for shard in stored.placement.joining if shard in found and not found[shard].marked and not found[shard].rows]


def _join(
    stored: StoredRows, lane: int, found: dict[int, Found], taking: Taking, lose: Callable[[int, StoreError], None]
) -> None:
    """Have shards that come in take part."""
    marker = Marker(taking.number, taking.number)
    stamp = Migrated(stored.placement.version, taking.term, 0, 0, False, taking.number, 0)
    coming = joins(stored, found)
    commands: dict[int, list[Command]] = {
        shard: [("HSET", stored.key(lane, shard), MARKER, marker.stored(), MIGRATED, stamp.stored())] for shard in coming
    }
    _ask(stored, commands, found, lose)
    for shard in coming:
        if shard in found:
            found[shard] = replace(found[shard], marker=marker, marked=True, migrated=stamp)


def _names(stored: StoredRows, lane: int, at: Halfway, given: np.ndarray) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """The fields, uint64 [n], of all rows and parity rows that there may be in the last chunk: by where they were, and by where they go."""
    by_source: dict[int, list[np.ndarray]] = {}
    by_target: dict[int, list[np.ndarray]] = {}
    if at.begin is not None and (at.unfinished or at.undone):
        stripes, shards = stored.lane_stripes(lane, given), stored.placement.shard_count
        (table, first), (last_table, last) = cursor_place(at.begin), cursor_place(at.end)
        while table <= last_table and table < len(stored.layouts):
            end = last if table == last_table else -(-int(given[table]) // stripes.k)
            moving = migrating_rows(stripes, table, first, COMMAND_ROWS, shards, end)
            for shard in np.unique(moving.source).tolist():
                by_source.setdefault(shard, []).append(moving.fields[moving.source == shard])
            for shard in np.unique(moving.target).tolist():
                by_target.setdefault(shard, []).append(moving.fields[moving.target == shard])
            table, first = (table + 1, 0) if moving.whole else (table, moving.end)
    return tuple({shard: np.concatenate(parts) for shard, parts in one.items()} for one in (by_source, by_target))  # type: ignore[return-value]
