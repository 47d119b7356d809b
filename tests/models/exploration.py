"""Visiting every state of a model, and every loss in each: what the explorers of the protocol's models share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations
from math import prod
from typing import TypeVar

World = TypeVar("World")
RIGHT, UNTRUSTED, WRONG = range(3)
"""What a shard is to a new owner."""


def reached(start: World, steps: Callable[[World], Iterable[World]]) -> Iterator[World]:
    """Every world that can be reached, each once; steps: what can come next. Where the caller ends, nothing more is looked at."""
    seen, waiting = {start}, [start]
    while waiting:
        world = waiting.pop()
        yield world
        for following in steps(world):
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def loss_sets(shards: Collection[int], lost: Collection[int], most: int) -> Iterator[tuple[int, ...]]:
    """All sets of further shards that may be lost, at most so many with those that are lost already."""
    others = [shard for shard in shards if shard not in lost]
    for count in range(most - len(lost) + 1):
        yield from combinations(others, count)


def wrong_cases(tallies: Sequence[Sequence[int]], most: int) -> tuple[int, int]:
    """In how many ways shards may stand, and in how many of these one is wrong, or more than `most` are not trusted.

    tallies: of each shard, in how many ways it is RIGHT, UNTRUSTED and WRONG.
    """
    right = [1]  # by how many are not trusted, the ways in which no shard is wrong
    for tally in tallies:
        right = [
            (right[u] if u < len(right) else 0) * tally[RIGHT] + (right[u - 1] * tally[UNTRUSTED] if u else 0)
            for u in range(len(right) + 1)
        ]
    total = prod(map(sum, tallies))
    return total, total - sum(right[: most + 1])
