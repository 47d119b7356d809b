"""RUN/control.sock, the queue that brings users' requests to the coordinator's thread, and those that all trainers do together."""

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
    """The side of the run that trains. respond: answers a request, in the thread of the connection that it came by."""

    def __init__(self, run: Path, respond: Callable[[ControlRequest], Answer]) -> None:
        self._path = run / CONTROL
        self._path.unlink(missing_ok=True)
        self._elsewhere: Path | None = None

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # A client that goes away wants no answer any more.
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
            self._path.chmod(0o600)
        except OSError as error:
            why = error.strerror or error
            if self._server is not None:
                self._server.server_close()
                self._server = None  # it never served, and so cannot be shut down
            self._remove()
            sys.stderr.write(
                f"foreload: warning: {self._path}: cannot be made ({why}), so the run cannot be asked anything while it trains\n"
            )
            return
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="control", daemon=True)
        self._thread.start()

    def _bound(self, bind: Callable[[Path], _Bound]) -> _Bound:
        """A socket in the run's folder or, where its path is too long or its file system has none, elsewhere, with a link to it. Raises OSError."""
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


COUNT_TIMEOUT = timedelta(seconds=3)  # less than an answer on the control socket may take


@dataclass(slots=True)
class _Scrub:
    """The last scrub: by which trainers, what each of them last reported of it, and why it is over, if that is not since all are through."""

    number: int
    members: frozenset[int]
    reports: dict[int, Scrubbed] = field(default_factory=dict)
    failed: str | None = None

    @property
    def done(self) -> bool:
        """Whether each trainer is through with its lanes."""
        return self.reports.keys() == self.members and all(scrubbed.done for scrubbed in self.reports.values())

    @property
    def under_way(self) -> bool:
        return self.failed is None and not self.done


@dataclass(slots=True)
class _Count:
    """The last count: what each trainer counted; answer: set once all have, or it is until then, by the clock, and they have not."""

    number: int
    until: float
    answers: dict[int, HeldRows] = field(default_factory=dict)
    answer: Future[Answer] = field(default_factory=Future)


class RunRequests:
    """The coordinator's side. members: the trainers' numbers; plan: what they are told."""

    def __init__(self, call: TrainingCall, members: Iterable[int], plan: PublishedPlan) -> None:
        self._call, self._members, self._plan = call, frozenset(members), plan
        self._number = 0
        self._scrub: _Scrub | None = None
        self._count: _Count | None = None

    def on_term(self, members: Iterable[int]) -> None:
        """Who the trainers are from now on. What the earlier ones were asked for may never be answered: it has failed."""
        self._members = frozenset(members)
        if self._scrub is not None and self._scrub.under_way:
            self._scrub.failed = "its trainers, or their lanes, changed meanwhile; scrub it again"
            self._plan.change(scrub=None)
        self._end_count(())

    def scrub(self, request: AskScrub) -> ScrubBegun | Refused:
        """Begin a scrub, if none is under way."""
        if not self._call.run.placement.r:
            return Refused("it has no parity, so there is nothing to check its rows against; train with --parity")
        if self._call.job.coordinator is not None:
            return Refused("it trains on several hosts, which cannot be told of its rows; scrub it when it rests")
        if self._scrub is not None and self._scrub.under_way:
            return Refused("a scrub of it is under way already; wait for its end")
        self._scrub = _Scrub(self._next_number(), self._members)
        self._plan.change(scrub=ScrubPlan(self._scrub.number, request.rows))
        return ScrubBegun(self._scrub.number)

    def scrubbed(self) -> ScrubProgress | Refused:
        """How far the last scrub is."""
        scrub = self._scrub
        if scrub is None:
            return ScrubProgress(False, 0, ())
        if scrub.failed is not None:
            return Refused(scrub.failed)
        parts = tuple(scrub.reports.values())
        return ScrubProgress(scrub.done, sum(part.stripes for part in parts), parts)

    def row_counts(self) -> Future[Answer]:
        """What each trainer counts; nothing at all where one does not answer within COUNT_TIMEOUT."""
        if self._count is None:
            self._count = _Count(self._next_number(), self._call.clock() + COUNT_TIMEOUT.total_seconds())
            self._plan.change(count=self._count.number)
        return self._count.answer

    def poll(self) -> None:
        """Answer a count that takes too long."""
        if self._count is not None and self._call.clock() > self._count.until:
            self._end_count(())

    def receive(self, trainer: int, report: RequestReport) -> None:
        """What a trainer reports of a request; of one before the last it does not count."""
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
