"""Where a row lives: lane, table, ordinal -> stripe -> placement group -> store shard.

The run keeps the table that maps placement groups to store shards.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from foreload.base.codec import Count, Natural, between, of_json, parse_json
from foreload.base.files import replacing
from foreload.cache.errors import CacheError

# The number of groups in a placement.
GROUPS = 4096
# The most rows of a stripe: the number of elements in the field of the erasure code.
MOST_ROWS = 256
MOST_SHARDS = 1 << 16


# The format of a run's first placement, and that of one whose groups have migrated or are
# migrating.
FORMAT, MIGRATED_FORMAT = 1, 2


_Shard = Annotated[int, between(0, MOST_SHARDS - 1)]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A placement as JSON."""

    format: int
    shards: Annotated[int, between(1, MOST_SHARDS)]
    k: Natural
    r: Count
    members: list[list[_Shard]]
    version: Count = 0
    removed: list[_Shard] = field(default_factory=list)
    target: list[list[_Shard]] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The map from a stripe's group to its ordered k + r store shards.

    A stripe is k consecutive ordinals of one table in one lane. Its group is key(lane, table,
    stripe) mod 4096.

    Attributes:
        shard_count: How many shard numbers were ever used.
        k: The number of rows in a stripe.
        r: The number of parity rows of a stripe.
        members: int32 [4096, k + r], the store shards of each group. The first k columns are for
            the rows of a stripe in order, the others for its parity rows.
        version: How many migrations have begun.
        removed: The shards that are no longer used.
        target: What `members` becomes when the migration under way completes, or None.
        leaving: The shards that all rows leave in the migration.
        joining: The shards that have no rows before the migration.
    """

    shard_count: int
    k: int
    r: int
    members: np.ndarray
    version: int = 0
    removed: tuple[int, ...] = ()
    target: np.ndarray | None = None
    leaving: tuple[int, ...] = field(init=False, compare=False)
    joining: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        before, after = (np.unique(self.members if one is None else one) for one in (None, self.target))
        object.__setattr__(self, "leaving", tuple(np.setdiff1d(before, after).tolist()))
        object.__setattr__(self, "joining", tuple(np.setdiff1d(after, before).tolist()))
        live = self.shard_count - len(self.removed)
        if self.k < 1 or self.r < 0 or self.k + self.r > live:
            raise CacheError(
                f"placement: k >= 1, r >= 0 and k + r <= store shards must hold; got k={self.k}, r={self.r} and {live} store shards"
            )
        for members in (self.members,) if self.target is None else (self.members, self.target):
            low, high = (members.min(), members.max()) if members.size else (-1, -1)
            if members.shape != (GROUPS, self.k + self.r) or low < 0 or high >= self.shard_count:
                raise CacheError(f"placement: the groups do not fit k={self.k}, r={self.r} and {self.shard_count} store shards")
            ordered = np.sort(members, axis=1)
            if (ordered[:, 1:] == ordered[:, :-1]).any():
                raise CacheError("placement: a group names one store shard twice")
            if np.isin(members, self.removed).any():
                raise CacheError("placement: a group names a store shard that was removed")

    @classmethod
    def spread(cls, shard_count: int, k: int = 1, r: int = 0) -> Placement:
        """Return a balanced placement.

        The first members are the shards in rotation. The others are a rotation of the remaining
        shards.
        """
        if shard_count < 1:
            raise CacheError(f"placement: needs at least one store shard; got {shard_count}")
        group = np.arange(GROUPS)[:, None]
        place = np.arange(k + r)[None, :]
        others = max(shard_count - 1, 1)
        rotated = (group + 1 + (group // shard_count + place - 1) % others) % shard_count
        return cls(shard_count, k, r, np.where(place == 0, group % shard_count, rotated).astype(np.int32))

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read a placement that `save` wrote. Raises CacheError if the file is not one."""
        try:
            return cls.of_text(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise CacheError(f"{path}: not a placement ({error}); it belongs to the run and cannot be recreated") from error

    @classmethod
    @lru_cache(maxsize=4)  # a command asks several times for its run's placement
    def of_text(cls, text: str, where: str) -> Placement:
        """Parse a placement from `text`.

        Args:
            where: Where the text was found, for the error message.

        Raises:
            CacheError: The text is not a placement.
        """
        try:
            value = parse_json(text)
            if isinstance(value, dict) and value.get("format") not in (FORMAT, MIGRATED_FORMAT):
                raise CacheError(
                    f"{where}: placement format must be {FORMAT} or {MIGRATED_FORMAT}; got {value.get('format')!r:.100}"
                )
            stored = of_json(value, _Stored)
            members, target = (None if rows is None else np.array(rows, np.int32) for rows in (stored.members, stored.target))
            assert members is not None
            return cls(stored.shards, stored.k, stored.r, members, stored.version, tuple(stored.removed), target)
        except ValueError as error:
            raise CacheError(f"{where}: not a placement ({error}); it belongs to the run and cannot be recreated") from error

    def save(self, path: Path) -> None:
        """Write the placement as JSON, atomically."""
        with replacing(path, durable=True) as temporary:
            temporary.write_text(self.text, encoding="utf-8")

    @property
    def text(self) -> str:
        """The placement as JSON."""
        stored: dict[str, Any] = {
            "format": FORMAT,
            "shards": self.shard_count,
            "k": self.k,
            "r": self.r,
            "members": self.members.tolist(),
        }
        if self.version:
            target = None if self.target is None else self.target.tolist()
            stored |= {"format": MIGRATED_FORMAT, "version": self.version, "removed": list(self.removed), "target": target}
        return json.dumps(stored, separators=(",", ":"))

    # Migrations.

    @property
    def migrating(self) -> bool:
        """Whether groups are migrating."""
        return self.target is not None

    @property
    def keeping(self) -> tuple[int, ...]:
        """The shards that keep rows that have migrated away, until the migration is over.

        With parity, these are the shards that all rows leave. Without parity, there are none.
        """
        return self.leaving if self.r else ()

    @property
    def live(self) -> list[int]:
        """The store shards that are used, in order."""
        return [shard for shard in range(self.shard_count) if shard not in self.removed]

    def with_added(self, count: int) -> Placement:
        """Return the placement that migrates groups to `count` further store shards.

        It migrates as many groups as needed for an equal share on every shard, and no more.

        Raises:
            CacheError: A migration is under way.
        """
        self._check_complete()
        shards = self.shard_count + count
        alike = GROUPS // (len(self.live) + count)
        target = self.members.copy()
        for place in range(self.k + self.r):
            had = np.bincount(self.members[:, place], minlength=shards)
            for group in range(GROUPS):
                new = self.shard_count + int(had[self.shard_count :].argmin())
                # A group migrates only from a shard with more than its share to one with less. No
                # group may name a shard twice.
                if had[new] < alike < had[target[group, place]] and new not in target[group]:
                    had[target[group, place]] -= 1
                    had[new] += 1
                    target[group, place] = new
        return replace(self, shard_count=shards, version=self.version + 1, target=target)

    def without(self, shard: int) -> Placement:
        """Return the placement that migrates all groups of a store shard to the others.

        Raises:
            CacheError: A migration is under way, or too few shards would be left.
        """
        self._check_complete()
        self._check_live(shard)
        others = np.array([other for other in self.live if other != shard])
        if len(others) < self.k + self.r:
            raise CacheError(
                f"store shard {shard}: removing it would leave {len(others)}, must leave at least {self.k + self.r}, for {self.k}+{self.r}; add one "
                "first, or move it to another server"
            )
        target = self.members.copy()
        for place in range(self.k + self.r):
            had = np.bincount(self.members[:, place], minlength=self.shard_count)
            for group in np.flatnonzero(self.members[:, place] == shard):
                # The least loaded shard that is not in the group already.
                free = others[~np.isin(others, target[group])]
                new = free[had[free].argmin()]
                had[new] += 1
                target[group, place] = new
        return replace(self, version=self.version + 1, target=target)

    def with_migrated(self, shard: int) -> Placement:
        """Return the placement that migrates all groups of a store shard to one further shard.

        Raises:
            CacheError: A migration is under way.
        """
        self._check_complete()
        self._check_live(shard)
        target = np.where(self.members == shard, self.shard_count, self.members).astype(np.int32)
        return replace(self, shard_count=self.shard_count + 1, version=self.version + 1, target=target)

    def completed(self) -> Placement:
        """Return the placement once its migration is complete.

        Shards that all rows left are removed.
        """
        if self.target is None:
            return self
        return replace(self, members=self.target, target=None, removed=tuple(sorted({*self.removed, *self.leaving})))

    def _check_complete(self) -> None:
        if self.migrating:
            raise CacheError("placement: a migration to other store shards is under way; wait until it has finished")

    def _check_live(self, shard: int) -> None:
        if shard not in self.live:
            raise CacheError(f"store shard {shard}: is not one of the run's shards, which are {', '.join(map(str, self.live))}")

    # Lookup.

    @property
    def table(self) -> np.ndarray:
        """The groups as they are and, during a migration, as they will be.

        int32 [4096, k + r], or [8192, k + r] during a migration.
        """
        return self.members if self.target is None else np.concatenate([self.members, self.target])

    def mask(self, shards: Collection[int]) -> np.ndarray:
        """Return which of all store shards are among these: bool [shard_count]."""
        among = np.zeros(self.shard_count, bool)
        among[list(shards)] = True
        return among
