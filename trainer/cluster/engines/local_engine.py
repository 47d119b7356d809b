"""This machine as an engine, alone or with others on which `foreload join` is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from foreload.base.job_token import given_token, new_token, write_token
from foreload.cache.client.local import LocalStores
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.messages.host_messages import NotWanted, StartAgain, StartTrainer, program_version
from foreload.trainer.cluster.processes.host_connections import HostConnections, HostedTrainer
from foreload.trainer.cluster.processes.rendezvous_host import ChildRendezvous, RendezvousHost
from foreload.trainer.cluster.processes.starting import (
    WORKER,
    OnHost,
    ProcessStart,
    StartedProcess,
    StartProcess,
    TrainerStart,
)
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import TOKEN
from foreload.trainer.run.servers import plain
from foreload.trainer.saved.migration import LocalServers, OwnServers

_SAID = timedelta(seconds=15)  # between two messages that trainers are waited for
# A host may be silent for this much longer than a trainer, so the trainer is lost before its host.
_SILENCE = timedelta(seconds=5)


class LocalEngine(Engine):
    """This machine. Its store servers are the run's own, which listen on Unix sockets.

    Attributes:
        stores: The run's local servers. None if the run has none, or before they are known.
    """

    def __init__(self, start: StartProcess) -> None:
        self._start = start
        self.stores: LocalStores | None = None

    @property
    def own_servers(self) -> OwnServers | None:
        """See Engine."""
        return None if self.stores is None else LocalServers(self.stores)

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


class JoinedEngine(LocalEngine):
    """This machine and other hosts, whose trainers join by themselves at the job's --coordinator.

    Args:
        job: Says how many trainers this machine starts. The first ones are its own.
    """

    def __init__(self, start: StartProcess, job: TrainJob) -> None:
        super().__init__(start)
        assert job.coordinator is not None
        self._job, self._place = job, job.coordinator
        self.machines: dict[int, str] = dict.fromkeys(range(job.trainers_here), "")
        self.guests: set[int] = set()
        self._offered: dict[int, HostedTrainer] = {}  # by the number that each has got
        self._silence = job.peer_silence + _SILENCE
        self._token = ""
        self._connections: HostConnections | None = None

    def take(self) -> None:
        """See Engine. Also begins to listen for other hosts.

        Raises:
            SettingError: The job's token or its --coordinator cannot be used.
        """
        self._token = given_token(self._job.token_file) or new_token()
        self._connections = HostConnections(*self._place, self._token, program_version(), self._silence)

    def reserve_trainers(self, trainer_bytes: int) -> None:
        """See Engine. Waits until other hosts have offered all the trainers that this one does not start."""
        first, token_file = self._job.trainers_here, self._job.token_file
        # If the user gave no token, the new one is left in the run's folder, and the message names
        # that file.
        if given_token(token_file) is None:
            token_file = str(Path(self._job.run) / TOKEN)
            write_token(Path(token_file), self._token)
        wanted = self._job.trainers - first

        def said(there: int) -> None:
            if there < wanted:
                file = "" if token_file is None else f" --token-file {token_file}"
                sys.stderr.write(
                    f"foreload: waiting for {wanted - there} of {self._job.trainers} trainers: foreload join {self._place}{file}\n"
                )

        assert self._connections is not None
        for trainer, hosted in enumerate(self._connections.await_offers(wanted, said, _SAID), first):
            self._number(trainer, hosted)

    def _number(self, trainer: int, hosted: HostedTrainer) -> None:
        self._offered[trainer] = hosted
        self.machines[trainer] = hosted.host
        self.guests.add(trainer)

    def take_offers(self, offer: Callable[[], int | None]) -> list[int]:
        """See Engine."""
        taken = []
        assert self._connections is not None
        while (hosted := self._connections.take()) is not None:
            trainer = offer()
            if trainer is None:
                hosted.send(NotWanted("the job has as many trainers as lanes already, or is ending"))
                continue
            self._number(trainer, hosted)
            taken.append(trainer)
        return taken

    def start_trainer(self, start: TrainerStart, held: Sequence[int]) -> StartedProcess:
        """See Engine. A guest is started by its host."""
        hosted = self._offered.get(start.trainer)
        if hosted is None:
            return super().start_trainer(replace(start, on_host=OnHost(self._token, has_run=True)), held)
        job = self._job
        hosted.send(
            StartTrainer(
                start.trainer,
                start.rendezvous,
                plain(start.store_urls or ()),
                start.plan,
                str(Path(job.schedule).absolute()),
                job.threads,
                job.cpu_capability,
                self._silence.total_seconds(),
            )
        )
        return hosted

    def refuse(self, why: Mapping[int, str], said: Collection[int]) -> None:
        """See Engine."""
        kept = []
        for trainer, hosted in self._offered.items():
            if trainer in why:
                sys.stderr.write(f"foreload: {hosted.host}: its trainer was refused: {why[trainer]}\n")
                hosted.send(NotWanted("see above" if trainer in said else why[trainer]))
            elif hosted.poll() is None:
                hosted.send(StartAgain())
                kept.append(hosted)
        assert self._connections is not None
        self._connections.offer_again(kept)
        self._offered.clear()

    def close(self) -> None:
        """See Engine. Stops listening."""
        if self._connections is not None:
            self._connections.close()
