"""Threads for the coordinator's slow work.

With them a slow disk, or a server that does not answer, does not block the coordinator.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

CLOSE_SECONDS = 20.0
"""How long the end of a call waits for the work under way."""

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a new daemon thread. The process does not wait for it when it ends."""
    future: Future[Result] = Future()
    threading.Thread(target=fulfil, args=(future, work), name="background", daemon=True).start()
    return future


def fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    """Run `work` and set its result, or its error, in `future`."""
    try:
        future.set_result(work())
    # Every error goes to the future. Otherwise its reader would wait for ever.
    except BaseException as error:
        future.set_exception(error)


class FolderWork:
    """Runs work in a folder of checkpoints, in the order of submission, in one thread.

    Work that is not done when the process ends is dropped. Unlike an executor's thread, this one
    does not keep the process alive.
    """

    def __init__(self) -> None:
        self._to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` after everything submitted before."""
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
        """Wait for all submitted work, for at most `CLOSE_SECONDS`."""
        if self._thread is not None:
            with contextlib.suppress(TimeoutError):
                self.submit(lambda: None).result(CLOSE_SECONDS)
