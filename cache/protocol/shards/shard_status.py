"""The status of a run's store shards, as the lanes' owners report it.

Also: how long an owner waits for shards that do not answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Literal

ShardState = Literal["ok", "rebuilding", "lost", "removed"]
OK: Literal["ok"] = "ok"
REBUILDING: Literal["rebuilding"] = "rebuilding"
LOST: Literal["lost"] = "lost"
REMOVED: Literal["removed"] = "removed"
_WORST_FIRST: tuple[ShardState, ...] = (LOST, REBUILDING, OK, REMOVED)


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The status of a store shard at one moment.

    Attributes:
        url: The URL of its server, without password.
        why: Why the shard was lost.
        rebuilt: The share of the stripes of all lanes for which the shard is live: 1 if it is ok, 0
            if it is lost.
    """

    url: str
    state: ShardState = OK
    why: str = ""
    rebuilt: float = 1.0


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """The status of all store shards at one moment.

    A trainer reports one. The launcher combines those of all trainers into one.

    Attributes:
        shards: In order.
        version: The version of the placement that the sender uses.
        migrated: The share of the stripes of the sender's lanes that are where this placement has
            them. It is 1 unless rows migrate.
    """

    shards: tuple[ShardStatus, ...]
    version: int = 0
    migrated: float = 1.0

    @classmethod
    def together(cls, several: Iterable[ShardSnapshot]) -> ShardSnapshot:
        """Combine the snapshots of one or more owners: the worst status of each shard counts.

        Of two owners for which a shard is being rebuilt, the one with less of it rebuilt counts.
        """
        snapshots = list(several)
        # Some owners may not know a shard yet that was added a moment ago.
        by_shard = zip_longest(*(one.shards for one in snapshots))
        shards = tuple(min((one for one in of_all if one is not None), key=_goodness) for of_all in by_shard)
        return cls(
            shards, min((one.version for one in snapshots), default=0), min((one.migrated for one in snapshots), default=1.0)
        )

    def changes_since(self, before: ShardSnapshot | None) -> dict[int, ShardStatus]:
        """Return the shards whose state differs from that in `before`, with their status now.

        If `before` is None, all shards were ok.
        """
        states = () if before is None else [status.state for status in before.shards]
        of_before = dict(enumerate(states))
        return {shard: status for shard, status in enumerate(self.shards) if status.state != of_before.get(shard, OK)}

    @property
    def lost(self) -> list[int]:
        """The lost shards."""
        return [shard for shard, status in enumerate(self.shards) if status.state == LOST]

    @property
    def whole(self) -> bool:
        """Whether every shard has all rows of every lane."""
        return all(status.state in (OK, REMOVED) for status in self.shards)

    @property
    def not_whole(self) -> dict[int, float]:
        """The shards that are lost or being rebuilt, with the share (0 to 1) that is rebuilt."""
        return {shard: status.rebuilt for shard, status in enumerate(self.shards) if status.state in (LOST, REBUILDING)}


def _goodness(status: ShardStatus) -> tuple[int, float]:
    return _WORST_FIRST.index(status.state), status.rebuilt


@dataclass(frozen=True, slots=True)
class Lag:
    """What is on its way to the store, over all lanes.

    Attributes:
        batches: Write-back batches that are not yet released.
        boundaries: Boundaries with rows that the store has not yet acknowledged.
        rows: The number of these rows.
    """

    batches: int
    boundaries: int
    rows: int


@dataclass(frozen=True, slots=True)
class ShardsAwaited:
    """More store shards do not answer than parity covers, and the owner waits for them.

    Attributes:
        shards: The shards it waits for. If empty, the shards answer again.
        why: What they do instead of answering.
    """

    shards: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        if not self.shards:
            return "the store shards answer again"
        numbers = ", ".join(map(str, self.shards))
        return f"store shard {numbers}: does not answer, and parity does not cover it, so training waits for it ({self.why})"


@dataclass(frozen=True, slots=True)
class ServerUnreachable:
    """A server for a lost store shard has been missing for 5 s, or cannot be used.

    It is the shard's own server or the one that is to replace it.

    Attributes:
        url: The server's URL, without password.
    """

    shard: int
    url: str
    why: str


ShardNews = ShardSnapshot | ServerUnreachable | ShardsAwaited
"""What an owner reports about store shards.

It is the status of all shards, each time the state of one changes; a server that is missing; or the
shards that the owner waits for because parity does not cover them.
"""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an owner waits for shards that do not answer and that parity does not cover.

    Attributes:
        volatile: If True, the owner does not wait for a shard that it cannot reach, because the
            server has died and its rows died with it.
    """

    time: timedelta = timedelta(seconds=10)
    volatile: bool = False


PATIENCE = Patience()
