"""RUN/control.sock, and the handling of the requests that arrive there.

A queue brings users' requests to the coordinator's thread. `RunRequests` handles those that all
trainers work on together.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import socketserver
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from foreload.base.codec import to_json
from foreload.base.errors import ForeloadError
from foreload.cache.repair.findings import Scrubbed
from foreload.trainer.cluster.coordinator.training_call import PublishedPlan, TrainingCall
from foreload.trainer.cluster.messages.control import (
    Answer,
    AskScrub,
    ControlRequest,
    Refused,
    RowCountsAnswer,
    ScrubBegun,
    ScrubProgress,
    request_of,
)
from foreload.trainer.cluster.messages.trainers import (
    HeldRows,
    RequestReport,
    ScrubPlan,
)
from foreload.trainer.errors import MessageError
from foreload.trainer.run.directory import CONTROL

_SOCKET_PATH_BYTES = 100  # the kernel takes 107
_Bound = TypeVar("_Bound")


class ControlSocket:
    """The control socket of a run that trains.

    Args:
        respond: Answers a request. It is called in the thread of the request's connection.
    """

    def __init__(self, run: Path, respond: Callable[[ControlRequest], Answer]) -> None:
        self._path = run / CONTROL
        # A launcher that was killed may have left its socket.
        self._path.unlink(missing_ok=True)
        self._elsewhere: Path | None = None

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # A client may close its connection before it has read the answer.
                with contextlib.suppress(ConnectionError):
                    for line in self.rfile:
                        self.wfile.write(json.dumps(to_json(answered(line))).encode() + b"\n")

        def answered(line: bytes) -> Answer:
            try:
                request = request_of(line)
            except MessageError as error:
                return Refused(str(error))
            return respond(request)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        self._server: Server | None = None
        try:
            self._server = self._bound(lambda path: Server(str(path), Handler))
            # Only the user who owns the run may send requests.
            self._path.chmod(0o600)
        except OSError as error:
            why = error.strerror or error
            if self._server is not None:
                # The server has not served yet, so `shutdown` would block.
                self._server.server_close()
                self._server = None
            self._remove()
            sys.stderr.write(
                f"foreload: warning: {self._path}: cannot be made ({why}), so the run answers no commands while it trains\n"
            )
            return
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="control", daemon=True)
        self._thread.start()

    def _bound(self, bind: Callable[[Path], _Bound]) -> _Bound:
        """Bind a socket in the run's folder, or elsewhere with a link to it from there.

        It is elsewhere if the path is too long or the file system has no sockets.

        Raises:
            OSError: No socket can be bound.
        """
        path = self._path.absolute()
        if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
            with contextlib.suppress(OSError):
                return bind(path)
        self._path.unlink(missing_ok=True)
        self._elsewhere = Path(tempfile.mkdtemp(prefix="foreload-"))
        self._path.symlink_to(self._elsewhere / CONTROL)
        return bind(self._elsewhere / CONTROL)

    def close(self) -> None:
        """Stop answering and remove the socket."""
        if self._server is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._remove()

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._elsewhere is not None:
            shutil.rmtree(self._elsewhere, ignore_errors=True)


def _refused(error: BaseException) -> Refused:
    """Return the refusal of a request whose handling raised an error."""
    if isinstance(error, ForeloadError):
        return Refused(str(error))
    # Any other error is a fault in the handling. It is logged and answered, and does not end the
    # training.
    traceback.print_exception(error, file=sys.stderr)
    return Refused(f"the request failed: {type(error).__name__}: {error}")


class RequestQueue:
    """The requests of one call.

    Any thread may call `ask`; only the coordinator's thread calls the other methods. So requests
    are handled in one thread, and what they change needs no lock.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[ControlRequest, Future[Answer]]] = queue.SimpleQueue()
        # Pairs of a result that is not known yet, and the answer that waits for it.
        self._later: list[tuple[Future[Answer], Future[Answer]]] = []
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._closed = False

    def ask(self, request: ControlRequest) -> Answer:
        """Put a request to the coordinator and wait for the answer.

        Raises:
            ConnectionError: The coordinator no longer answers requests.
        """
        answer: Future[Answer] = Future()
        # Put the request first and then check `_closed`: `close` may have emptied the queue before,
        # and nobody else would cancel this request.
        self._asked.put((request, answer))
        if self._closed:
            self._refuse_rest()
        else:
            # Sending fails if so many requests wait that the buffer is full, or if the queue was
            # closed just now. Neither matters.
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")
        try:
            return answer.result()
        except CancelledError:
            raise ConnectionAbortedError("the run no longer answers") from None

    def fileno(self) -> int:
        """Return a descriptor that is readable while a request waits."""
        return self._wakes.fileno()

    def answer(self, respond: Callable[[ControlRequest], Answer | Future[Answer]]) -> None:
        """Answer the requests that came since the last call.

        Args:
            respond: Returns the answer to a request, or a future of it. If either raises an error,
                the request is refused.
        """
        # Clear the wake-ups before taking requests. In the other order, the wake-up of a request
        # that comes in between would be lost.
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
        """Stop answering: requests that wait, and all later ones, are cancelled."""
        self._closed = True
        self._refuse_rest()
        for _, answer in self._later:
            answer.cancel()
        self._wakes.close()
        self._wake.close()

    def _refuse_rest(self) -> None:
        for _, answer in self._taken():
            answer.cancel()


