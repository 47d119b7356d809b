"""What the coordinator asks of an engine, and the engine that is this machine.

Membership, terms, fencing and recovery are the coordinator's own. An engine only places processes,
starts and ends them, and reports which have ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.trainer.adjusting.shares import Choice, Needs, PoolState, Share
from foreload.trainer.adjusting.size import Size
from foreload.trainer.cluster.processes.rendezvous_host import ChildRendezvous, RendezvousHost
from foreload.trainer.cluster.processes.starting import WORKER, ProcessStart, StartedProcess, StartProcess, TrainerStart
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.succession import ONE_MACHINE
from foreload.trainer.run.engine_record import EngineRecord
from foreload.trainer.saved.migration import LocalServers, OwnServers


@dataclass(frozen=True, slots=True)
class Draining:
    """What is on machines that are about to be taken away.

    Attributes:
        trainers: Trainers' numbers.
        servers: Store servers' URLs, without passwords.
    """

    trainers: frozenset[int] = frozenset()
    servers: frozenset[str] = frozenset()


class Engine(Protocol):
    """Places, starts and ends the processes of one call. One thread uses it.

    Attributes:
        machines: trainer -> its machine; updated when a trainer is started. Empty if all are on
            this one.
        own_servers: The run's store servers, of which the engine can start more. None if it has
            started none.
    """

    @property
    def machines(self) -> Mapping[int, str]:
        """See above."""

    @property
    def own_servers(self) -> OwnServers | None:
        """See above."""

    def draining(self) -> Draining:
        """Return what is on machines that are about to be taken away."""

    def rendezvous_host(self, address: str) -> RendezvousHost:
        """Start the process that holds the rendezvous store.

        Args:
            address: Address of this machine.
        """

    def start_trainer(self, start: TrainerStart, held: Sequence[int]) -> StartedProcess:
        """Start a trainer. Returns at once, even if there is no place for it yet.

        Args:
            held: Descriptors that a trainer on this machine inherits.
        """

    def new_server(self, shard: int, url: str, may_start: Callable[[int], bool]) -> str | None:
        """Have an empty server take the place of a shard's server if that has ended.

        Call it repeatedly. It does not wait.

        Args:
            url: The shard's server, with its password.
            may_start: Whether a server of that shard may be started now.

        Returns:
            The URL of the new server, with its password, once it is there. None in all other cases.
        """

    @property
    def needs(self) -> Needs | None:
        """What trainers and servers take of a pool that the job shares with others. None if it shares none."""

    def ask_share(self, least: Size, choices: Sequence[Choice]) -> Share | None:
        """Ask for a share of the pool, and return the job's share as last heard. It does not wait.

        Args:
            least: The smallest size that the job can have.
            choices: As in `Bid`.
        """

    # Before training begins, the launcher asks:

    def take(self) -> None:
        """Wait until trainers of an earlier call, which a driver that died has left, have stopped.

        Raises:
            RunError: Another call trains the run.
        """

    def check_room(self, server_bytes: int, trainer_bytes: int) -> None:
        """Check that a new run can be placed at all, and its servers be reached.

        Args:
            server_bytes: The memory that a server takes for its rows; 0 if that is not known.
            trainer_bytes: The memory of a trainer.

        Raises:
            SettingError: It cannot.
        """

    def start_servers(self, count: int) -> tuple[str, ...]:
        """Start the servers of a new run, whose folder exists, and return their URLs with passwords.

        Raises:
            TrainerError: A server cannot be started.
        """

    def find_servers(self, urls: Sequence[str], server_bytes: int) -> tuple[tuple[str, ...], int]:
        """Find a run's servers. Those that have ended are replaced by empty ones.

        Args:
            urls: Their URLs by shard, without passwords; "" for a removed shard.
            server_bytes: As for `check_room`.

        Returns:
            Their URLs, with passwords, and how many of them were replaced.

        Raises:
            TrainerError: A server cannot be started.
        """

    def reserve_trainers(self, trainer_bytes: int) -> None:
        """Wait until there is room for the trainers with which training begins.

        Args:
            trainer_bytes: The memory of one of them.

        Raises:
            SettingError: There never is.
        """


class LocalEngine:
    """This machine. Its store servers are the run's own, which listen on Unix sockets.

    Attributes:
        stores: The run's local servers. None if the run has none, or before they are known.
    """

    machines = ONE_MACHINE

    def __init__(self, start: StartProcess) -> None:
        self._start = start
        self.stores: LocalStores | None = None

    @property
    def own_servers(self) -> OwnServers | None:
        """See Engine."""
        return None if self.stores is None else LocalServers(self.stores)

    def draining(self) -> Draining:
        """See Engine."""
        return Draining()

    def rendezvous_host(self, address: str) -> RendezvousHost:
        """See Engine."""
        return ChildRendezvous(address, self._start)

    def start_trainer(self, start: TrainerStart, held: Sequence[int]) -> StartedProcess:
        """See Engine."""
        return self._start(ProcessStart(WORKER, (), start.environment(), tuple(held)))

    def new_server(self, shard: int, url: str, may_start: Callable[[int], bool]) -> str | None:
        """See Engine. The new server has the same URL, and answers a moment later."""
        if self.stores is not None and may_start(shard) and self.stores.restart(shard):
            return url
        return None

    needs = None

    def ask_share(self, least: Size, choices: Sequence[Choice]) -> Share | None:
        """See Engine."""
        return None

    def take(self) -> None:
        """See Engine. Trainers hold the run's lock."""

    def check_room(self, server_bytes: int, trainer_bytes: int) -> None:
        """See Engine."""

    def start_servers(self, count: int) -> tuple[str, ...]:
        """See Engine. Local servers are not started this way."""
        raise AssertionError(count)

    def find_servers(self, urls: Sequence[str], server_bytes: int) -> tuple[tuple[str, ...], int]:
        """See Engine."""
        return tuple(urls), 0

    def reserve_trainers(self, trainer_bytes: int) -> None:
        """See Engine."""


@contextlib.contextmanager
def engine_of(job: TrainJob, start: StartProcess) -> Iterator[Engine]:
    """Open a job's engine while entered.

    Args:
        start: Starts processes on this machine.

    Raises:
        SettingError: The engine cannot be reached, or is not installed.
    """
    if job.engine == "local":
        yield LocalEngine(start)
        return
    ray_engine = _of_ray()
    with ray_engine.connected(job.ray_address):
        engine = ray_engine.RayEngine(job)
        try:
            yield engine
        finally:
            engine.close()


@contextlib.contextmanager
def ended(run: Path) -> Iterator[None]:
    """End the processes that an engine keeps for a stopped run, when the context is left without an error.

    Raises:
        RunError: The run is being trained.
        SettingError: The engine is not installed.
    """
    record = EngineRecord.read(run)
    if record is None:
        yield
        return
    with _of_ray().ended(run, record):
        yield


def pool_state(address: str | None) -> PoolState | None:
    """Return the jobs that share a Ray cluster. None if no job has shared it yet.

    Args:
        address: As --ray-address.

    Raises:
        SettingError: The cluster cannot be reached, or Ray is not installed.
    """
    ray_engine = _of_ray()
    from foreload.trainer.cluster.engines import ray_pool

    with ray_engine.connected(address):
        return ray_pool.state()


def _of_ray() -> ModuleType:
    try:
        from foreload.trainer.cluster.engines import ray_engine
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise SettingError("--engine: ray is not installed; pip install 'foreload[ray]', on all nodes") from error
    return ray_engine
