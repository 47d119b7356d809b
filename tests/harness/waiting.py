"""How long tests wait for what must come about."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_SECONDS = 600
"""After so long what must come about hangs: far more than it takes on a slow machine beside other work, since it is waited out by failures alone."""


def wait_until(satisfied: Callable[[], bool], what: Callable[[], object] = lambda: None) -> None:
    """Wait for what must come about and then stays true. what: is shown if it does not."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not satisfied():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)
