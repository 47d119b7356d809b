"""How long each store shard's answers take, and how much goes to it and comes from it: counted beside every exchange with several shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class ShardLoad:
    """Of one store shard, over exchanges in which others were asked, too. seconds: from the beginning to its last answer, in all; held_up: how much
    longer that took than the longest of all others, in the exchanges in which it was the last; bytes: both ways, in all exchanges.
    """

    exchanges: int = 0
    seconds: float = 0.0
    held_up: float = 0.0
    bytes: int = 0

    def add(self, other: ShardLoad) -> None:
        """Count in what was counted elsewhere, or at another time."""
        self.exchanges += other.exchanges
        self.seconds += other.seconds
        self.held_up += other.held_up
        self.bytes += other.bytes


def together(counted: Iterable[dict[int, ShardLoad]]) -> dict[int, ShardLoad]:
    """What several have counted, by shard."""
    total: dict[int, ShardLoad] = {}
    for loads in counted:
        for shard, load in loads.items():
            total.setdefault(shard, ShardLoad()).add(load)
    return dict(sorted(total.items()))
