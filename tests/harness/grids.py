"""Grids of cases, of which a test run takes a covering subset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

import pytest


def covering(cases: Sequence[tuple[object, ...]], every: int) -> list[object]:
    """All cases, of which `make test` takes the first of each `every` and leaves the others to the whole grid.

    every: for a product, prime to the sizes of its dimensions, so that the cases taken go through the values of each of them in turn.
    """
    return [case if place % every == 0 else pytest.param(*case, marks=pytest.mark.full) for place, case in enumerate(cases)]


Case = dict[str, object]


def pairs_of(case: Case) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every two values of a case, each with the name of its factor."""
    return set(combinations(case.items(), 2))


def pairwise(factors: Mapping[str, Sequence[object]], can_be: Callable[[Case], bool]) -> list[Case]:
    """Few cases that together have every two values of two factors that any possible case has, the same ones each time.

    factors: the values of each, by name; can_be: whether a case, a value of each factor, is possible.
    """
    cases = [case for values in product(*factors.values()) if can_be(case := dict(zip(factors, values, strict=True)))]
    bits: dict[object, int] = {}
    # A bit a pair: the cases are gone through for each one that is taken.
    masks = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs_of(case)) for case in cases]
    wanted, taken = (1 << len(bits)) - 1, []
    while wanted:
        best = max(range(len(cases)), key=lambda place: (masks[place] & wanted).bit_count())
        taken.append(cases[best])
        wanted &= ~masks[best]
    return taken
