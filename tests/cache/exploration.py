"""Visiting every state of a model, and every loss in each: what the explorers of the protocol's models share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import combinations
from typing import TypeVar

World = TypeVar("World")


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
