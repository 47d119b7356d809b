"""How long tests wait for what must come about."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_SECONDS = 280
"""After so long what must come about hangs. Less than the timeouts of five minutes and more that a run has: no test passes by waiting one out."""


def wait_until(satisfied: Callable[[], bool], what: Callable[[], object] = lambda: None) -> None:
    """Wait for what must come about and then stays true. what: is shown if it does not."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not satisfied():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)
