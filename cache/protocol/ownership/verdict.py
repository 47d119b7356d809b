"""Which store shards have what a lane must have there, by what was found: pure (docs/protocol.md, Takeover).

Whoever opens a lane goes by this: one who goes on with a stopped run, one who finishes a dead owner's batch, one who takes over from a replica, and a
reader.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import LoggedBatch
from foreload.cache.protocol.shards.fence import Found
from foreload.cache.protocol.shards.marker import ALL, Marker, Migrated


@dataclass(frozen=True, slots=True)
class Expect:
    """What is known of a lane's write-back batches before its store shards are looked at.

    number: of the last batch. numbers: those at which a shard may be, with its parity and with its data. held: int64 [shards, 3], how many rows and
    parity rows a shard has before batch `number`, with its parity, and with its data; None if no log says so.
    """

    number: int
    numbers: Container[int]
    held: np.ndarray | None = None

    @classmethod
    def stopped(cls, number: int) -> Expect:
        """Of a lane whose owner stopped cleanly: every shard has this batch."""
        return cls(number, (number,))

    @classmethod
    def logged(cls, batch: LoggedBatch, released: int = 0) -> Expect:
        """Of a lane whose owner died: shards have the log's batch, or the one before, if not all were known to have `released` by then."""
        return cls(batch.number, [number for number in (batch.before, batch.number) if number >= released], batch.held)

    def rows(self, shard: int, marker: Marker) -> int | None:
        """Return how many rows and parity rows a shard with this marker must have, or None if no log says so."""
        if self.held is None:
            return None
        stage = int(marker.parity == self.number) + int(marker.data == self.number)
        # Of a shard that came in since, the log knows nothing: what that has, it got by a migration, which says so.
        return int(self.held[shard, stage]) if shard < len(self.held) else 0


@dataclass(slots=True)
class Halfway:
    """How far a lane has moved by what its shards say. cursor: of the lane; chunk: the last one, as a shard records it, None where there was none.

    stale: shards that say what they cannot say by now. unfinished: whose part of the last chunk is not done; undone: those with copies of it where no
    shard has it done, so that it did not come to pass.
    """

    cursor: int
    chunk: Migrated | None = None
    stale: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    undone: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """Which shards of a lane can be trusted.

    trusted: what was found there, by shard; who finishes a migration's chunk or plays a batch there brings it up to date. coming: those of them that
    join by a migration, and have nothing yet, not even a marker. refused: shards with another marker than expected. stale: shards that say of a
    migration what they cannot say by now. move: how far the lane has moved; None if nothing moves.
    """

    expect: Expect
    trusted: dict[int, Found]
    coming: list[int]
    refused: list[int]
    stale: list[int]
    move: Halfway | None

    def doubtful(self) -> list[int]:
        """Return the trusted shards that have another number of rows than the log says."""
        by_log = {shard: self.expect.rows(shard, there.marker) for shard, there in self.trusted.items()}
        return [
            shard
            for shard, rows in by_log.items()
            if rows is not None and self.trusted[shard].rows != counted(self.trusted[shard], rows)
        ]


def judge(placement: Placement, found: Mapping[int, Found], expect: Expect) -> Verdict:
    """Return which shards of a lane can be trusted. found: what is there, by shard, of those that could be asked.

    Raises StoreError if rows have moved by a later placement than the run's.
    """
    coming, whole = joins(placement, found), Marker(expect.number, expect.number)
    trusted, refused = {}, []
    for shard, there in found.items():
        if shard in coming:
            there = replace(there, marker=whole, migrated=Migrated(placement.version, 0, 0, 0, False, expect.number, 0))
        marker = there.marker
        if marker.rebuilding or marker.parity not in expect.numbers or marker.data not in expect.numbers:
            refused.append(shard)
        else:
            trusted[shard] = there
    move = agreed(placement, trusted, expect.number) if placement.migrating else None
    if move is not None:
        stale = move.stale
    else:
        stale = strangers(placement, trusted) if expect.number else []
    trusted = {shard: there for shard, there in trusted.items() if shard not in stale}
    return Verdict(expect, trusted, coming, refused, stale, move)


def joins(placement: Placement, found: Mapping[int, Found]) -> list[int]:
    """The shards that come in, and that no owner before has come to: nothing of a lane is there, and nothing of it has moved. found: by shard."""
    said = [there.migrated for there in found.values() if there.migrated is not None]
    if any(one.version == placement.version and one.end for one in said):
        return []
    return [shard for shard in placement.joining if shard in found and not found[shard].marked and not found[shard].rows]


def counted(there: Found, by_log: int) -> int:
    """How many rows and parity rows a shard must have that is as its marker says. by_log: as the log has it, which knows of no move since."""
    migrated, marker = there.migrated, there.marker
    if migrated is not None and marker.parity == marker.data == migrated.number:
        return migrated.held
    return by_log


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
        at = Halfway(last[1], half, others)
        for shard, one in mine.items():
            if half is not None and (one.copied, one.begin, one.end) == (True, half.begin, half.end):
                at.undone.append(shard)
            elif one.copied or one.end != at.cursor:
                at.stale.append(shard)
        return at
    done = any(not one.copied for one in latest)
    at = Halfway(chunk.end if done else chunk.begin, chunk, others)
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
    while left and len(at.stale) + len(found) - len(left) > spared:
        ones = {shard: _of_this(placement.version, there.migrated, number) for shard, there in left.items()}
        said = {shard: (-1, 0) if one is None else one.place for shard, one in ones.items()}
        furthest = max(said.values())
        left = {shard: there for shard, there in left.items() if said[shard] != furthest}
        if not left:
            return first
        at = halfway(placement.version, left, number)
    at.stale += [shard for shard in found if shard not in left]
    return at
