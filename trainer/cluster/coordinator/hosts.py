"""The other hosts of a job, from the launcher's side: who is waited for, what those that join are sent, and which trainer is where."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from foreload.base.job_token import given_token, new_token, write_token
from foreload.trainer.cluster.coordinator.failures import GuestsRefused
from foreload.trainer.cluster.messages.host_messages import NotWanted, StartAgain, StartTrainer, program_version
from foreload.trainer.cluster.processes.host_connections import HostConnections, HostedTrainer
from foreload.trainer.cluster.processes.starting import OnHost
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import TOKEN

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
