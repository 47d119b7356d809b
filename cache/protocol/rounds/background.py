"""Background work of the traffic thread: tasks that run in chunks between two rounds.

No write-back batch is under way during a chunk. `AdaptiveSize` chooses how many rows a piece of
work has.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from foreload.cache.protocol.rounds.monitor import Monitor

SHARE = 0.25  # of the traffic thread's time that a task takes at most: training comes first


class Task(ABC):
    """A piece of background work that is done in chunks.

    Attributes:
        throttled: whether the task takes at most `share` of the traffic thread's time. Any thread
            may change it.
        share: the largest share of the traffic thread's time that a throttled task takes, from 0 to
            1.
    """

    def __init__(self) -> None:
        self.throttled = True
        self.share = SHARE
        self._not_before = 0.0  # time.monotonic()

    @property
    @abstractmethod
    def wanted(self) -> bool:
        """Whether there is a chunk to do."""

    @abstractmethod
    def chunk(self) -> None:
        """Do the next chunk. The caller ensures that no batch is under way.

        Raises:
            CacheError: the chunk failed. The error ends the traffic.
        """

    def delay(self) -> float | None:
        """Return the seconds until the next chunk is due, or None if there is no chunk to do.

        A throttled task waits between its chunks, so that training comes first.
        """
        if not self.wanted:
            return None
        return max(self._not_before - time.monotonic(), 0.0) if self.throttled else 0.0

    def work(self, flush_pending: Callable[[], object]) -> None:
        """Flush the batches under way, do one chunk, and schedule the next chunk.

        The pause after a chunk is proportional to the time that the chunk took, so that the task
        stays within its share.

        Args:
            flush_pending: sends the rows of all batches under way.
        """
        begun = time.monotonic()
        flush_pending()
        self.chunk()
        now = time.monotonic()
        self._not_before = now + (now - begun) * (1 / self.share - 1)


class Background:
    """The background tasks of one traffic. Any thread adds tasks; the traffic thread does them."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        """Start to work on a task."""
        with self._monitor:
            self._tasks.append(task)
            self._monitor.signal()

    def remove(self, task: Task) -> None:
        """Stop working on a task."""
        with self._monitor:
            self._tasks.remove(task)

    def delay(self) -> float | None:
        """Return the seconds until the next chunk of any task is due, or None if there is none."""
        with self._monitor:
            return min((due for due in (task.delay() for task in self._tasks) if due is not None), default=None)

    def work(self, flush_pending: Callable[[], object]) -> bool:
        """Do one chunk of every task that is due. Returns False if no task was due.

        Args:
            flush_pending: sends the rows of all batches under way.
        """
        with self._monitor:
            due = [task for task in self._tasks if task.delay() == 0.0]
        for task in due:
            task.work(flush_pending)
        return bool(due)


# Where half as many rows take less than this share of the time, the time depends on the rows, not
# on the answers.
_ROWS_COUNT = 0.7


@dataclass(slots=True)
class AdaptiveSize:
    """A number of rows for one piece of work, adapted to how long the pieces take.

    The size approaches the number of rows that take `seconds`. Behind a link with a long delay the
    answers take the time, not the rows, and fewer rows take hardly less. The size then approaches
    the number of rows that take `most_seconds`.

    Attributes:
        rows: the current size; at first the initial one.
        fewest: the smallest size.
        most: the largest size.
        seconds: the time that a piece of work should take.
        most_seconds: the time that a piece may take where fewer rows would take hardly less.
    """

    rows: int
    fewest: int
    most: int
    seconds: float
    most_seconds: float
    # Rows -> seconds of the last piece of that size.
    _took: dict[int, float] = field(default_factory=dict)

    def note(self, took: float, had: int | None = None) -> None:
        """Record how long a piece of work took, and adapt the size.

        Args:
            took: seconds.
            had: how many rows the piece had. If None, it had the full size.
        """
        # A piece of at most half the size that was fast enough says nothing about the full size. If
        # it was too slow, judge it by the smallest size that holds its rows.
        while had is not None and self.rows // 2 >= max(had, self.fewest):
            if took <= self.seconds:
                return
            self.rows //= 2
        rows = self.rows
        self._took[rows] = took
        # The times of the neighboring sizes show whether the time depends on the rows or on the
        # answers.
        half, twice = self._took.get(rows // 2, 0.0), self._took.get(2 * rows, 0.0)
        if took > self.seconds and rows > self.fewest and half < _ROWS_COUNT * took:
            self.rows = rows // 2
        elif took < self.seconds / 2 or (took < self.most_seconds and _ROWS_COUNT * twice < took):
            self.rows = min(2 * rows, self.most)
