"""What the tests of trainer/ share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from launched import Launched


@pytest.fixture
def launched() -> Iterator[Callable[..., Launched]]:
    """Starts `foreload` with these arguments; keywords are further environment. None of it is left afterwards."""
    started: list[Launched] = []

    def launch(*arguments: str, **environment: str) -> Launched:
        started.append(Launched(arguments, environment))
        return started[-1]

    yield launch
    for one in started:
        one.clear()
