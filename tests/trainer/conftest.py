"""What the tests of trainer/ share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from command_line import Command


@pytest.fixture
def launched() -> Iterator[Callable[..., Command]]:
    """Starts `foreload` with these arguments; keywords are further environment. None of it is left afterwards."""
    started: list[Command] = []

    def launch(*arguments: str, **environment: str) -> Command:
        started.append(Command(*arguments, **environment))
        return started[-1]

    yield launch
    for one in started:
        one.clear()
