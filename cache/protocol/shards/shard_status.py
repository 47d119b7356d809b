"""The status of a run's store shards, as their owners report it, and how long shards are waited for."""

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
    """How a store shard was at one moment. url: of its server, without password; why: of a lost one.

    rebuilt: how much of it is live, as a share of the stripes of all lanes: 1 where it is ok, 0 where it is lost.
    """

    url: str
    state: ShardState = OK
    why: str = ""
    rebuilt: float = 1.0


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """How all store shards were at one moment, in order; also what a trainer reports of them, and what all trainers' snapshots come to.

    version: of the placement that its sender works by; migrated: how much is where that has it, as a share of the stripes of all its lanes: 1 unless
    rows move.
    """

    shards: tuple[ShardStatus, ...]
    version: int = 0
    migrated: float = 1.0

    @classmethod
    def together(cls, several: Iterable[ShardSnapshot]) -> ShardSnapshot:
        """The shards as they are for several owners at once, of one or more: each as the owner has it that has it worst, and least of it rebuilt."""
        snapshots = list(several)
        # Of a shard that was added a moment ago not all may know.
        by_shard = zip_longest(*(one.shards for one in snapshots))
        shards = tuple(min((one for one in of_all if one is not None), key=_goodness) for of_all in by_shard)
        return cls(
            shards, min((one.version for one in snapshots), default=0), min((one.migrated for one in snapshots), default=1.0)
        )

    def changes_since(self, before: ShardSnapshot | None) -> dict[int, ShardStatus]:
        """The shards whose state is another than before, as they are now; None before: all were ok."""
        states = () if before is None else [status.state for status in before.shards]
        of_before = dict(enumerate(states))
        return {shard: status for shard, status in enumerate(self.shards) if status.state != of_before.get(shard, OK)}

    @property
    def lost(self) -> list[int]:
        """The shards that are lost."""
        return [shard for shard, status in enumerate(self.shards) if status.state == LOST]

    @property
    def whole(self) -> bool:
        """Whether every shard has all rows of every lane."""
        return all(status.state in (OK, REMOVED) for status in self.shards)

    @property
    def not_whole(self) -> dict[int, float]:
        """The shards that are lost or being rebuilt, and how much of each is rebuilt, from 0 to 1."""
        return {shard: status.rebuilt for shard, status in enumerate(self.shards) if status.state in (LOST, REBUILDING)}


def _goodness(status: ShardStatus) -> tuple[int, float]:
    return _WORST_FIRST.index(status.state), status.rebuilt


@dataclass(frozen=True, slots=True)
class Lag:
    """What is on its way to the store: batches not yet released, boundaries with rows not yet acknowledged (both of all lanes), and these rows."""

    batches: int
    boundaries: int
    rows: int


@dataclass(frozen=True, slots=True)
class ShardsAwaited:
    """More store shards do not answer than parity covers, and are waited for; none: they answer again. why: what they do instead."""

    shards: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        if not self.shards:
            return "the store shards answer again"
        numbers = ", ".join(map(str, self.shards))
        return f"store shard {numbers}: no answer, and parity does not cover that, so training waits for it ({self.why})"


@dataclass(frozen=True, slots=True)
class ServerUnreachable:
    """The server of a lost store shard, or the one to take its place, is not there for 5 s, or is of no use. url: its own, without password."""

    shard: int
    url: str
    why: str


ShardNews = ShardSnapshot | ServerUnreachable | ShardsAwaited
"""What the owner of lanes reports of store shards: how all are from now on, each time that the state of one changes; a server that is not there; that
more are waited for than parity covers."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long shards are waited for that do not answer, where parity does not cover them. volatile: none is that cannot be reached, for then it has
    died, and its rows with it.
    """

    time: timedelta = timedelta(seconds=10)
    volatile: bool = False


PATIENCE = Patience()
