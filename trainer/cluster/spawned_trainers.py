"""The trainers' processes that one call of `foreload train` starts: at its beginning, and while it trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from datetime import timedelta

from foreload.trainer.cluster.ending import ended_how
from foreload.trainer.cluster.processes import WORKER, ProcessStart, StartedProcess, StartProcess, TrainerStart, pause


class SpawnedTrainers:
    """The processes, by trainers' numbers. urls: of the store shards as they are now, with passwords. lock: the descriptor of the run's, if any.

    A trainer that outlives this process goes on holding the lock on the run.
    """

    def __init__(self, start: StartProcess, urls: Callable[[], Sequence[str]], lock: int | None) -> None:
        self._start, self._urls = start, urls
        self._held: tuple[int, ...] = () if lock is None else (lock,)
        self._processes: dict[int, StartedProcess] = {}
        self._place = ("", "")

    def meet_at(self, rendezvous: str, address: str, held: Sequence[int]) -> None:
        """Where trainers meet, at which address of this machine each is reached, and what descriptors they inherit."""
        self._place = rendezvous, address
        self._held = (*held, *self._held)

    def start(self, trainer: int, commands: int | None = None) -> None:
        """Start a trainer. commands: as in `TrainerStart`."""
        rendezvous, address = self._place
        told = TrainerStart(trainer, rendezvous, address, tuple(self._urls()), os.getpid(), commands)
        self._processes[trainer] = self._start(ProcessStart(WORKER, (), told.environment(), self._held))

    @property
    def pids(self) -> dict[int, int]:
        """Their process ids."""
        return {trainer: process.pid for trainer, process in list(self._processes.items())}

    def ended(self) -> dict[int, str]:
        """How those have ended that have."""
        statuses = {trainer: process.poll() for trainer, process in self._processes.items()}
        return {trainer: ended_how(status) for trainer, status in statuses.items() if status is not None}

    def pause(self, at_most: timedelta, ended: Container[int]) -> None:
        """Return after a while, or as soon as one ends. ended: those that have."""
        pause([process for trainer, process in self._processes.items() if trainer not in ended], at_most)

    def forget(self, trainer: int) -> None:
        """One that has ended is of no interest any more."""
        self._processes.pop(trainer, None)

    def end(self, trainer: int) -> bool:
        """End a trainer that is lost, or only seems to be, or is not needed; returns whether it is dead."""
        process = self._processes.pop(trainer, None)
        if process is None:
            return False
        process.kill()
        process.wait()
        return True

    def await_end(self, patience: timedelta) -> None:
        """Wait until each has ended, but no longer than that for any."""
        for process in self._processes.values():
            process.wait(patience)

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
