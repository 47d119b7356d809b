"""What users ask of a run that trains: threads of its control socket put it here, and the coordinator answers between two looks at trainers."""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

from foreload.base.errors import ForeloadError
from foreload.trainer.cluster.messages.control import Answer, ControlRequest, Refused


def _refused(error: BaseException) -> Refused:
    """The answer where one of the package's errors says why not. A fault in what answers is told, too: it is no reason to end the training."""
    if isinstance(error, ForeloadError):
        return Refused(str(error))
    traceback.print_exception(error, file=sys.stderr)
    return Refused(f"it cannot be answered: {type(error).__name__}: {error}")


class RequestQueue:
    """The requests of one call. Any thread may call `ask`, the coordinator's own all else; so what requests change needs no lock."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[ControlRequest, Future[Answer]]] = queue.SimpleQueue()
        self._later: list[tuple[Future[Answer], Future[Answer]]] = []  # what is yet to be known, and the answers that wait for it
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._closed = False

    def ask(self, request: ControlRequest) -> Answer:
        """Have the coordinator answer, and wait for that. Raises ConnectionError once it answers nothing any more."""
        answer: Future[Answer] = Future()
        self._asked.put((request, answer))
        if self._closed:
            self._refuse_rest()
        else:
            with contextlib.suppress(OSError):  # many wait already, or it was closed just now
                self._wake.send(b"\0")
        try:
            return answer.result()
        except CancelledError:
            raise ConnectionAbortedError("the run answers nothing any more") from None

    def fileno(self) -> int:
        """A descriptor that can be read from while a request waits."""
        return self._wakes.fileno()

    def answer(self, respond: Callable[[ControlRequest], Answer | Future[Answer]]) -> None:
        """Answer what was asked since. respond: gives the answer, or a future that the coordinator's thread sets; the package's errors refuse."""
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)
        for request, answer in self._taken():
            try:
                given = respond(request)
            except Exception as error:
                given = _refused(error)
            if isinstance(given, Future):
                self._later.append((given, answer))
            else:
                answer.set_result(given)
        for given, answer in self._later:
            if given.done():
                failed = given.exception()
                answer.set_result(given.result() if failed is None else _refused(failed))
        self._later = [waiting for waiting in self._later if not waiting[0].done()]

    def _taken(self) -> Iterator[tuple[ControlRequest, Future[Answer]]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._asked.get_nowait()

    def close(self) -> None:
        """Answer nothing any more."""
        self._closed = True
        self._refuse_rest()
        for _, answer in self._later:
            answer.cancel()
        self._wakes.close()
        self._wake.close()

    def _refuse_rest(self) -> None:
        for _, answer in self._taken():
            answer.cancel()
