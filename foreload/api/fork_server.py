"""The fork server: a process that imports what training needs once, under a job's numerics, and forks one process for each call.

Started by `foreload.api.client` with the descriptor of a socket on which requests come. It ends with its owner: when
that closes the socket, or dies, whatever still runs here is asked for a clean stop, waited for, and nothing is left.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys

from foreload.api import client
from foreload.base.process import fork
from foreload.base.socket_messages import Message, receive, send

# Imported at the first call that needs torch. None of them starts a thread, owing to the variables of the numerics and THREADLESS.
_PRELOADED = (
    "foreload.trainer.cluster.launcher",
    "foreload.trainer.cluster.processes.preforked",
    "foreload.trainer.cluster.processes.rendezvous_host",
    "foreload.trainer.cluster.member.worker",
    "foreload.trainer.commands.train",
    "foreload.trainer.commands.evaluate",
    "foreload.trainer.models.dlrm",
    "torch.utils.tensorboard",
)


class ForkServer:
    """The process, from the inside."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._preloaded = False

    def run(self) -> None:
        """Serve until the owner has gone and every child has ended."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        while (request := receive(self._control)) is not None:
            self._start(request)
            self._reap()
        for pid in list(self._children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _start(self, request: Message) -> None:
        reply, output = request.descriptors
        # What importing writes to stderr goes to the first call.
        os.dup2(output, 2)
        if request.values["torch"] and not self._preloaded:
            self._preloaded = True
            _preload()
        pid = fork(lambda: self._serve(request))
        handle = os.pidfd_open(pid)
        self._children.add(pid)
        with contextlib.suppress(OSError):  # an owner that has gone is noticed by `receive`
            send(self._control, {"pid": pid}, descriptors=[handle])
        for descriptor in (reply, output, handle):
            os.close(descriptor)

    def _serve(self, request: Message) -> int:
        """Answer the request, in the child; returns its exit status."""
        self._control.close()
        reply, output = request.descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        from foreload.api.calls import answer

        return answer(socket.socket(fileno=reply), request.values)

    def _reap(self) -> None:
        """Take note of children that have ended."""
        for pid in list(self._children):
            # The signal's handler may run within this, and reap first.
            with contextlib.suppress(ChildProcessError):
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    continue
            self._children.discard(pid)


def _preload() -> None:
    for name in _PRELOADED:
        # What cannot be imported fails again in the call that needs it, which reports it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Frozen objects are not touched by a child's garbage collector, so their pages stay shared.
    gc.collect()
    gc.freeze()


def main() -> int:
    """The process; see above."""
    client.forbid()
    # Ctrl-C is for the owner, which sends it on to the child; blocked here and inherited, it waits until the child is ready to heed it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.set_inheritable(False)
        ForkServer(control).run()
    return 0
