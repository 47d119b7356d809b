"""Processes that were forked before the launcher had threads, and wait to be told what to run: no seconds of importing for them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from foreload.base.process import fork
from foreload.base.socket_messages import receive, send
from foreload.trainer.cluster.processes.starting import RENDEZVOUS_HOST, WORKER, ChildProcess, ProcessStart, StartedProcess

_POLL = timedelta(milliseconds=5)


class Preforked:
    """Starts up to `count` processes, as a StartProcess (`processes`). One that is given nothing to run leaves with this process, the launcher.

    leave: closes, in each of them, what of this process is not theirs.
    """

    def __init__(self, count: int, leave: Callable[[], None]) -> None:
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            mine, theirs = socket.socketpair()

            def main(mine: socket.socket = mine, theirs: socket.socket = theirs) -> int:
                # A fork inherits the launcher's ends of its own socket and of those before: open here, they would hide the launcher's end.
                for end in (mine, *(end for _, end in self._waiting)):
                    end.close()
                leave()
                return _run(theirs)

            self._waiting.append((fork(main), mine))
            theirs.close()

    def __call__(self, start: ProcessStart) -> StartedProcess:
        """Have one of them run what a process started anew would run, with the launcher's environment as it is now.

        Where none is left, since a trainer joins later, a process is started anew: this one may have threads by now.
        """
        if not self._waiting:
            return ChildProcess(start)
        pid, end = self._waiting.pop(0)
        with end, contextlib.suppress(ConnectionError):  # one that is gone is found so by `poll`
            values = {"module": start.module, "arguments": start.arguments, "environment": os.environ | start.environment}
            send(end, values, descriptors=start.descriptors)
        return ForkedProcess(pid)

    def close(self) -> None:
        """End those that were given nothing to run."""
        for pid, end in self._waiting:
            end.close()
            os.waitpid(pid, 0)
        self._waiting.clear()


def _run(end: socket.socket) -> int:
    """Wait to be told what to run, and run it; returns the exit status, 0 where the launcher has closed its end instead."""
    with end:
        message = receive(end)
    if message is None:
        return 0
    os.environ.update(message.values["environment"])
    module = message.values["module"]
    sys.argv = [module, *message.values["arguments"], *map(str, message.descriptors)]
    assert module in (RENDEZVOUS_HOST, WORKER)
    return int(importlib.import_module(module).main())


class ForkedProcess:
    """A child of this process that was forked: foreload.trainer.cluster.processes.starting.StartedProcess."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """See StartedProcess."""
        return self._pid

    def poll(self) -> int | None:
        """See StartedProcess."""
        if self._status is None:
            ended_pid, status = os.waitpid(self._pid, os.WNOHANG)
            if ended_pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: timedelta | None = None) -> None:
        """See StartedProcess."""
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self.poll() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(_POLL.total_seconds())

    def kill(self) -> None:
        """See StartedProcess."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
