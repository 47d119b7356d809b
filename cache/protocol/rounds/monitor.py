"""The state that a trainer shares with its traffic thread: a lock, waits, and the thread's end.

Both sides hold the `Monitor` while they read or change what they share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from foreload.cache.errors import CacheError, CopyLost

Answer = TypeVar("Answer")


class Monitor(threading.Condition):
    """A condition over the state that the trainer and the traffic thread share.

    A thread holds the monitor while it reads or changes that state. If the traffic thread fails,
    every later wait of the trainer raises its failure.

    Attributes:
        failure: the error that ended the traffic thread. If None, it did not fail.
        interrupted: the error that a wait raises instead of waiting. If None, waits wait.
        stopping: whether the traffic thread is to stop.
        over: whether the thread has ended and no call is to wait for it.
        signals: a counter, raised by every event that may give the traffic thread work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self.interrupted: CopyLost | None = None
        self.stopping = False
        self.over = False
        self.signals = 1
        self._posted: deque[Callable[[], None]] = deque()

    def signal(self) -> None:
        """Wake the traffic thread and every other waiting thread. The caller holds the monitor."""
        self.signals += 1
        self.notify_all()

    def wake(self) -> None:
        """Do the same as `signal`, for a caller that does not hold the monitor."""
        with self:
            self.signal()

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the traffic thread."""
        with self:
            self.failure = error
            self.notify_all()

    def interrupt(self, error: CopyLost | None) -> None:
        """Make the trainer's waits raise this error from now on. If None, they wait again."""
        with self:
            self.interrupted = error
            self.notify_all()

    def wait_until(self, satisfied: Callable[[], bool], poll: timedelta | None = None) -> None:
        """Wait until a condition is met. Returns at once if the thread is over.

        Args:
            satisfied: returns whether the condition is met.
            poll: how often to check the condition without a signal. If None, only signals trigger a
                check.

        Raises:
            BaseException: the failure of the traffic thread.
            CacheError: the traffic thread was stopped.
            CopyLost: the trainer is interrupted, and the condition is not met.
        """
        while not self.over:
            if self.failure is not None:
                raise self.failure
            if self.stopping:
                raise CacheError("traffic: is closed")
            # A condition that is met needs no wait, so check it before the interruption.
            if satisfied():
                return
            if self.interrupted is not None:
                raise self.interrupted
            self.wait(poll.total_seconds() if poll is not None else None)

    def post(self, work: Callable[[], None]) -> None:
        """Have the traffic thread run some work between two rounds.

        The thread does not hold the monitor meanwhile. An error of the work ends the thread, as its
        failure.
        """
        with self:
            self._posted.append(work)
            self.signal()

    def ask(self, work: Callable[[], Answer]) -> Answer:
        """Have the traffic thread run some work between two rounds, and return the result.

        If the trainer is interrupted, work that has not begun is not done at all.

        Raises:
            BaseException: as `wait_until` does.
            CopyLost: the trainer is interrupted, or the work raised it. Neither ends the thread.
        """
        answers: list[Answer] = []
        refused: list[CopyLost] = []
        begun = given_up = False

        def answer() -> None:
            nonlocal begun
            # Under the monitor, so that the work either begins or is given up, never both.
            with self:
                if given_up:
                    return
                begun = True
            try:
                answers.append(work())
            except CopyLost as error:
                refused.append(error)
            self.wake()

        self.post(answer)
        with self:
            try:
                self.wait_until(lambda: bool(answers or refused))
            except CopyLost:
                given_up = not begun
                # Work that has begun may change shared state, so wait for its end.
                while begun and self.failure is None and not self.stopping and not (answers or refused):
                    self.wait()
                if not (answers or refused):
                    raise
        if refused:
            raise refused[0]
        return answers[0]

    def beside_rounds(self, prepare: Callable[[], object], work: Callable[[], Answer]) -> Answer:
        """Run some work in the caller's thread while the traffic thread pauses between two rounds.

        A trainer uses this for work that it waits for, because the traffic thread has a lower
        priority. An error of `prepare` or `work` ends the traffic thread, as its failure, and is
        raised here. CopyLost is the exception: after it, whether the work raised it or the trainer
        is interrupted, the traffic thread continues.

        Args:
            prepare: run by the traffic thread before it pauses.
            work: run by the calling thread during the pause.

        Returns:
            What `work` returns.
        """
        resting: list[bool] = []
        over: list[BaseException | None] = []

        def rest() -> None:
            prepare()
            with self:
                resting.append(True)
                self.notify_all()
                while not over:
                    self.wait()
            if over[0] is not None:
                raise over[0]

        self.post(rest)
        with self:
            try:
                self.wait_until(lambda: bool(resting))
            except CopyLost:
                # The caller leaves, so the traffic thread must not pause any longer.
                over.append(None)
                self.notify_all()
                raise
        # The traffic thread pauses from here until `over` has an element.
        answers: list[Answer] = []
        error: BaseException | None = None
        try:
            answers.append(work())
        except BaseException as failed:
            error = failed
        with self:
            over.append(None if isinstance(error, CopyLost) else error)
            self.notify_all()
            if isinstance(error, CopyLost):
                raise error
            # If the work failed, this raises the error once the traffic thread has recorded it.
            self.wait_until(lambda: bool(answers))
        return answers[0]

    def run_posted(self) -> bool:
        """Run the posted work, in the traffic thread. Returns False if none was posted."""
        worked = False
        while True:
            with self:
                if not self._posted:
                    return worked
                work = self._posted.popleft()
            work()
            worked = True
