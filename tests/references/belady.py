"""How many rows must arrive in a cache of so many slots when all rows of a step sit in slots: Belady's minimum, and what LRU needs."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import combinations

NEVER = 1 << 60
"""The next use of a row that has none: after any step."""


def belady_arrivals(steps: Sequence[Sequence[Hashable]], slots: int) -> int:
    """Arrivals with the whole future known: of the rows that a step does not use, the one whose next use is furthest leaves (Belady 1966).

    steps: the rows of each step, repeats allowed. A step with more distinct rows than slots is a ValueError.
    """
    uses: dict[Hashable, list[int]] = {}
    for number, rows in enumerate(steps):
        for row in set(rows):
            uses.setdefault(row, []).append(number)
    passed = dict.fromkeys(uses, 0)  # of every row, how many of its uses
    next_use: dict[Hashable, int] = {}  # of every resident row
    # (-next use, tie, row) of resident rows; an entry counts only while next_use still says the same.
    furthest: list[tuple[int, int, Hashable]] = []
    number_of = {row: number for number, row in enumerate(uses)}
    arrivals = 0
    for number, rows in enumerate(steps):
        needed = set(rows)
        if len(needed) > slots:
            raise ValueError(f"slots: step {number} needs {len(needed)}, not {slots}")
        missing = [row for row in needed if row not in next_use]
        for row in needed:
            passed[row] += 1
            next_use[row] = uses[row][passed[row]] if passed[row] < len(uses[row]) else NEVER
        arrivals += len(missing)
        while len(next_use) > slots:
            when, _, row = heapq.heappop(furthest)
            if row not in needed and next_use.get(row) == -when:
                del next_use[row]
        for row in needed:
            heapq.heappush(furthest, (-next_use[row], number_of[row], row))
    return arrivals


def lru_arrivals(steps: Sequence[Sequence[Hashable]], slots: int) -> int:
    """Arrivals when, of the rows that a step does not use, the one used longest ago leaves; ties by the order within its step."""
    resident: OrderedDict[Hashable, None] = OrderedDict()
    arrivals = 0
    for number, rows in enumerate(steps):
        needed = dict.fromkeys(rows)
        if len(needed) > slots:
            raise ValueError(f"slots: step {number} needs {len(needed)}, not {slots}")
        arrivals += sum(row not in resident for row in needed)
        for row in needed:
            resident[row] = None
            resident.move_to_end(row)
        while len(resident) > slots:
            resident.popitem(last=False)
    return arrivals


def fewest_arrivals(steps: Sequence[Sequence[Hashable]], slots: int) -> int:
    """The minimum over every choice of rows to keep, by exhaustive search: for tiny cases only."""
    needed = [frozenset(rows) for rows in steps]

    @cache
    def best(number: int, resident: frozenset[Hashable]) -> int:
        if number == len(needed):
            return 0
        others = sorted(resident - needed[number], key=repr)
        kept = min(len(others), slots - len(needed[number]))
        cost = len(needed[number] - resident)
        # Keeping more never costs more, so only the fullest choices count.
        return cost + min(best(number + 1, needed[number] | frozenset(keep)) for keep in combinations(others, kept))

    return best(0, frozenset())
