"""The trainers' processes, on this host and on other hosts that join.

They are started at the beginning and during training, and ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from foreload.base.job_token import given_token, new_token, write_token
from foreload.trainer.cluster.coordinator.failures import GuestsRefused
from foreload.trainer.cluster.ending import ended_how
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.messages.host_messages import HOST_GONE, NotWanted, StartAgain, StartTrainer, program_version
from foreload.trainer.cluster.processes.host_connections import HostConnections, HostedTrainer
from foreload.trainer.cluster.processes.starting import OnHost, StartedProcess, TrainerStart, pause
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import TOKEN
from foreload.trainer.run.servers import plain

_SAID = timedelta(seconds=15)  # between two messages that trainers are waited for
# A host may be silent for this much longer than a trainer, so the trainer is lost before its host.
_SILENCE = timedelta(seconds=5)


class Hosts:
    """Connections to the other hosts of a job, which join at the job's --coordinator.

    Attributes:
        machines: The machine of each trainer. "" stands for this one.
        guests: The trainers that other hosts have offered, of any number so far.
        first: The trainers of other hosts with which training begins.
        on_host: What the trainers of this host get for a job over several hosts.

    Raises:
        SettingError: The job's token or its --coordinator cannot be used.
    """

    def __init__(self, job: TrainJob, run: Path) -> None:
        self._job, self._run = job, run
        given = given_token(job.token_file)
        token = given or new_token()
        self._token_file = job.token_file if given is not None else str(run / TOKEN)
        # If the user gave no token, leave a new one in the run's folder. The message to the user
        # names that file.
        if given is None:
            write_token(run / TOKEN, token)
        self.on_host = OnHost(token, has_run=True)
        self.machines: dict[int, str] = dict.fromkeys(range(job.trainers_here), "")
        self.guests: set[int] = set()
        self.first: list[HostedTrainer] = []
        assert job.coordinator is not None
        self._place = job.coordinator
        self._silence = job.peer_silence + _SILENCE
        self._connections = HostConnections(*self._place, token, program_version(), self._silence)

    @classmethod
    @contextlib.contextmanager
    def of(cls, job: TrainJob, run: Path) -> Iterator[Hosts | None]:
        """Listen for the job's other hosts while entered. Yields None if the job has none."""
        if job.coordinator is None:
            yield None
            return
        hosts = cls(job, run)
        try:
            yield hosts
        finally:
            hosts.close()

    def await_first(self) -> None:
        """Wait until other hosts have offered all trainers of `first`, and assign their numbers."""
        wanted = self._job.trainers - self._job.trainers_here

        def said(there: int) -> None:
            if there < wanted:
                file = "" if self._token_file is None else f" --token-file {self._token_file}"
                sys.stderr.write(
                    f"foreload: waiting for {wanted - there} of {self._job.trainers} trainers: foreload join {self._place}{file}\n"
                )

        self.first = self._connections.await_offers(wanted, said, _SAID)
        for trainer, hosted in enumerate(self.first, self._job.trainers_here):
            self._has(trainer, hosted)

    def _has(self, trainer: int, hosted: HostedTrainer) -> None:
        self.machines[trainer] = hosted.host
        self.guests.add(trainer)

    def take(self) -> HostedTrainer | None:
        """Take a trainer that another host offers during training, or None without an offer."""
        return self._connections.take()

    def start(self, hosted: HostedTrainer, trainer: int, rendezvous: str, stores: tuple[str, ...], plan: int | None) -> None:
        """Have its host start a trainer.

        Args:
            trainer: The number that it gets.
            rendezvous: Where trainers find the rendezvous store.
            stores: The URLs of the store shards, without passwords.
            plan: As in `TrainerStart`.
        """
        job = self._job
        self._has(trainer, hosted)
        hosted.send(
            StartTrainer(
                trainer,
                rendezvous,
                stores,
                plan,
                str(Path(job.schedule).absolute()),
                job.threads,
                job.cpu_capability,
                self._silence.total_seconds(),
            )
        )

    def begin_again(self, refused: GuestsRefused) -> None:
        """Refuse the guests because of which training did not begin.

        The other trainers of `first` are kept for the next attempt.
        """
        kept = []
        for trainer, hosted in enumerate(self.first, self._job.trainers_here):
            if trainer in refused.why:
                sys.stderr.write(f"foreload: {hosted.host}: its trainer was refused: {refused.why[trainer]}\n")
                self.refuse(hosted, "see above" if trainer in refused.said else refused.why[trainer])
            elif hosted.poll() is None:
                hosted.send(StartAgain())
                kept.append(hosted)
        self._connections.offer_again(kept)
        self.first = []

    @staticmethod
    def refuse(hosted: HostedTrainer, why: str) -> None:
        """Send a host the message that its trainer is not wanted."""
        hosted.send(NotWanted(why))

    def close(self) -> None:
        """Stop listening."""
        self._connections.close()


class SpawnedTrainers:
    """The trainers' processes, by trainer number.

    Args:
        engine: Starts trainers, unless another host has offered them.
        urls: Returns the current URLs of the store shards by number, with passwords.
        lock: The descriptor of the run's lock, if there is one. Trainers inherit it, so a trainer
            that outlives this process goes on holding the lock.
        hosts: The other hosts that join the job, if there are any.
        wakes: A descriptor that ends every pause once it is readable.
    """

    def __init__(
        self,
        engine: Engine,
        urls: Callable[[], Sequence[str]],
        lock: int | None,
        hosts: Hosts | None,
        wakes: int,
    ) -> None:
        self.engine, self._urls, self._hosts = engine, urls, hosts
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
        """Start a trainer that no other host has offered.

        Args:
            plan: As in `TrainerStart`.
        """
        rendezvous, address = self._place
        on_host = None if self._hosts is None else self._hosts.on_host
        trainer_start = TrainerStart(trainer, rendezvous, address, tuple(self._urls()), os.getpid(), plan, on_host)
        self._processes[trainer] = self.engine.start_trainer(trainer_start, self._held)

    def start_first(self, here: Sequence[int]) -> None:
        """Start the trainers with which training begins.

        Args:
            here: The numbers of the trainers on this host. Those of other hosts get the numbers
                that follow.
        """
        for trainer in here:
            self.start(trainer)
        for trainer, hosted in enumerate(() if self._hosts is None else self._hosts.first, len(here)):
            self._start_elsewhere(trainer, hosted, None)

    def take_offers(self, offer: Callable[[], int | None], plan: int) -> list[int]:
        """Have other hosts start the trainers that they have offered since the last call.

        Args:
            offer: Returns the number of the offered trainer, or None if it is not needed.
            plan: As in `TrainerStart`.

        Returns:
            The numbers of the trainers that are started.
        """
        taken = []
        while self._hosts is not None and (hosted := self._hosts.take()) is not None:
            trainer = offer()
            if trainer is None:
                self._hosts.refuse(hosted, "the job has as many trainers as lanes already, or is ending")
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

        Trainers of other hosts are then left to their hosts, and end by themselves.
        """
        for process in self._processes.values():
            process.wait(patience)
        self.let_go_of_guests()

    def let_go_of_guests(self) -> None:
        """Drop the trainers of other hosts, and leave them to their hosts."""
        self._processes = {
            trainer: process for trainer, process in self._processes.items() if not isinstance(process, HostedTrainer)
        }

    def kill(self) -> None:
        """Kill all trainers, and wait until they are dead."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
