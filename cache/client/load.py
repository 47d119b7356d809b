"""How long each store shard's answers take, and how much goes to it and comes from it: counted beside every exchange with several shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(slots=True)
class ShardLoad:
    """Of one store shard, over exchanges in which others were asked, too. seconds: from the beginning to its last answer, in all; held_up: how much
    longer that took than the longest of all others, in the exchanges in which it was the last; bytes: both ways, in all exchanges.
    """

    exchanges: int = 0
    seconds: float = 0.0
    held_up: float = 0.0
    bytes: int = 0

    @property
    def mean(self) -> float:
        """Seconds that its answers took."""
        return self.seconds / self.exchanges if self.exchanges else 0.0

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


def slower(shard: int, seconds: Mapping[int, float], times: float, longer: float) -> float | None:
    """How many times the median of the others' a shard's answers take; None where that is not so many times, or not so many seconds longer.

    seconds: of an answer, by shard.
    """
    others = [of_other for other, of_other in seconds.items() if other != shard]
    if shard not in seconds or not others:
        return None
    own, of_others = seconds[shard], median(others)
    return own / of_others if of_others and own > max(times * of_others, of_others + longer) else None
