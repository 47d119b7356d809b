"""The process that holds a job's rendezvous store, and with it the rendezvous: it outlives the launcher, so that trainers still agree when that is
killed.

Where the launcher dies before training began, it leaves at once, and the trainers with it. Later it asks the trainers for a clean stop in the
launcher's place, and leaves when they have.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

from foreload.base.errors import SettingError
from foreload.trainer.cluster.messages.facts import Go, Orphaned, StopWanted
from foreload.trainer.cluster.processes.starting import RENDEZVOUS_HOST, ProcessStart, StartProcess
from foreload.trainer.errors import TrainerError

_PATIENCE = timedelta(minutes=5)  # for which a read of a fact waits until that is stated


class RendezvousHost:
    """The rendezvous host of one call, from the launcher's side. address: where trainers find the store, "HOST:PORT"; held: a descriptor that each of
    them must inherit, by whose end the rendezvous host knows when all have left.
    """

    def __init__(self, host: str, start: StartProcess) -> None:
        """Start it, on a free port of `host`. Raises SettingError if that is no address of this machine."""
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            try:
                listening.bind((host, 0))
            except OSError as error:
                raise SettingError(f"--address: must be an address of this machine; got {host} ({error.strerror})") from error
            self._host, self._port = host, listening.getsockname()[1]
            launchers, self._launcher_end = os.pipe()
            trainers, self.held = os.pipe()
            # Nothing is ever written to the first two: the rendezvous host reads their end when the last process that holds the other side is gone.
            self._ready, ready = os.pipe()
            handed = (listening.fileno(), launchers, trainers, ready)
            self._process = start(ProcessStart(RENDEZVOUS_HOST, (host,), descriptors=handed))
            os.close(launchers)
            os.close(trainers)
            os.close(ready)

    @property
    def address(self) -> str:
        """Where trainers find the store."""
        return f"{self._host}:{self._port}"

    def join(self) -> Any:
        """The launcher's connection to the store, waited for until that is there. Raises TrainerError if it will not be."""
        import torch.distributed as dist

        # Connected only when the store is there, since torch logs every connection that is refused to stderr.
        if not os.read(self._ready, 1):
            raise TrainerError(f"coordinator at {self.address}: cannot be started, see above")
        return dist.TCPStore(self._host, self._port, None, False, _PATIENCE)

    def close(self) -> None:
        """End it, once no trainer is left."""
        os.close(self._launcher_end)
        os.close(self.held)
        os.close(self._ready)
        self._process.kill()
        self._process.wait()


def main() -> int:
    """The process: HOST, then the descriptors of the listening socket, and of pipes: held open by launcher and trainers, and to say "ready"."""
    # No more than this is imported here, since trainers wait for it.
    from foreload.trainer.cluster.messages.rendezvous import Rendezvous, host_store

    host = sys.argv[1]
    listening, launcher, trainers, ready = map(int, sys.argv[2:])
    rendezvous = Rendezvous(host_store(host, _PATIENCE, listening))
    os.write(ready, b"1")
    os.close(ready)
    # Returns when the launcher is gone.
    os.read(launcher, 1)
    if rendezvous.poll(Go) is None:
        return 0
    rendezvous.publish(Orphaned())
    rendezvous.publish(StopWanted())
    # Returns when the last trainer is gone, which needs the store until then.
    os.read(trainers, 1)
    return 0
