"""Find store shards that are slow or hot compared with the others, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypedDict

from foreload.cache.client.load import ShardLoad, slower

_SLOW = 1.5  # x the median of the others' answer times
# A slow shard is also at least this much slower. Smaller differences come from processors, not from
# servers or links.
_SLOW_SECONDS = 0.0005
_SLOW_STEP_SECONDS = 0.0005  # and costs at least this much a step
# x the median of the others' bytes. Groups are spread so evenly that it is otherwise at most 1.1.
_HOT = 1.5
_LEAST_EXCHANGES = 50
_LEAST_BYTES = 1 << 20


class LoadReport(TypedDict):
    """A shard's load.

    Attributes:
        exchanges: the number of exchanges with this shard and others.
        ms_answer: how long its answers took, on average.
        ms_a_step: how long, per step, the complete answers of other shards waited for its answer.
        bytes: the bytes to and from the shard.
        slow: its answer time as a multiple of the median of the others, if it is slow; else None.
        hot: its bytes as a multiple of the median of the others, if it is hot; else None.
    """

    shard: int
    exchanges: int
    ms_answer: float
    ms_a_step: float
    bytes: int
    slow: float | None
    hot: float | None


def reports(loads: Mapping[int, ShardLoad], steps: int) -> list[LoadReport]:
    """Return each shard's load, over a number of training steps."""
    return [
        {
            "shard": shard,
            "exchanges": load.exchanges,
            "ms_answer": 1000 * load.mean,
            "ms_a_step": 1000 * load.held_up / max(steps, 1),
            "bytes": load.bytes,
            "slow": _slow(shard, loads, steps),
            "hot": _hot(shard, loads),
        }
        for shard, load in sorted(loads.items())
    ]


def lines(shards: Sequence[LoadReport]) -> list[str]:
    """Return a line for each slow shard and each hot one, of those that `reports` returns."""
    words = []
    for one in shards:
        if one["slow"] is not None:
            words.append(
                f"store shard {one['shard']} is slow: its answers take {one['slow']:.1f} x the median of the others' ({one['ms_answer']:.1f} ms), "
                f"which costs the traffic about {one['ms_a_step']:.1f} ms a step"
            )
        if one["hot"] is not None:
            words.append(f"store shard {one['shard']} is hot: it has {one['hot']:.1f} x the bytes of the median of the others")
    return words


def _slow(shard: int, loads: Mapping[int, ShardLoad], steps: int) -> float | None:
    own = loads[shard]
    much = own.exchanges >= _LEAST_EXCHANGES and own.held_up > _SLOW_STEP_SECONDS * steps
    if not much:
        return None
    return slower(shard, {other: load.mean for other, load in loads.items() if load.exchanges}, _SLOW, _SLOW_SECONDS)


def _hot(shard: int, loads: Mapping[int, ShardLoad]) -> float | None:
    others = [load.bytes for other, load in loads.items() if other != shard]
    if not others or loads[shard].bytes < _LEAST_BYTES:
        return None
    of_others = median(others)
    return loads[shard].bytes / of_others if of_others and loads[shard].bytes > _HOT * of_others else None
