"""The process that holds a job's rendezvous store.

It outlives the launcher, so that trainers can still agree after the launcher was killed. If the
launcher dies before training begins, this process ends at once, and so do the trainers. If the
launcher dies later, this process asks the trainers for a clean stop in the launcher's place, and
ends when they have ended.
"""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

from foreload.base.errors import SettingError
from foreload.trainer.cluster.messages.facts import Go, Orphaned, StopWanted
from foreload.trainer.cluster.processes.starting import RENDEZVOUS_HOST, ProcessStart, StartProcess
from foreload.trainer.errors import TrainerError

_PATIENCE = timedelta(minutes=5)  # how long a read waits for a fact to be published


class RendezvousHost(ABC):
    """The rendezvous host of one call, from the launcher's side.

    Attributes:
        address: Address of the store, "HOST:PORT".
        held: Descriptors that each trainer of this machine must inherit.
    """

    address: str
    held: tuple[int, ...] = ()

    @abstractmethod
    def await_ready(self) -> None:
        """Wait until the store listens.

        Raises:
            TrainerError: The rendezvous host ended before.
        """

    def join(self) -> Any:
        """Wait until the store listens, and return a connection to it, a TCPStore.

        Raises:
            TrainerError: The rendezvous host ended before the store listened.
        """
        import torch.distributed as dist

        # Connect only once the store listens, because torch logs every refused connection to
        # stderr.
        self.await_ready()
        host, _, port = self.address.rpartition(":")
        return dist.TCPStore(host, int(port), None, False, _PATIENCE)

    @abstractmethod
    def close(self) -> None:
        """End the rendezvous host. To be called when no trainer is left."""


class ChildRendezvous(RendezvousHost):
    """A rendezvous host that is a child of this process.

    `held` is the descriptor of a pipe. When the last trainer closes it, the rendezvous host knows
    that all trainers have ended.
    """

    def __init__(self, host: str, start: StartProcess) -> None:
        """Start the rendezvous host.

        Args:
            host: Address of this machine, at which the store listens on a free port.
            start: Starts the process.

        Raises:
            SettingError: `host` is not an address of this machine.
        """
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            try:
                listening.bind((host, 0))
            except OSError as error:
                raise SettingError(f"--address: must be an address of this machine; got {host} ({error.strerror})") from error
            self.address = f"{host}:{listening.getsockname()[1]}"
            launchers, self._launcher_end = os.pipe()
            trainers, trainers_end = os.pipe()
            self.held = (trainers_end,)
            # Nothing is ever written to the first two pipes. The rendezvous host reads the end of a
            # pipe when the last process that holds the other side has ended.
            self._ready, ready = os.pipe()
            handed = (listening.fileno(), launchers, trainers, ready)
            self._process = start(ProcessStart(RENDEZVOUS_HOST, (host,), descriptors=handed))
            os.close(launchers)
            os.close(trainers)
            os.close(ready)

    def await_ready(self) -> None:
        """See RendezvousHost."""
        if not os.read(self._ready, 1):
            raise TrainerError(f"coordinator at {self.address}: cannot be started, see above")

    def launcher_is_gone(self) -> None:
        """Have the rendezvous host do what it does when the launcher has died."""
        os.close(self._launcher_end)
        self._launcher_end = -1

    def close(self) -> None:
        """See RendezvousHost."""
        if self._launcher_end >= 0:
            os.close(self._launcher_end)
        os.close(*self.held)
        os.close(self._ready)
        self._process.kill()
        self._process.wait()


def main() -> int:
    """Run the rendezvous host, and return its exit status.

    The command line is HOST and four descriptors: the listening socket, the pipe that the launcher
    holds open, the pipe that the trainers hold open, and the pipe on which to report "ready".
    """
    # Only these modules are imported, because trainers wait for this process.
    from foreload.trainer.cluster.messages.rendezvous import Rendezvous, host_store

    host = sys.argv[1]
    listening, launcher, trainers, ready = map(int, sys.argv[2:])
    rendezvous = Rendezvous(host_store(host, _PATIENCE, listening))
    os.write(ready, b"1")
    os.close(ready)
    # This read returns when the launcher has ended.
    os.read(launcher, 1)
    if rendezvous.poll(Go) is None:
        return 0
    rendezvous.publish(Orphaned())
    rendezvous.publish(StopWanted())
    # This read returns when the last trainer has ended. Until then the trainers need the store.
    os.read(trainers, 1)
    return 0
