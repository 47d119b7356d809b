"""`foreload join`: add a trainer to a job whose coordinator runs on another host."""

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
    """Offer a trainer to the coordinator, and run it to its end.

    Args:
        coordinator: the address of the coordinator, "HOST:PORT".
        token_file: the file with the job's token. If None, the token is read from the environment.
        schedule: the folder of the schedule on this host. If None, the coordinator's path.
        address: the address at which other trainers reach this host.
        store: the URLs of the job's store shards, as this host reaches them.
        wait: how many seconds to wait for the coordinator to appear.
        start_process: starts the trainer's process.

    Raises:
        SettingError: a setting is missing or malformed.
        RunError: the coordinator refuses this host.
        PeerLost: the coordinator cannot be reached, or was lost.
        TrainerError: the trainer failed, or the coordinator stopped it.
        KeyboardInterrupt: a signal stopped the command before the trainer was started.
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
