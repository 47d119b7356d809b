"""The trainers' processes that one call of `foreload train` starts: at its beginning, and while it trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from datetime import timedelta

from foreload.trainer.cluster.coordinator.hosts import Hosts
from foreload.trainer.cluster.ending import ended_how
from foreload.trainer.cluster.messages.host_messages import HOST_GONE
from foreload.trainer.cluster.processes.host_connections import HostedTrainer
from foreload.trainer.cluster.processes.starting import WORKER, ProcessStart, StartedProcess, StartProcess, TrainerStart, pause
from foreload.trainer.run.servers import plain


class SpawnedTrainers:
    """The processes, by trainers' numbers. urls: of the store shards by number as they are now, with passwords. lock: the descriptor of the run's,
    if any; wakes: a descriptor; once that can be read from, no pause lasts.

    A trainer that outlives this process goes on holding the lock on the run. hosts: the other hosts of the job, on which trainers can be, too.
    """

    def __init__(
        self,
        start: StartProcess,
        urls: Callable[[], Sequence[str]],
        lock: int | None,
        hosts: Hosts | None,
        wakes: int,
    ) -> None:
        self._start, self._urls, self._hosts = start, urls, hosts
        self._held: tuple[int, ...] = () if lock is None else (lock,)
        self._processes: dict[int, StartedProcess] = {}
        self._place, self._wakes = ("", ""), wakes

    def meet_at(self, rendezvous: str, address: str, held: Sequence[int]) -> None:
        """Where trainers meet, at which address of this machine each is reached, and what descriptors they inherit."""
        self._place = rendezvous, address
        self._held = (*held, *self._held)

    def start(self, trainer: int, plan: int | None = None) -> None:
        """Start a trainer. plan: as in `TrainerStart`."""
        rendezvous, address = self._place
        on_host = None if self._hosts is None else self._hosts.on_host
        trainer_start = TrainerStart(trainer, rendezvous, address, tuple(self._urls()), os.getpid(), plan, on_host)
        self._processes[trainer] = self._start(ProcessStart(WORKER, (), trainer_start.environment(), self._held))

    def start_first(self, here: Sequence[int]) -> None:
        """Start the trainers that training begins with: those of this host, and those that other hosts have offered for that, which follow them."""
        for trainer in here:
            self.start(trainer)
        for trainer, hosted in enumerate(() if self._hosts is None else self._hosts.first, len(here)):
            self._start_elsewhere(trainer, hosted, None)

    def take_offers(self, offer: Callable[[], int | None], plan: int) -> list[int]:
        """Have other hosts start the trainers that they have offered since; returns these. offer: gives the number of one, None: it is not needed."""
        taken = []
        while self._hosts is not None and (hosted := self._hosts.take()) is not None:
            trainer = offer()
            if trainer is None:
                self._hosts.refuse(hosted, "the job has as many trainers as lanes, or ends")
                continue
            self._start_elsewhere(trainer, hosted, plan)
            taken.append(trainer)
        return taken

    def _start_elsewhere(self, trainer: int, hosted: HostedTrainer, plan: int | None) -> None:
        assert self._hosts is not None
        self._processes[trainer] = hosted
        self._hosts.start(hosted, trainer, self._place[0], plain(self._urls()), plan)

    @property
    def pids(self) -> dict[int, int]:
        """Their process ids."""
        return {trainer: process.pid for trainer, process in self._processes.items()}

    def ended(self) -> dict[int, str]:
        """How those have ended that have."""
        statuses = {trainer: process.poll() for trainer, process in self._processes.items()}
        return {trainer: ended_how(status) for trainer, status in statuses.items() if status is not None}

    def pause(self, at_most: timedelta, ended: Container[int]) -> None:
        """Return after a while, or as soon as one ends, or the coordinator is asked something. ended: those that have."""
        left = [process for trainer, process in self._processes.items() if trainer not in ended]
        pause([process for process in left if not isinstance(process, HostedTrainer)], at_most, self._wakes)

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
        # Of one on another host, which may be cut off, this is not always known.
        return process.poll() not in (None, HOST_GONE)

    def await_end(self, patience: timedelta) -> None:
        """Wait until each has ended, but no longer than that for any. Those of other hosts, which then see to their own end, are let go."""
        for process in self._processes.values():
            process.wait(patience)
        self.let_go_of_guests()

    def let_go_of_guests(self) -> None:
        """Leave the trainers of other hosts to their hosts."""
        self._processes = {
            trainer: process for trainer, process in self._processes.items() if not isinstance(process, HostedTrainer)
        }

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
