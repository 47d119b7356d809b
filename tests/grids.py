"""Grids of cases, of which a test run takes a covering subset."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def covering(cases: Sequence[tuple[object, ...]], every: int) -> list[object]:
    """All cases, of which `make test` takes the first of each `every` and leaves the others to the whole grid.

    every: for a product, prime to the sizes of its dimensions, so that the cases taken go through the values of each of them in turn.
    """
    return [case if place % every == 0 else pytest.param(*case, marks=pytest.mark.full) for place, case in enumerate(cases)]
