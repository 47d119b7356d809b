"""Where the time of a step goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Seconds of a step by what they went to: the time between two calls of `lap` is added to what the later one names."""

    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`: compute, exchange or waiting."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self.last)
        self.last = now

    @property
    def seconds(self) -> float:
        """In all, so far."""
        return time.perf_counter() - self.begun
