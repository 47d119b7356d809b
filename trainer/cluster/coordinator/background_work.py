"""What the coordinator has threads do: a slow disk, or a server that does not answer, holds up nobody."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

CLOSE_SECONDS = 20.0
"""How long the end of a call waits for what is under way."""

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Have something done in a thread of its own, which nobody waits for when the process ends."""
    future: Future[Result] = Future()
    threading.Thread(target=fulfil, args=(future, work), name="background", daemon=True).start()
    return future


def fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    """Do something, and give what comes of it, or its error, to a future."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


class FolderWork:
    """Does one thing after the other in a folder of checkpoints. What is not done when its process ends is left: unlike an executor's, its thread is
    not waited for.
    """

    def __init__(self) -> None:
        self._to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Have something done after all before."""
        future: Future[Result] = Future()
        self._to_do.put(partial(fulfil, future, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while True:
            self._to_do.get()()

    def close(self) -> None:
        """Wait for all that is to be done, but not for long."""
        if self._thread is not None:
            with contextlib.suppress(TimeoutError):
                self.submit(lambda: None).result(CLOSE_SECONDS)
