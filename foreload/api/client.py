"""The caller's side of calls, each of which is answered by a process that a fork server forks for it.

In the caller's process there are no threads, signal handlers or changes to the environment for this. There is one fork server for each set of
numerics and of variables that are read at start; one that no call uses is closed when another is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreload.base.errors import SettingError, error_of
from foreload.base.own_process import command_of
from foreload.base.process import THREADLESS, UTF8, working_directory
from foreload.base.socket_messages import Message, receive, send
from foreload.trainer.compute.numerics import environment

# Variables that a process, or a library, reads when it is loaded: a fork server keeps those of its start, so other values need another server.
_READ_AT_START = (
    "ATEN_", "CUBLAS_", "CUDA_", "FORELOAD_LOCAL_SERVER", "GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NUMBA_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTHON", "TORCH",
)  # fmt: skip
_TAIL_BYTES = 1 << 14  # of what a call wrote to stdout and stderr, kept for an error that nobody foresaw
_READ_BYTES = 1 << 16

_lock = threading.Lock()
_servers: dict[Any, _Server] = {}
_forbidden = False


@dataclass(frozen=True, slots=True)
class Numerics:
    """What of a job decides in which fork server it may run."""

    cpu_capability: str = "avx2"
    threads: int = 1


def forbid() -> None:
    """Refuse calls in this process and its children: a model's file that they import may make calls where it is imported."""
    global _forbidden
    _forbidden = True


def result(name: str, values: Mapping[str, Any], numerics: Numerics | None, progress: bool = False) -> dict[str, Any]:
    """The JSON values that a call with a single result gives; arguments and errors as in `parts`."""
    with contextlib.closing(parts(name, values, numerics, progress)) as pieces:
        last: dict[str, Any] = [message.values for message in pieces][-1]
    return last


def parts(name: str, values: Mapping[str, Any], numerics: Numerics | None, progress: bool = False) -> Generator[Message]:
    """What a call gives, piece by piece. name: in `foreload.api.calls.CALLS`; values: its arguments; numerics: None where torch is not needed.

    progress: whether what the call writes goes to stderr. Ctrl-C asks the call for a clean stop; KeyboardInterrupt is raised when it has come to
    rest. Raises the ForeloadError or OSError that the call ended with, and RuntimeError for anything else.
    """
    if _forbidden:
        raise SettingError(
            f'{name}: is called while a model\'s file is imported for a training; put the calls under `if __name__ == "__main__":`'
        )
    with _Call(name, dict(values), numerics, progress) as call:
        yield from call.messages()


