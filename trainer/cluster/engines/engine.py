"""What the coordinator asks of an engine.

Membership, terms, fencing and recovery are the coordinator's own. An engine only places processes,
starts and ends them, and reports which have ended. `opened` has those that there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from foreload.trainer.adjusting.shares import Choice, Needs, Share
from foreload.trainer.adjusting.size import Size
from foreload.trainer.cluster.processes.rendezvous_host import RendezvousHost
from foreload.trainer.cluster.processes.starting import StartedProcess, TrainerStart
from foreload.trainer.job.succession import ONE_MACHINE
from foreload.trainer.saved.migration import OwnServers


@dataclass(frozen=True, slots=True)
class Draining:
    """What is on machines that are about to be taken away.

    Attributes:
        trainers: Trainers' numbers.
        servers: Store servers' URLs, without passwords.
    """

    trainers: frozenset[int] = frozenset()
    servers: frozenset[str] = frozenset()


class Engine(ABC):
    """Places, starts and ends the processes of one call. One thread uses it.

    Attributes:
        machines: trainer -> its machine, "" for this one; updated when a trainer is started. Empty
            if all are on this one.
        guests: The trainers that the engine did not place: something else has started them. Updated
            when they are offered.
    """

    machines: Mapping[int, str] = ONE_MACHINE
    guests: Collection[int] = frozenset()

    @property
    @abstractmethod
    def own_servers(self) -> OwnServers | None:
        """The run's store servers, of which the engine can start more. None if it has started none."""

    def draining(self) -> Draining:
        """Return what is on machines that are about to be taken away."""
        return Draining()

    @abstractmethod
    def rendezvous_host(self, address: str) -> RendezvousHost:
        """Start the process that holds the rendezvous store.

        Args:
            address: Address of this machine.
        """

    @abstractmethod
    def start_trainer(self, start: TrainerStart, held: Sequence[int]) -> StartedProcess:
        """Start a trainer. Returns at once, even if there is no place for it yet.

        Args:
            held: Descriptors that a trainer on this machine inherits.
        """

    def take_offers(self, offer: Callable[[], int | None]) -> list[int]:
        """Take the trainers that something else has offered since the last call.

        Args:
            offer: Returns the number of the offered trainer, or None if it is not needed.

        Returns:
            The numbers of the trainers to start.
        """
        return []

    def refuse(self, why: Mapping[int, str], said: Collection[int]) -> None:
        """Refuse guests because of which training did not begin. The others are kept.

        `reserve_trainers` then waits for others in their place.

        Args:
            why: What is wrong with each of them.
            said: Those that have reported that themselves, on their machines.
        """
        raise AssertionError(why)

    @abstractmethod
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
        return None

    def ask_share(self, least: Size, choices: Sequence[Choice]) -> Share | None:
        """Ask for a share of the pool, and return the job's share as last heard. It does not wait.

        Args:
            least: The smallest size that the job can have.
            choices: As in `Bid`.
        """
        return None

    # Before training begins, the launcher asks:

    def take(self) -> None:
        """Wait until trainers of an earlier call, which a driver that died has left, have stopped.

        On this machine they hold the run's lock, so there is nothing to wait for.

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
        raise AssertionError(count)

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
        return tuple(urls), 0

    def reserve_trainers(self, trainer_bytes: int) -> None:
        """Wait until there is room for the trainers with which training begins.

        Call it before each attempt to begin.

        Args:
            trainer_bytes: The memory of one of them.

        Raises:
            SettingError: There never is.
        """

    def close(self) -> None:
        """Give back what the engine holds for this call. Servers may stay."""
