"""Decide which store shards have what a lane must have there (docs/protocol.md, Takeover).

Pure functions on what was found. Everything that opens a lane uses them: the owner that resumes a
stopped run, the owner that finishes a dead owner's batch, the owner that takes over from a replica,
and a reader.
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
    """What is known of a lane's write-back batches before its store shards are read.

    Attributes:
        number: The last batch.
        numbers: The batches at which a shard may be, with its parity and with its data.
        held: int64 [shards, 3], how many rows and parity rows a shard has before batch `number`,
            with its parity, and with its data. None if no log has these numbers.
    """

    number: int
    numbers: Container[int]
    held: np.ndarray | None = None

    @classmethod
    def stopped(cls, number: int) -> Expect:
        """For a lane whose owner stopped cleanly: every shard has this batch."""
        return cls(number, (number,))

    @classmethod
    def logged(cls, batch: LoggedBatch, released: int = 0) -> Expect:
        """For a lane whose owner died: a shard has the log's batch or the one before.

        Args:
            released: The last batch that is known to be released. An earlier one is not accepted.
        """
        return cls(batch.number, [number for number in (batch.before, batch.number) if number >= released], batch.held)

    def rows(self, shard: int, marker: Marker) -> int | None:
        """Return how many rows and parity rows a shard with this marker must have.

        If no log has the number, return None.
        """
        if self.held is None:
            return None
        stage = int(marker.parity == self.number) + int(marker.data == self.number)
        # The log does not know a shard that joined later. What that shard has, it received by a
        # migration, and its migration record says how much.
        return int(self.held[shard, stage]) if shard < len(self.held) else 0


@dataclass(slots=True)
class Halfway:
    """How far a lane has migrated, by what its shards record.

    Attributes:
        cursor: The lane's cursor.
        chunk: The last chunk, as a shard records it, or None.
        stale: The shards with a record that is impossible by now.
        unfinished: The shards on which the last chunk is not done, if it is done on others.
        undone: The shards with copies of the last chunk, if no shard has it done. Their copies must
            be deleted.
    """

    cursor: int
    chunk: Migrated | None = None
    stale: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    undone: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """Which shards can be trusted with a lane.

    Attributes:
        expect: What was expected.
        trusted: What was found on each trusted shard. The functions that finish a chunk or play a
            batch update it.
        coming: The trusted shards that join by a migration and have nothing yet, not even a marker.
        refused: The shards with a marker that was not expected.
        stale: The shards with a migration record that is impossible by now.
        move: How far the lane has migrated, or None if no migration is under way.
    """

    expect: Expect
    trusted: dict[int, Found]
    coming: list[int]
    refused: list[int]
    stale: list[int]
    move: Halfway | None

    def doubtful(self) -> list[int]:
        """Return the trusted shards whose number of rows differs from the log's."""
        by_log = {shard: self.expect.rows(shard, there.marker) for shard, there in self.trusted.items()}
        return [
            shard
            for shard, rows in by_log.items()
            if rows is not None and self.trusted[shard].rows != counted(self.trusted[shard], rows)
        ]


def judge(placement: Placement, found: Mapping[int, Found], expect: Expect) -> Verdict:
    """Return which shards can be trusted with a lane.

    Args:
        found: What was found, by shard, on the shards that could be asked.

    Raises:
        StoreError: Rows have migrated by a later placement than the run's.
    """
    coming, whole = joins(placement, found), Marker(expect.number, expect.number)
    trusted, refused = {}, []
    for shard, there in found.items():
        if shard in coming:
            there = replace(there, marker=whole, migrated=Migrated(placement.version, 0, 0, 0, False, expect.number, 0))
        marker = there.marker
        # A shard that is being rebuilt lacks rows, whatever its numbers say.
        if marker.rebuilding or marker.parity not in expect.numbers or marker.data not in expect.numbers:
            refused.append(shard)
        else:
            trusted[shard] = there
    move = agreed(placement, trusted, expect.number) if placement.migrating else None
    if move is not None:
        stale = move.stale
    else:
        # A lane without any batch has no migration records yet.
        stale = strangers(placement, trusted) if expect.number else []
    trusted = {shard: there for shard, there in trusted.items() if shard not in stale}
    return Verdict(expect, trusted, coming, refused, stale, move)


def joins(placement: Placement, found: Mapping[int, Found]) -> list[int]:
    """Return the shards that join by a migration and have nothing of the lane yet.

    No earlier owner has reached them: they have neither marker nor rows, and no shard records that
    any stripe of the lane has migrated.

    Args:
        found: By shard.
    """
    said = [there.migrated for there in found.values() if there.migrated is not None]
    if any(one.version == placement.version and one.end for one in said):
        return []
    return [shard for shard in placement.joining if shard in found and not found[shard].marked and not found[shard].rows]


