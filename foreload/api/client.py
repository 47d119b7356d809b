"""The caller's side of calls. A fork server forks a process to answer each call.

For this the caller's process has no threads and no signal handlers, and its environment does not
change. There is one fork server for each set of numerics and of variables that are read at start. A
fork server that no call uses is closed when another one is needed.
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

# A process or a library reads these variables when it is loaded. A fork server keeps the values of
# its start, so other values need another server.
_READ_AT_START = (
    "ATEN_",
    "CUBLAS_",
    "CUDA_",
    "FORELOAD_LOCAL_SERVER",
    "GLIBC_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "NUMBA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH",
)
# The end of a call's stdout and stderr that is kept for an unforeseen error.
_TAIL_BYTES = 1 << 14
_READ_BYTES = 1 << 16

_lock = threading.Lock()
_servers: dict[Any, _Server] = {}
_forbidden = False


@dataclass(frozen=True, slots=True)
class Numerics:
    """The settings of a job that decide in which fork server it runs."""

    cpu_capability: str = "avx2"
    threads: int = 1


def forbid() -> None:
    """Refuse calls in this process and its children.

    They import model files, and a model file may make calls at its top level.
    """
    global _forbidden
    _forbidden = True


def result(name: str, values: Mapping[str, Any], numerics: Numerics | None, progress: bool = False) -> dict[str, Any]:
    """Return the JSON values of a call with a single result.

    The arguments and the errors are those of `parts`.
    """
    with contextlib.closing(parts(name, values, numerics, progress)) as pieces:
        last: dict[str, Any] = [message.values for message in pieces][-1]
    return last


def parts(name: str, values: Mapping[str, Any], numerics: Numerics | None, progress: bool = False) -> Generator[Message]:
    """Run a call, and yield its result part by part.

    Ctrl-C asks the call for a clean stop. KeyboardInterrupt is raised when the call has stopped.

    Args:
        name: the call's name in `foreload.api.calls.CALLS`.
        values: the call's arguments.
        numerics: if None, the call does not need torch.
        progress: whether the call's output goes to stderr.

    Raises:
        ForeloadError: the error that the call ended with; likewise OSError.
        RuntimeError: the call ended with any other error, or its process was killed.
    """
    if _forbidden:
        raise SettingError(
            f'{name}: is called while a model\'s file is imported for a training; put the calls under `if __name__ == "__main__":`'
        )
    with _ForkedCall(name, dict(values), numerics, progress) as call:
        yield from call.messages()


class _ForkedCall:
    """A call under way.

    Args:
        progress: whether the call's output goes to this process's stderr. Otherwise only its end is
            kept, for unforeseen errors.
    """

    def __init__(self, name: str, values: dict[str, Any], numerics: Numerics | None, progress: bool) -> None:
        folder = working_directory()
        self._progress, self._tail, self._silent = progress, bytearray(), False
        self._interrupted, self._finished = False, False
        self._reply, theirs = socket.socketpair()
        self._output, output = os.pipe()
        if progress and _at_terminal():
            # Progress is one line that is rewritten in place. The call does that only if its output
            # is a terminal, so it gets this process's.
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

    def __enter__(self) -> _ForkedCall:
        if self._interrupted:
            self._stop()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the call's process has ended.

        If the call has not finished, it is asked for a clean stop first.
        """
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
        """Yield the parts of the result until the call ends.

        Raises the error that the call ended with.
        """
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
        """Raise the error that the call ended with, unless it succeeded or was interrupted.

        Args:
            end: the last message. If None, the process ended without one.
        """
        if self._interrupted or end == {}:
            return
        if end is None or "unforeseen" in end:
            self._wait(self._process)
            what = "the process that did it was killed" if end is None else end["unforeseen"]
            raise RuntimeError(f"foreload: {what}\n{self._tail.decode(errors='replace')}".rstrip())
        if "errno" in end:
            raise OSError(end["errno"], end["message"], end["filename"])
        # `error_of` finds a class of the error tree only if its module was imported.
        for module in ("foreload.pipelines.errors", "foreload.cache.errors", "foreload.trainer.errors"):
            importlib.import_module(module)
        raise error_of(end["code"], end["message"])

    def _wait(self, descriptor: int) -> bool:
        """Wait until something can be read. Return whether it is from this descriptor.

        The call's output is passed on first, and Ctrl-C is handed on to the call.
        """
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
            # The reader of this process's stderr may have closed it.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text.decode(errors="replace"))
                sys.stderr.flush()
        else:
            self._tail = (self._tail + text)[-_TAIL_BYTES:]


def _at_terminal() -> bool:
    """Return whether this process's stderr is a terminal."""
    return sys.stderr is sys.__stderr__ and os.isatty(2)


class _Server:
    """A fork server of this process.

    Its attribute `running` is the number of its calls that are under way.
    """

    def __init__(self, numerics: Numerics) -> None:
        self.running = 0
        self._control, theirs = socket.socketpair()
        variables = os.environ | environment(numerics.cpu_capability, numerics.threads) | THREADLESS | UTF8
        with theirs:
            self._process = subprocess.Popen(
                command_of("foreload.api.fork_server", str(theirs.fileno())),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[int, bool]:
        """Start a process for a request.

        Returns:
            A descriptor of the process, and whether Ctrl-C came meanwhile: the server's imports
            take seconds.

        Raises:
            OSError: the server has ended.
        """
        send(self._control, request, descriptors=descriptors)
        interrupted = False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        # The answer is awaited even after Ctrl-C, since it names the process that must be stopped.
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
        """Release the server without ending it, in a process that was forked from its owner."""
        self._control.close()
        self._process.returncode = 0  # the server is no child of this process

    def close(self) -> None:
        """End the server. Calls under way are stopped first."""
        self._control.close()
        self._process.wait()


def _start(numerics: Numerics, request: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[_Server, int, bool]:
    """Start a call in the fork server for these numerics, which is started if it does not run.

    Returns:
        The server, and the values that `_Server.start` returns.
    """
    read_at_start = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)}
    key = numerics, tuple(sorted(read_at_start.items()))
    with _lock:
        for other, server in list(_servers.items()):
            if other != key and not server.running:
                _servers.pop(other).close()
        # The server may have ended, in which case a new one takes its place.
        if key in _servers:
            with contextlib.suppress(OSError):
                return _servers[key], *_servers[key].start(request, descriptors)
            _servers.pop(key).close()
        server = _servers[key] = _Server(numerics)
        return server, *server.start(request, descriptors)


def _abandon_all() -> None:
    """Release the servers and the lock in a forked process: they belong to the parent."""
    global _lock
    _lock = threading.Lock()
    for server in _servers.values():
        server.abandon()
    _servers.clear()


def close_all() -> None:
    """End this process's fork servers. Calls under way are stopped first.

    The next call starts a new server.
    """
    with _lock:
        for server in _servers.values():
            server.close()
        _servers.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_abandon_all)
