"""The processes of trainers, on this host and on others that join: started at the beginning and during training, and ended."""

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
from foreload.trainer.cluster.messages.host_messages import HOST_GONE, NotWanted, StartAgain, StartTrainer, program_version
from foreload.trainer.cluster.processes.host_connections import HostConnections, HostedTrainer
from foreload.trainer.cluster.processes.starting import (
    WORKER,
    OnHost,
    ProcessStart,
    StartedProcess,
    StartProcess,
    TrainerStart,
    pause,
)
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import TOKEN
from foreload.trainer.run.servers import plain

_SAID = timedelta(seconds=15)  # between two lines that trainers are waited for
_SILENCE = timedelta(seconds=5)  # more than a trainer may be silent: so the trainer is taken for lost before its host


class Hosts:
    """Listens at the job's --coordinator. machines: which one each trainer is on, "" for this one.

    Raises SettingError.
    """

    def __init__(self, job: TrainJob, run: Path) -> None:
        self._job, self._run = job, run
        given = given_token(job.token_file)
        token = given or new_token()
        self._token_file = job.token_file if given is not None else str(run / TOKEN)
        if given is None:
            write_token(run / TOKEN, token)
        self.on_host = OnHost(token, has_run=True)
        self.machines: dict[int, str] = dict.fromkeys(range(job.trainers_here), "")
        self.first: list[HostedTrainer] = []  # those that training begins with
        assert job.coordinator is not None
        self._place = job.coordinator
        self._silence = job.peer_silence + _SILENCE
        self._connections = HostConnections(*self._place, token, program_version(), self._silence)

    @classmethod
    @contextlib.contextmanager
    def of(cls, job: TrainJob, run: Path) -> Iterator[Hosts | None]:
        """Those of a job while entered; None where it has this one alone."""
        if job.coordinator is None:
            yield None
            return
        hosts = cls(job, run)
        try:
            yield hosts
        finally:
            hosts.close()

    def await_first(self) -> None:
        """Wait for the trainers that training is to begin with and that are not started here: `first`."""
        wanted = self._job.trainers - self._job.trainers_here

        def said(there: int) -> None:
            if there < wanted:
                file = "" if self._token_file is None else f" --token-file {self._token_file}"
                sys.stderr.write(
                    f"foreload: waiting for {wanted - there} of {self._job.trainers} trainers: foreload join {self._place}{file}\n"
                )

        self.first = self._connections.await_offers(wanted, said, _SAID)
        for trainer, hosted in enumerate(self.first, self._job.trainers_here):
            self.machines[trainer] = hosted.host

    def take(self) -> HostedTrainer | None:
        """A trainer that another host offers while others train."""
        return self._connections.take()

    def start(self, hosted: HostedTrainer, trainer: int, rendezvous: str, stores: tuple[str, ...], plan: int | None) -> None:
        """Have its host start it as this trainer."""
        job = self._job
        self.machines[trainer] = hosted.host
        hosted.tell(
            StartTrainer(
                trainer, rendezvous, stores, plan, str(Path(job.schedule).absolute()), job.threads, job.cpu_capability,
                self._silence.total_seconds(),
            )
        )  # fmt: skip

    def begin_again(self, refused: GuestsRefused) -> None:
        """Training did not begin: refuse those of the first trainers that are to blame, and keep the others for the next attempt."""
        kept = []
        for trainer, hosted in enumerate(self.first, self._job.trainers_here):
            if trainer in refused.why:
                sys.stderr.write(f"foreload: {hosted.host}: its trainer is refused: {refused.why[trainer]}\n")
                self.refuse(hosted, "see above" if trainer in refused.said else refused.why[trainer])
            elif hosted.poll() is None:
                hosted.tell(StartAgain())
                kept.append(hosted)
        self._connections.offer_again(kept)
        self.first = []

    @staticmethod
    def refuse(hosted: HostedTrainer, why: str) -> None:
        """Tell a host that its trainer is not needed."""
        hosted.tell(NotWanted(why))

    def close(self) -> None:
        """Listen no more."""
        self._connections.close()


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