def counted(there: Found, by_log: int) -> int:
    """Return how many rows and parity rows a shard with this marker must have.

    Args:
        by_log: The number in the log, which does not know of migrations since.
    """
    migrated, marker = there.migrated, there.marker
    # The migration record was written after the marker's batch, so its count is the newer one.
    if migrated is not None and marker.parity == marker.data == migrated.number:
        return migrated.held
    return by_log


def halfway(version: int, found: Mapping[int, Found], number: int) -> Halfway:
    """Combine what the shards record of the migration to a placement into how far the lane is.

    Args:
        version: The placement's version.
        found: What was found on the shards that can be trusted otherwise.
        number: The last write-back batch that the lane's log, or the run, knows of.

    Raises:
        StoreError: A shard records a migration to a later placement.
    """
    said = {shard: there.migrated for shard, there in found.items()}
    if any(one is not None and one.version > version for one in said.values()):
        raise StoreError(
            "store: rows have migrated by a later placement than RUN/placement.json has; it is not the run's newest: put the newest one back"
        )
    mine = {shard: own for shard, one in said.items() if (own := _of_this(version, one, number)) is not None}
    others = [shard for shard in found if shard not in mine]
    last = max((one.place for one in mine.values()), default=(0, 0))
    latest = [one for one in mine.values() if one.place == last]
    chunk = next((one for one in latest if one.begin < one.end), None)
    if chunk is None:
        # The latest record is a takeover's. Copies may exist that the takeover did not get to
        # delete.
        half = next((one for one in mine.values() if one.copied and one.begin == last[1] and one.number == number), None)
        at = Halfway(last[1], half, others)
        for shard, one in mine.items():
            if half is not None and (one.copied, one.begin, one.end) == (True, half.begin, half.end):
                at.undone.append(shard)
            elif one.copied or one.end != at.cursor:
                at.stale.append(shard)
        return at
    # The newest records are of a chunk. The chunk counts as done if any shard has deleted what left
    # it, because then all copies had been acknowledged.
    done = any(not one.copied for one in latest)
    at = Halfway(chunk.end if done else chunk.begin, chunk, others)
    whole = Marker(chunk.number, chunk.number)
    for shard, one in mine.items():
        # This shard has the chunk done.
        if one.place == last and not one.copied:
            continue
        # An owner writes the next batch only when every shard has the chunk done. So a shard that
        # lacks it after a later batch is stale.
        if chunk.number != number or found[shard].marker != whole:
            at.stale.append(shard)
        elif one.place == last:
            (at.unfinished if done else at.undone).append(shard)
        # The shard must be at the chunk's start. If the chunk is done, a target must have its
        # copies.
        elif one.copied or one.end != chunk.begin or (done and shard in chunk.targets):
            at.stale.append(shard)
        elif done:
            at.unfinished.append(shard)
    return at


def _of_this(version: int, one: Migrated | None, number: int) -> Migrated | None:
    """Return a shard's record in terms of the migration to a placement of this version.

    This migration begins where the one before ended. So a completed record of that one stands for
    its beginning, as does a missing record for version 1. Returns None for a record of any other
    migration: migrations do not change batch numbers, so a server that came back with its state
    from the middle of an earlier migration would look right otherwise.
    """
    if one is not None and one.version == version:
        return one
    if version == 1 if one is None else one.version == version - 1 and complete(one):
        return Migrated(version, 0, 0, 0, False, number, 0)
    return None


def complete(one: Migrated) -> bool:
    """Return whether all of a lane has migrated."""
    return one.end == ALL and not one.copied


def strangers(placement: Placement, found: Mapping[int, Found]) -> list[int]:
    """Return the shards that do not record that the lane's migration to the placement is complete.

    For a placement without a migration under way.
    """
    if not placement.version:
        return []
    said = {shard: there.migrated for shard, there in found.items()}
    return [shard for shard, one in said.items() if one is None or one.version != placement.version or not complete(one)]


def agreed(placement: Placement, found: Mapping[int, Found], number: int) -> Halfway:
    """Decide how far a lane has migrated.

    The furthest record counts for which no more shards are stale or untrusted than parity covers.
    An earlier owner may have gone on with shards that the next owner did not reach; then what those
    shards alone record does not count.

    Args:
        found: As in `halfway`.
        number: As in `halfway`.
    """
    # The losses that parity still covers, after the shards that are not in `found`.
    spared = placement.r - (len(placement.live) - len(found))
    first = at = halfway(placement.version, found, number)
    left = dict(found)
    while left and len(at.stale) + len(found) - len(left) > spared:
        ones = {shard: _of_this(placement.version, there.migrated, number) for shard, there in left.items()}
        said = {shard: (-1, 0) if one is None else one.place for shard, one in ones.items()}
        furthest = max(said.values())
        # Too many shards would be stale. Distrust those with the furthest record and try the next
        # one.
        left = {shard: there for shard, there in left.items() if said[shard] != furthest}
        if not left:
            # No record leaves few enough shards stale.
            return first
        at = halfway(placement.version, left, number)
    at.stale += [shard for shard in found if shard not in left]
    return at
