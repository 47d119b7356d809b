"""Connections that are kept from idling: servers, load balancers and address translation close those on which nothing was said for minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from foreload.cache.protocol.rounds.background import Task

EVERY = timedelta(seconds=30)


class KeepAlive(Task):
    """Has every store shard asked something every 30 s. ask: asks each once."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask
        self._at = time.monotonic()

    @property
    def wanted(self) -> bool:
        """Always."""
        return True

    def delay(self) -> float:
        """Seconds until it is time."""
        return max(self._at + EVERY.total_seconds() - time.monotonic(), 0.0)

    def chunk(self) -> None:
        """Ask. Raises as the rounds do."""
        self._ask()
        self._at = time.monotonic()