class _Call:
    """A call under way. progress: what it writes goes to this process's stderr, else only the last of it is kept, for errors that nobody foresaw."""

    def __init__(self, name: str, values: dict[str, Any], numerics: Numerics | None, progress: bool) -> None:
        folder = working_directory()
        self._progress, self._tail, self._silent = progress, bytearray(), False
        self._interrupted, self._finished = False, False
        self._reply, theirs = socket.socketpair()
        self._output, output = os.pipe()
        if progress and _at_terminal():
            # Progress is one line that is written over again; the call does so only where its output is a terminal.
            os.dup2(2, output, inheritable=False)
        request = {
            "call": name,
            "values": values,
            "torch": numerics is not None,
            "environment": os.environ | UTF8,
            "folder": folder,
        }
        try:
            self._server, self._process, self._interrupted = _start(numerics or Numerics(), request, [theirs.fileno(), output])
        except BaseException:
            self._reply.close()
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(output)

    def __enter__(self) -> _Call:
        if self._interrupted:
            self._stop()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Its process has ended when this returns; left before its end, it is asked for a clean stop."""
        if not self._finished:
            self._stop()
        self._reply.close()
        while not self._wait(self._process):
            pass
        with _lock:
            self._server.running -= 1
        os.close(self._process)
        os.close(self._output)
        if self._interrupted and kind is None:
            raise KeyboardInterrupt

    def messages(self) -> Generator[Message]:
        """The pieces of the answer, up to its end. Raises the error that it ended with."""
        while True:
            while not self._wait(self._reply.fileno()):
                pass
            message = receive(self._reply)
            if message is None or "part" not in message.values:
                self._finished = True
                self._raise(None if message is None else message.values)
                return
            if not self._interrupted:
                yield Message(message.values["part"], message.payload, [])

    def _raise(self, end: Mapping[str, Any] | None) -> None:
        """Raise what the call ended with, unless that is nothing, or what was asked for. end: None where it could not say."""
        if self._interrupted or end == {}:
            return
        if end is None or "unforeseen" in end:
            self._wait(self._process)
            what = "the process that did it was killed" if end is None else end["unforeseen"]
            raise RuntimeError(f"foreload: {what}\n{self._tail.decode(errors='replace')}".rstrip())
        if "errno" in end:
            raise OSError(end["errno"], end["message"], end["filename"])
        # All classes of the tree must be there to be found.
        for module in ("foreload.pipelines.errors", "foreload.cache.errors", "foreload.trainer.errors"):
            importlib.import_module(module)
        raise error_of(end["code"], end["message"])

    def _wait(self, descriptor: int) -> bool:
        """Wait until something can be read; whether it is of this descriptor. What the call writes is passed on first, and Ctrl-C handed on to it."""
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not self._silent:
                poll.register(self._output, select.POLLIN)
            ready = {descriptor_ready for descriptor_ready, _ in poll.poll()}
            if self._output in ready:
                self._pass_on(os.read(self._output, _READ_BYTES))
            return descriptor in ready and self._output not in ready
        except KeyboardInterrupt:
            self._interrupted = True
            self._stop()
            return False

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGINT)

    def _pass_on(self, text: bytes) -> None:
        if not text:
            self._silent = True
        elif self._progress:
            with contextlib.suppress(OSError, ValueError):  # whoever reads this process's stderr may be gone
                sys.stderr.write(text.decode(errors="replace"))
                sys.stderr.flush()
        else:
            self._tail = (self._tail + text)[-_TAIL_BYTES:]


def _at_terminal() -> bool:
    """Whether what is written to this process's stderr goes to a terminal."""
    return sys.stderr is sys.__stderr__ and os.isatty(2)


class _Server:
    """A fork server of this process. running: how many of its calls are under way."""

    def __init__(self, numerics: Numerics) -> None:
        self.running = 0
        self._control, theirs = socket.socketpair()
        variables = os.environ | environment(numerics.cpu_capability, numerics.threads) | THREADLESS | UTF8
        with theirs:
            self._process = subprocess.Popen(
                command_of("foreload.api.fork_server", str(theirs.fileno())), env=variables,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[int, bool]:
        """Have a request answered: a descriptor of the process that does, and whether Ctrl-C came meanwhile, as importing takes seconds.

        Raises OSError where the server is no more.
        """
        send(self._control, request, descriptors=descriptors)
        interrupted = False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        # The answer is waited for in any case, for it is of a process that must be stopped.
        while True:
            try:
                poll.poll()
                break
            except KeyboardInterrupt:
                interrupted = True
        answer = receive(self._control)
        if answer is None:
            raise BrokenPipeError("the fork server has ended")
        self.running += 1
        (process,) = answer.descriptors
        return process, interrupted

    def abandon(self) -> None:
        """Let go of it, without ending it, in a process that was forked from its owner."""
        self._control.close()
        self._process.returncode = 0  # it is no child of this one

    def close(self) -> None:
        """End it; what still runs is stopped first."""
        self._control.close()
        self._process.wait()


def _start(numerics: Numerics, request: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[_Server, int, bool]:
    """Start a call in the fork server for these numerics, which is started if it is not there; the rest is as _Server.start gives it."""
    read_at_start = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)}
    key = numerics, tuple(sorted(read_at_start.items()))
    with _lock:
        for other, server in list(_servers.items()):
            if other != key and not server.running:
                _servers.pop(other).close()
        if key in _servers:
            with contextlib.suppress(OSError):
                return _servers[key], *_servers[key].start(request, descriptors)
            _servers.pop(key).close()
        server = _servers[key] = _Server(numerics)
        return server, *server.start(request, descriptors)


def _abandon_all() -> None:
    """In a process that is forked from this one: the servers, and the lock, are the parent's."""
    global _lock
    _lock = threading.Lock()
    for server in _servers.values():
        server.abandon()
    _servers.clear()


def close_all() -> None:
    """End this process's fork servers: what still runs in them is stopped first. The next call starts one anew."""
    with _lock:
        for server in _servers.values():
            server.close()
        _servers.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_abandon_all)
