"""How long each store shard's answers take, and the bytes to and from it.

Both are counted in every exchange with several shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(slots=True)
class ShardLoad:
    """The load of one store shard, over exchanges in which other shards took part.

    Attributes:
        exchanges: the number of these exchanges.
        seconds: the sum of the times from an exchange's start to the shard's last answer.
        held_up: in exchanges in which this shard was the last to answer, the sum of the times by
            which it was later than the one before it.
        bytes: the bytes in both directions, in all exchanges.
    """

    exchanges: int = 0
    seconds: float = 0.0
    held_up: float = 0.0
    bytes: int = 0

    @property
    def mean(self) -> float:
        """The mean seconds of an answer."""
        return self.seconds / self.exchanges if self.exchanges else 0.0

    def add(self, other: ShardLoad) -> None:
        """Add a load that was counted elsewhere, or at another time."""
        self.exchanges += other.exchanges
        self.seconds += other.seconds
        self.held_up += other.held_up
        self.bytes += other.bytes


def together(counted: Iterable[dict[int, ShardLoad]]) -> dict[int, ShardLoad]:
    """Add several loads up, by shard."""
    total: dict[int, ShardLoad] = {}
    for loads in counted:
        for shard, load in loads.items():
            total.setdefault(shard, ShardLoad()).add(load)
    return dict(sorted(total.items()))


def slower(shard: int, seconds: Mapping[int, float], times: float, longer: float) -> float | None:
    """Return a shard's answer time as a multiple of the median of the others.

    Args:
        seconds: shard -> the seconds of an answer.
        times: the least multiple to report.
        longer: the least difference to report, in seconds.

    Returns:
        The multiple, or None if it or the difference is too small.
    """
    others = [of_other for other, of_other in seconds.items() if other != shard]
    if shard not in seconds or not others:
        return None
    own, of_others = seconds[shard], median(others)
    return own / of_others if of_others and own > max(times * of_others, of_others + longer) else None
