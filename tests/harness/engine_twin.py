"""An engine whose machines, trainers and servers exist in memory alone: its trainers never train, its servers never answer."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from foreload.trainer.cluster.engines.engine import Draining, Engine
from foreload.trainer.cluster.messages.host_messages import HOST_GONE
from foreload.trainer.cluster.processes.rendezvous_host import RendezvousHost
from foreload.trainer.cluster.processes.starting import TrainerStart
from foreload.trainer.run.shard_change import ENGINE
from foreload.trainer.saved.migration import OwnServers


class TwinTrainer:
    """A trainer: a StartedProcess. status: None while it runs."""

    is_here = False

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def poll(self) -> int | None:
        """See StartedProcess."""
        return self.status

    def wait(self, timeout: timedelta | None = None) -> None:
        """See StartedProcess. It does not wait: nothing happens meanwhile."""

    def kill(self) -> None:
        """See StartedProcess."""
        if self.status is None:
            self.status = -signal.SIGKILL


class _NoRendezvous(RendezvousHost):
    def __init__(self, address: str) -> None:
        self.address = f"{address}:1"

    def await_ready(self) -> None:
        pass

    def join(self) -> Any:
        raise AssertionError("nobody meets in memory")

    def close(self) -> None:
        pass


class TwinEngine(Engine):
    """An Engine of so many machines. Attributes: as of Engine, and the trainers."""

    word = ENGINE

    def __init__(self, machines: int = 4) -> None:
        self._free = [f"machine-{number}" for number in range(machines)]
        self._numbers = itertools.count(1)
        self.machines: dict[int, str] = {}
        self.trainers: dict[int, TwinTrainer] = {}
        self._servers: dict[str, str] = {}  # URL -> its machine
        self._ended: set[str] = set()  # URLs of servers that have ended
        self._drains: set[str] = set()

    # What happens to it.

    def lose(self, machine: str) -> None:
        """A machine is lost with all that is on it."""
        self._free.remove(machine)
        for trainer, where in self.machines.items():
            if where == machine and self.trainers[trainer].status is None:
                self.trainers[trainer].status = HOST_GONE
        self._ended |= {url for url, where in self._servers.items() if where == machine}

    def drain(self, machine: str) -> None:
        """A machine is to be taken away."""
        self._free.remove(machine)
        self._drains.add(machine)

    def end_server(self, url: str) -> None:
        """A server dies."""
        self._ended.add(url)

    # What an engine does.

    @property
    def own_servers(self) -> OwnServers | None:
        """See Engine."""
        return self if self._servers else None

    def draining(self) -> Draining:
        """See Engine."""
        return Draining(
            frozenset(trainer for trainer, where in self.machines.items() if where in self._drains),
            frozenset(url for url, where in self._servers.items() if where in self._drains),
        )

    def rendezvous_host(self, address: str) -> RendezvousHost:
        """See Engine."""
        return _NoRendezvous(address)

    def start_trainer(self, start: TrainerStart, held: Sequence[int]) -> TwinTrainer:
        """See Engine."""
        self.machines[start.trainer] = self._next_machine()
        self.trainers[start.trainer] = TwinTrainer(next(self._numbers))
        return self.trainers[start.trainer]

    def new_server(self, shard: int, url: str, may_start: Callable[[int], bool]) -> str | None:
        """See Engine."""
        if url not in self._ended or not may_start(shard):
            return None
        self._servers.pop(url, None)
        return self.add(shard)

    def start_servers(self, count: int) -> tuple[str, ...]:
        """See Engine."""
        return tuple(self.add(shard) for shard in range(count))

    def find_servers(self, urls: Sequence[str], server_bytes: int) -> tuple[tuple[str, ...], int]:
        """See Engine."""
        new = {shard: self.add(shard) for shard, url in enumerate(urls) if url in self._ended}
        return tuple(new.get(shard, url) for shard, url in enumerate(urls)), len(new)

    def add(self, shard: int) -> str:
        """See OwnServers."""
        url = f"redis://10.0.0.1:{next(self._numbers)}"
        self._servers[url] = self._next_machine()
        return url

    def take_back(self, shard: int, url: str) -> None:
        """See OwnServers."""
        self.remove(shard, url)

    def remove(self, shard: int, url: str) -> None:
        """See OwnServers."""
        del self._servers[url]

    def _next_machine(self) -> str:
        """The machine that has the least."""
        taken = [*self.machines.values(), *self._servers.values()]
        return min(self._free, key=taken.count)
