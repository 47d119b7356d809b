"""What the coordinator and the trainers of a job tell each other, through the rendezvous store that the coordinator holds.

The coordinator lives in the launcher, or in rank 0 of a job that a scheduler started; its store in a process beside it (`keeper`). It alone says who
hosts which lane in which term. A stop
is agreed so that all trainers end after the same step: the trainer that hosts lane 0, asked after step t, names t + 1; nobody finishes step
t + 1 without its part of it, so everybody has read the name by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foreload.trainer.cluster.keeper import STOP_WANTED
from foreload.trainer.errors import PeerLost, RunError
from foreload.trainer.run.directory import CONTROL

FLUSH_SECONDS = 0.1
_SOCKET_PATH_BYTES = 100


def host_store(address: str, timeout: timedelta, listening: int | None = None) -> Any:
    """The rendezvous store of a job, which lives as long as the object. listening: a socket's descriptor, else a free port is taken."""
    if listening is None:
        return dist.TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
    with socket.socket(fileno=listening) as bound:
        port = bound.getsockname()[1]
        return dist.TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=bound.detach())


def join_store(address: str, port: int, timeout: timedelta) -> Any:
    """A trainer's connection to the rendezvous store. Raises PeerLost if it is not there."""
    try:
        return dist.TCPStore(address, port, None, False, timeout)
    except RuntimeError as error:
        raise PeerLost(f"coordinator at {address}:{port}: cannot be reached; is the launcher still there?") from error


def contiguous_lanes(lanes: int, trainers: int) -> list[int]:
    """The lane map of an undisturbed job: lane -> trainer, in blocks that differ by at most one lane."""
    return [lane * trainers // lanes for lane in range(lanes)]


class Board:
    """Facts of the job by name, JSON, published once and read by everybody; plus each trainer's mail to the coordinator.

    One thread uses it. Where the coordinator has gone, every call raises PeerLost.
    """

    def __init__(self, store: Any) -> None:
        self._store = dist.PrefixStore("foreload", store)

    def publish(self, name: str, value: Any) -> None:
        """State a fact. When this returns, whoever asks sees it."""
        with _reachable():
            self._store.set(name, json.dumps(value))
            # `set` does not wait for the server; a question on the same connection does.
            self._store.check([name])

    def read(self, name: str) -> Any:
        """A fact, waited for as long as the store's timeout allows."""
        with _reachable():
            return json.loads(self._store.get(name))

    def poll(self, name: str) -> Any | None:
        """A fact, or None if it was not stated yet."""
        with _reachable():
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def take(self, name: str) -> Any | None:
        """A fact that only one reader is interested in: it is gone afterwards. None if it was not stated yet."""
        value = self.poll(name)
        if value is not None:
            with _reachable():
                self._store.delete_key(name)
        return value

    def publish_lane_map(self, term: int, lane_map: Sequence[int]) -> None:
        """Say who hosts which lane in a term: trainers by lane."""
        self.publish(f"term/{term}/lanes", list(lane_map))

    def lane_map(self, term: int) -> list[int]:
        """Who hosts which lane in a term."""
        return [int(trainer) for trainer in self.read(f"term/{term}/lanes")]


class StopAgreement:
    """A trainer's side of the agreement on the step to stop after; `leads` for the trainer that names it."""

    def __init__(self, board: Board, leads: bool) -> None:
        self._board = board
        self._leads = leads
        self._after: int | None = None

    def stop_after(self, step: int) -> bool:
        """Whether training stops after `step`; to be asked by every trainer after every step."""
        if self._after is None:
            if not self._leads:
                self._after = self._board.poll("stop/after")
            elif self._board.poll(STOP_WANTED):
                self._after = step + 1
                self._board.publish("stop/after", step + 1)
        return self._after is not None and step >= self._after


class EventSender:
    """A trainer's reports to the coordinator, sent a few at a time."""

    def __init__(self, board: Board, trainer: int) -> None:
        self._board = board
        self._trainer = trainer
        self._held: list[dict[str, Any]] = []
        self._sent = 0
        self._sent_at = time.monotonic()

    def send(self, kind: str, **content: Any) -> None:
        """Report something; steps may be held back for a moment, all else goes at once."""
        self._held.append({"kind": kind, "trainer": self._trainer, **content})
        if kind != "step" or time.monotonic() - self._sent_at > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send what is held back."""
        if self._held:
            self._board.publish(f"events/{self._trainer}/{self._sent}", self._held)
            self._sent += 1
            self._held = []
            self._sent_at = time.monotonic()


class EventReceiver:
    """The coordinator's side of the trainers' mail."""

    def __init__(self, board: Board, trainers: int) -> None:
        self._board = board
        self._next = [0] * trainers

    def poll(self) -> Iterator[dict[str, Any]]:
        """What has come in since, in each trainer's order."""
        for trainer in range(len(self._next)):
            while (held := self._board.take(f"events/{trainer}/{self._next[trainer]}")) is not None:
                self._next[trainer] += 1
                yield from held


class ControlSocket:
    """RUN/control.sock: JSON lines over a Unix socket, one request a line, such as {"do": "status"}, and one answer a line.

    does: what can be asked for, by name; each is called with the request, in a thread of the socket's.
    """

    def __init__(self, run: Path, does: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]) -> None:
        path = run / CONTROL
        path.unlink(missing_ok=True)
        self._path = path
        self._elsewhere: Path | None = None
        bound = path.absolute()
        if len(os.fsencode(bound)) > _SOCKET_PATH_BYTES:
            self._elsewhere = Path(tempfile.mkdtemp(prefix="foreload-"))
            bound = self._elsewhere / CONTROL
            path.symlink_to(bound)

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    self.wfile.write(json.dumps(answer(line)).encode() + b"\n")

        def answer(line: bytes) -> Mapping[str, Any]:
            try:
                request = json.loads(line)
                do = request["do"]
            except (ValueError, KeyError, TypeError):
                return {"error": 'a request is a line such as {"do": "status"}'}
            if do not in does:
                return {"error": f"cannot do {do!r}; there are {', '.join(does)}"}
            return does[do](request)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(str(bound), Handler)
        bound.chmod(0o600)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._path.unlink(missing_ok=True)
        if self._elsewhere is not None:
            (self._elsewhere / CONTROL).unlink(missing_ok=True)
            self._elsewhere.rmdir()


def ask(run: Path, request: Mapping[str, Any], timeout: timedelta = timedelta(seconds=5)) -> dict[str, Any] | None:
    """Ask a training run through its control socket; None if nothing trains there, or no more. Raises RunError if it does not answer in time."""
    # A link leads to the socket where the run's own path is too long for one.
    path = os.path.realpath(run / CONTROL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout.total_seconds())
        try:
            connection.connect(path)
        except OSError:
            return None
        try:
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
            with connection.makefile("r", encoding="utf-8") as answers:
                answer = answers.readline()
        except TimeoutError as error:
            raise RunError(
                f"run {run}: is being trained, but its launcher does not answer for {timeout.total_seconds():g} s; is that process stopped?"
            ) from error
        except OSError:
            return None
    if not answer:  # it ended meanwhile
        return None
    found: dict[str, Any] = json.loads(answer)
    return found


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        raise PeerLost(f"coordinator: the rendezvous store does not answer ({line}); is the launcher still there?") from error
