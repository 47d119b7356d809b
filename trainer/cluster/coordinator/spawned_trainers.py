"""The trainers' processes, which an engine starts at the beginning and during training, and ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from datetime import timedelta

from foreload.trainer.cluster.ending import ended_how
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.messages.host_messages import HOST_GONE
from foreload.trainer.cluster.processes.starting import StartedProcess, TrainerStart, pause

_SAID = timedelta(seconds=15)  # between two messages that trainers are waited for
# A host may be silent for this much longer than a trainer, so the trainer is lost before its host.
_SILENCE = timedelta(seconds=5)


class SpawnedTrainers:
    """The trainers' processes, by trainer number.

    Args:
        engine: Starts trainers.
        urls: Returns the current URLs of the store shards by number, with passwords.
        lock: The descriptor of the run's lock, if there is one. Trainers inherit it, so a trainer
            that outlives this process goes on holding the lock.
        wakes: A descriptor that ends every pause once it is readable.
    """

    def __init__(self, engine: Engine, urls: Callable[[], Sequence[str]], lock: int | None, wakes: int) -> None:
        self.engine, self._urls = engine, urls
        self._held: tuple[int, ...] = () if lock is None else (lock,)
        self._processes: dict[int, StartedProcess] = {}
        self._place, self._wakes = ("", ""), wakes

    def meet_at(self, rendezvous: str, address: str, held: Sequence[int]) -> None:
        """Set where trainers meet. Call it before any trainer is started.

        Args:
            rendezvous: The address of the rendezvous store.
            address: The address of this machine at which its trainers are reached.
            held: Further descriptors that trainers inherit.
        """
        self._place = rendezvous, address
        self._held = (*held, *self._held)

    def start(self, trainer: int, plan: int | None = None) -> None:
        """Start a trainer.

        Args:
            plan: As in `TrainerStart`.
        """
        rendezvous, address = self._place
        start = TrainerStart(trainer, rendezvous, address, tuple(self._urls()), os.getpid(), plan)
        self._processes[trainer] = self.engine.start_trainer(start, self._held)

    def take_offers(self, offer: Callable[[], int | None], plan: int) -> list[int]:
        """Start the trainers that something else has offered since the last call.

        Args:
            offer: Returns the number of the offered trainer, or None if it is not needed.
            plan: As in `TrainerStart`.

        Returns:
            The numbers of the trainers that are started.
        """
        taken = self.engine.take_offers(offer)
        for trainer in taken:
            self.start(trainer, plan)
        return taken

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each trainer."""
        return {trainer: process.pid for trainer, process in self._processes.items()}

    def ended(self) -> dict[int, str]:
        """Return how the trainers that have ended did so."""
        statuses = {trainer: process.poll() for trainer, process in self._processes.items()}
        return {trainer: ended_how(status) for trainer, status in statuses.items() if status is not None}

    def pause(self, at_most: timedelta, ended: Container[int]) -> None:
        """Pause until a trainer of this host ends, a request arrives, or the time is over.

        Args:
            ended: The trainers that have ended already.
        """
        # A trainer on another machine has no process here to wait for.
        left = [process for trainer, process in self._processes.items() if trainer not in ended]
        pause([process for process in left if process.is_here], at_most, self._wakes)

    def forget(self, trainer: int) -> None:
        """Drop a trainer that has ended."""
        self._processes.pop(trainer, None)

    def end(self, trainer: int) -> bool:
        """Kill a trainer that is lost, or seems lost, or is not needed.

        Returns:
            Whether it is known to be dead.
        """
        process = self._processes.pop(trainer, None)
        if process is None:
            return False
        process.kill()
        process.wait()
        # A trainer on another host that is cut off may still be alive.
        return process.poll() not in (None, HOST_GONE)

    def await_end(self, patience: timedelta) -> None:
        """Wait until all trainers have ended, for at most `patience` each.

        Guests are then left to their hosts, and end by themselves.
        """
        for process in self._processes.values():
            process.wait(patience)
        self.let_go_of_guests()

    def let_go_of_guests(self) -> None:
        """Drop the trainers that the engine did not place, and leave them to their hosts."""
        guests = self.engine.guests
        self._processes = {trainer: process for trainer, process in self._processes.items() if trainer not in guests}

    def kill(self) -> None:
        """Kill all trainers, and wait until they are dead."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
