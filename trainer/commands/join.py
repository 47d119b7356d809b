"""`foreload join`: one more trainer of a job, on another host than its coordinator's."""

from __future__ import annotations

import os
from datetime import timedelta

from foreload.base.errors import SettingError
from foreload.base.interrupts import Interrupts
from foreload.base.job_token import TOKEN_VARIABLE, given_token
from foreload.trainer.cluster.processes.joining_host import HostJob, report, run_host
from foreload.trainer.cluster.processes.starting import StartProcess
from foreload.trainer.job.job_values import Place, Servers


def run(
    coordinator: str,
    token_file: str | None,
    schedule: str | None,
    address: str | None,
    store: str | None,
    wait: float,
    start_process: StartProcess,
) -> None:
    """Offer a trainer to the coordinator at "HOST:PORT", and run it to its end. wait: seconds for that to be there; the rest as the flags say, and
    `start_process`, which starts the trainer.

    Raises SettingError, RunError, TrainerError, PeerLost; KeyboardInterrupt where it was stopped before it was given anything to train.
    """
    place = Place.parse("HOST:PORT", coordinator)
    token = given_token(token_file)
    if token is None:
        raise SettingError(
            f"--token-file: is missing; give a copy of RUN/token of the coordinator's host, or set {TOKEN_VARIABLE}"
        )
    urls = None
    if store is not None:
        servers = Servers.parse("--store", store)
        if servers.local:
            raise SettingError(f"--store: must be the URLs of the job's store shards, as this host reaches them; got {store}")
        urls = servers.urls
    if schedule is not None:
        schedule = os.path.abspath(schedule)
    with Interrupts() as interrupts:
        job = HostJob(place.host, place.port, token, schedule, address, urls, timedelta(seconds=wait))
        run_host(job, interrupts, report, start_process)
