"""What the tests of trainer/ share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from command_line import Command


@pytest.fixture
def launched() -> Iterator[Callable[..., Command]]:
    """Starts `foreload` with these arguments; keywords are as Command has them. None of it is left afterwards."""
    started: list[Command] = []

    def launch(*arguments: str, module: str = "foreload.trainer.cli", **environment: str | None) -> Command:
        started.append(Command(*arguments, module=module, **environment))
        return started[-1]

    yield launch
    for one in started:
        one.clear()
