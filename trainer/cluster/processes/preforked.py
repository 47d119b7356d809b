"""Processes that were forked before the launcher had threads, and wait for what to run.

They start without the seconds that imports take.
"""

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
    """A StartProcess (`starting`) that uses forked processes, as long as it has some.

    A forked process without anything to run ends together with this process, the launcher.
    """

    def __init__(self, count: int, leave: Callable[[], None]) -> None:
        """Fork the processes. This process must not have further threads yet.

        Args:
            count: Number of processes to fork.
            leave: Called in each forked process. It closes what belongs to this process alone.
        """
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            mine, theirs = socket.socketpair()

            def main(mine: socket.socket = mine, theirs: socket.socket = theirs) -> int:
                # A fork inherits the launcher's ends of its own socket and of the earlier ones. If
                # they stayed open here, the process would not notice that the launcher has ended.
                for end in (mine, *(end for _, end in self._waiting)):
                    end.close()
                leave()
                return _run(theirs)

            self._waiting.append((fork(main), mine))
            theirs.close()

    def __call__(self, start: ProcessStart) -> StartedProcess:
        """Let a forked process run the module, with the launcher's current environment.

        If no forked process is left, as for a trainer that joins later, a new process is started.
        """
        if not self._waiting:
            # No fork here: this process may have threads by now.
            return ChildProcess(start)
        pid, end = self._waiting.pop(0)
        # If the forked process has died, `poll` of the returned object shows that.
        with end, contextlib.suppress(ConnectionError):
            values = {"module": start.module, "arguments": start.arguments, "environment": os.environ | start.environment}
            send(end, values, descriptors=start.descriptors)
        return ForkedProcess(pid)

    def close(self) -> None:
        """End the forked processes that have nothing to run."""
        for pid, end in self._waiting:
            end.close()
            os.waitpid(pid, 0)
        self._waiting.clear()


def _run(end: socket.socket) -> int:
    """Wait for what to run, and run it.

    Returns:
        The exit status; 0 if the launcher closed its end instead.
    """
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
    """A StartedProcess that is a forked child of this process."""

    is_here = True

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
