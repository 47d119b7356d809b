"""Pauses between attempts to reach a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

_FIRST_PAUSE = timedelta(milliseconds=10)
_LONGEST_PAUSE = timedelta(milliseconds=500)


def pauses(limit: timedelta) -> Iterator[None]:
    """Yield after pauses that grow exponentially.

    Each pause is twice as long as the one before, up to a longest one. The iterator ends when the
    next pause would pass `limit`, counted from now.
    """
    return _pauses(time.monotonic() + limit.total_seconds())


def _pauses(deadline: float) -> Iterator[None]:
    pause = _FIRST_PAUSE.total_seconds()
    while time.monotonic() + pause < deadline:
        time.sleep(pause)
        yield
        pause = min(2 * pause, _LONGEST_PAUSE.total_seconds())