COUNT_TIMEOUT = timedelta(seconds=3)  # shorter than a client waits for an answer


@dataclass(slots=True)
class _Scrub:
    """The last scrub.

    Attributes:
        number: The number of the request.
        members: The trainers that take part.
        reports: The last report of each trainer.
        failed: Why the scrub ended early. None if it has not.
    """

    number: int
    members: frozenset[int]
    reports: dict[int, Scrubbed] = field(default_factory=dict)
    failed: str | None = None

    @property
    def done(self) -> bool:
        """Whether each trainer has checked all of its lanes."""
        return self.reports.keys() == self.members and all(scrubbed.done for scrubbed in self.reports.values())

    @property
    def under_way(self) -> bool:
        return self.failed is None and not self.done


@dataclass(slots=True)
class _Count:
    """A count of the rows that the store holds.

    Attributes:
        number: The number of the request.
        until: When the count has taken too long, by the call's clock.
        answers: The count of each trainer that has answered.
        answer: Set once all trainers have answered, or at `until`.
    """

    number: int
    until: float
    answers: dict[int, HeldRows] = field(default_factory=dict)
    answer: Future[Answer] = field(default_factory=Future)


class RunRequests:
    """The coordinator's side of the requests on which all trainers work: scrubs and counts."""

    def __init__(self, call: TrainingCall, members: Iterable[int], plan: PublishedPlan) -> None:
        self._call, self._members, self._plan = call, frozenset(members), plan
        self._number = 0
        self._scrub: _Scrub | None = None
        self._count: _Count | None = None

    def on_term(self, members: Iterable[int]) -> None:
        """Begin a term with these members.

        A scrub or count under way fails, since the earlier trainers may never answer it.
        """
        self._members = frozenset(members)
        if self._scrub is not None and self._scrub.under_way:
            self._scrub.failed = "its trainers, or their lanes, changed meanwhile; scrub it again"
            self._plan.change(scrub=None)
        self._end_count(())

    def scrub(self, request: AskScrub) -> ScrubBegun | Refused:
        """Begin a scrub unless it must be refused, as while another one is under way."""
        if not self._call.run.placement.r:
            return Refused("it has no parity rows to check its rows against; train with --parity")
        if self._call.job.coordinator is not None:
            return Refused("it trains on several hosts, which cannot get the list of its rows; scrub it when it is stopped")
        if self._scrub is not None and self._scrub.under_way:
            return Refused("a scrub of it is under way already; wait for its end")
        self._scrub = _Scrub(self._next_number(), self._members)
        self._plan.change(scrub=ScrubPlan(self._scrub.number, request.rows))
        return ScrubBegun(self._scrub.number)

    def scrubbed(self) -> ScrubProgress | Refused:
        """Return the progress of the last scrub."""
        scrub = self._scrub
        if scrub is None:
            return ScrubProgress(False, 0, ())
        if scrub.failed is not None:
            return Refused(scrub.failed)
        parts = tuple(scrub.reports.values())
        return ScrubProgress(scrub.done, sum(part.stripes for part in parts), parts)

    def row_counts(self) -> Future[Answer]:
        """Have each trainer count its rows on the store.

        If a trainer does not answer within `COUNT_TIMEOUT`, the answer has no counts at all.
        """
        if self._count is None:
            self._count = _Count(self._next_number(), self._call.clock() + COUNT_TIMEOUT.total_seconds())
            self._plan.change(count=self._count.number)
        return self._count.answer

    def poll(self) -> None:
        """End a count that takes too long."""
        if self._count is not None and self._call.clock() > self._count.until:
            self._end_count(())

    def receive(self, trainer: int, report: RequestReport) -> None:
        """Handle a trainer's report on a request. Reports on earlier requests are ignored."""
        scrub, count = self._scrub, self._count
        if count is not None and count.number == report.number and report.held is not None:
            count.answers[trainer] = report.held
            if count.answers.keys() == self._members:
                self._end_count(count.answers.values())
        elif scrub is not None and scrub.number == report.number and scrub.under_way:
            scrub.failed = report.failed
            if report.scrubbed is not None:
                scrub.reports[trainer] = report.scrubbed

    def _end_count(self, counted: Iterable[HeldRows]) -> None:
        count, self._count = self._count, None
        if count is not None:
            count.answer.set_result(RowCountsAnswer(tuple(counted)))

    def _next_number(self) -> int:
        self._number += 1
        return self._number
