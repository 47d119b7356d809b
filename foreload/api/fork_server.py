"""The fork server: imports what training needs once, and forks a process for each call.

It runs under the numerics of a job. `foreload.api.client` starts it with the descriptor of the
socket on which requests come. It ends with its owner: when the owner closes the socket or dies, the
fork server asks its calls for a clean stop, waits for them, and leaves nothing behind.
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

# These are imported at the first call that needs torch. None of them starts a thread, because of
# the variables of the numerics and THREADLESS.
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
    """The fork server, inside its process.

    Args:
        control: the socket on which requests come.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._preloaded = False

    def run(self) -> None:
        """Serve until the owner has closed the socket and every child has ended."""
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
        # Output of the imports goes to the call for which they are made.
        os.dup2(output, 2)
        if request.values["torch"] and not self._preloaded:
            self._preloaded = True
            _preload()
        pid = fork(lambda: self._serve(request))
        handle = os.pidfd_open(pid)
        self._children.add(pid)
        # If the owner has died, `receive` reports it next.
        with contextlib.suppress(OSError):
            send(self._control, {"pid": pid}, descriptors=[handle])
        for descriptor in (reply, output, handle):
            os.close(descriptor)

    def _serve(self, request: Message) -> int:
        """Answer a request, in the child. Returns the child's exit status."""
        self._control.close()
        reply, output = request.descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        from foreload.api.calls import answer

        return answer(socket.socket(fileno=reply), request.values)

    def _reap(self) -> None:
        """Forget the children that have ended."""
        for pid in list(self._children):
            # The signal handler may interrupt this loop and reap the child first.
            with contextlib.suppress(ChildProcessError):
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    continue
            self._children.discard(pid)


def _preload() -> None:
    for name in _PRELOADED:
        # A failed import is repeated in the call that needs it, which reports the error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # A child's garbage collector does not touch frozen objects, so their pages stay shared.
    gc.collect()
    gc.freeze()


def main() -> int:
    """Run the fork server on the socket whose descriptor is the first argument."""
    client.forbid()
    # Ctrl-C is for the owner, which sends it on to the child. Children inherit the block, so the
    # signal waits until the child is ready to handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.set_inheritable(False)
        ForkServer(control).run()
    return 0
