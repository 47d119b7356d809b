"""Where the time of a step goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Seconds of a step by what they went to: the time between two calls of `lap` is added to what the later one names.

    process, thread: processor time of this process, and of the thread that made the clock, when it was made.
    """

    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)
    process: float = field(default_factory=time.process_time)
    thread: float = field(default_factory=time.thread_time)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`: compute, exchange or waiting."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self.last)
        self.last = now

    def held_up(self, seconds: float, name: str) -> None:
        """So much of what was added to `name` was waiting for the store."""
        seconds = min(seconds, getattr(self, name))
        setattr(self, name, getattr(self, name) - seconds)
        self.waiting += seconds

    @property
    def seconds(self) -> float:
        """In all, so far."""
        return time.perf_counter() - self.begun

    @property
    def processor_seconds(self) -> tuple[float, float]:
        """Processor time so far of this process, and of it of the thread that runs the step, which must be the one that asks."""
        return time.process_time() - self.process, time.thread_time() - self.thread
