"""Work in chunks beside the training, in the traffic's thread: each chunk between two rounds, while no batch is under way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from foreload.cache.protocol.rounds.monitor import Monitor

SHARE = 0.25  # of the traffic thread's time, at most, that goes into a task: training comes first


class Task(ABC):
    """One such piece of work, done in chunks. throttled: no more than a share of the time goes into it; any thread may change that."""

    def __init__(self) -> None:
        self.throttled = True
        self.share = SHARE
        self._not_before = 0.0  # time.monotonic()

    @property
    @abstractmethod
    def wanted(self) -> bool:
        """Whether there is a chunk to be done."""

    @abstractmethod
    def chunk(self) -> None:
        """Do the next one; no batch is under way. Raises CacheError, which ends the traffic."""

    def delay(self) -> float | None:
        """Seconds until the next chunk is due, so that training comes first; None if there is none."""
        if not self.wanted:
            return None
        return max(self._not_before - time.monotonic(), 0.0) if self.throttled else 0.0

    def work(self, flush_pending: Callable[[], object]) -> None:
        """Do a chunk, once no batch is under way, and put the next one off for as long as the share of the time asks."""
        begun = time.monotonic()
        flush_pending()
        self.chunk()
        now = time.monotonic()
        self._not_before = now + (now - begun) * (1 / self.share - 1)


class Background:
    """The tasks of one traffic: any thread adds one, the traffic's thread works on them."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        """Work on this, too, from now on."""
        with self._monitor:
            self._tasks.append(task)
            self._monitor.signal()

    def remove(self, task: Task) -> None:
        """Work on it no more."""
        with self._monitor:
            self._tasks.remove(task)

    def delay(self) -> float | None:
        """Seconds until the next chunk of any task is due; None if there is none."""
        with self._monitor:
            return min((due for due in (task.delay() for task in self._tasks) if due is not None), default=None)

    def work(self, flush_pending: Callable[[], object]) -> bool:
        """Do a chunk of every task that is due; False if none was. flush_pending: sends the rows of all batches under way."""
        with self._monitor:
            due = [task for task in self._tasks if task.delay() == 0.0]
        for task in due:
            task.work(flush_pending)
        return bool(due)


_ROWS_COUNT = 0.7  # half as many rows take less than this share of the time: it is they that take it


@dataclass(slots=True)
class AdaptiveSize:
    """A number of rows, from `fewest` to `most`: as many as take `seconds`, unless it is answers that take the time, not rows, as behind a link with
    a long delay: then as many as take `most_seconds`. rows: at first.
    """

    rows: int
    fewest: int
    most: int
    seconds: float
    most_seconds: float
    _took: dict[int, float] = field(default_factory=dict)  # seconds of the last piece of so many rows

    def note(self, took: float, had: int | None = None) -> None:
        """A piece has taken so many seconds. had: rows; None: as many as there may be."""
        while had is not None and self.rows // 2 >= max(had, self.fewest):
            if took <= self.seconds:
                return  # it says nothing of one with more rows
            self.rows //= 2
        rows = self.rows
        self._took[rows] = took
        half, twice = self._took.get(rows // 2, 0.0), self._took.get(2 * rows, 0.0)
        if took > self.seconds and rows > self.fewest and half < _ROWS_COUNT * took:
            self.rows = rows // 2
        elif took < self.seconds / 2 or (took < self.most_seconds and _ROWS_COUNT * twice < took):
            self.rows = min(2 * rows, self.most)
