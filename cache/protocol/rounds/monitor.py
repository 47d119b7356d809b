"""What a trainer and its traffic's thread share: a lock, a way to wait for each other, and the failure or the end of the thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from foreload.cache.errors import CacheError, CopyLost

Answer = TypeVar("Answer")


class Monitor(threading.Condition):
    """A condition over the state that both sides see; whoever looks at that or changes it holds this.

    Whatever the thread fails with is raised by every later wait of the trainer. interrupted: what a wait raises that would have to wait. over:
    there is no thread any more, and nobody waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self.interrupted: CopyLost | None = None
        self.stopping = False
        self.over = False
        self.signals = 1  # raised by whatever may give the thread something to do
        self._posted: deque[Callable[[], None]] = deque()

    def signal(self) -> None:
        """Wake the thread, and whoever waits."""
        self.signals += 1
        self.notify_all()

    def wake(self) -> None:
        """`signal`, for who does not hold this."""
        with self:
            self.signal()

    def fail(self, error: BaseException) -> None:
        """The thread is over."""
        with self:
            self.failure = error
            self.notify_all()

    def interrupt(self, error: CopyLost | None) -> None:
        """From now on the trainer does not wait, but has this raised; None: it waits again."""
        with self:
            self.interrupted = error
            self.notify_all()

    def wait_until(self, satisfied: Callable[[], bool], poll: timedelta | None = None) -> None:
        """Wait until it is so; poll: asked that often even if nobody signals. Raises the thread's failure, CacheError where it was stopped, and
        CopyLost while the trainer is interrupted.
        """
        while not self.over:
            if self.failure is not None:
                raise self.failure
            if self.stopping:
                raise CacheError("traffic: is closed")
            if satisfied():
                return
            if self.interrupted is not None:
                raise self.interrupted
            self.wait(poll.total_seconds() if poll is not None else None)

    def post(self, work: Callable[[], None]) -> None:
        """Have the thread do something between two rounds, without this held; what the work raises ends the thread, as its failure."""
        with self:
            self._posted.append(work)
            self.signal()

    def ask(self, work: Callable[[], Answer]) -> Answer:
        """`post` some work, and wait for what it returns. Raises as `wait_until` does, and CopyLost where the work does, which does not end the
        thread.

        Where the trainer is interrupted, work that has not begun is not done at all.
        """
        answers: list[Answer] = []
        refused: list[CopyLost] = []
        begun = given_up = False

        def answer() -> None:
            nonlocal begun
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
                while begun and self.failure is None and not self.stopping and not (answers or refused):
                    self.wait()
                if not (answers or refused):
                    raise
        if refused:
            raise refused[0]
        return answers[0]

    def beside_rounds(self, prepare: Callable[[], object], work: Callable[[], Answer]) -> Answer:
        """Do some work here, in the caller's thread, while the other one, having done `prepare`, rests between two rounds.

        For what a trainer waits for: the thread has a lower priority. What either raises ends the thread, as its failure, which is raised here; but
        not CopyLost, of the work or of a trainer that is interrupted: then the thread goes on.
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
                over.append(None)
                self.notify_all()
                raise
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
            self.wait_until(lambda: bool(answers))
        return answers[0]

    def run_posted(self) -> bool:
        """The thread's side: do what was posted; False if there was nothing."""
        worked = False
        while True:
            with self:
                if not self._posted:
                    return worked
                work = self._posted.popleft()
            work()
            worked = True
