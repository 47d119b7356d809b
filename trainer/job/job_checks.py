"""Settings of a training that do not go together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from foreload.base.errors import SettingError

if TYPE_CHECKING:
    from foreload.trainer.job.job import TrainJob


def check_together(job: TrainJob) -> None:
    """Raise SettingError for the first rule that settings break together."""
    if job.resume and job.overwrite:
        raise SettingError(
            "--resume and --overwrite: only one of them can be given; --overwrite deletes the run that --resume continues"
        )
    if job.resume and job.from_checkpoint:
        raise SettingError(
            "--resume and --from: only one of them can be given; --from makes a new run, --resume goes on with one"
        )
    for flag, accepts in (("--accept-numerics", job.accept_numerics), ("--accept-model", job.accept_model)):
        if accepts and not (job.resume or job.from_checkpoint):
            raise SettingError(f"{flag}: is for a run that goes on; give it with --resume or --from, or leave it out")
    if job.namespace is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", job.namespace):
        raise SettingError(f"--namespace: must be 1 to 64 letters, digits, dots, dashes or underscores; got {job.namespace!r}")
    if job.loss is not None and job.label_weights:
        raise SettingError("--label-weights: is for the losses of the labels' kinds; with --loss, let that weigh its labels")
    _check_hosts(job)
    _check_checkpoints(job)
    if job.store.local and job.spare:
        raise SettingError(f"--spare: is for servers that --store names by URL; {job.store} starts dead servers again by itself")


def _check_hosts(job: TrainJob) -> None:
    if job.coordinator is None:
        for flag, value in (("--local-trainers", job.local_trainers), ("--token-file", job.token_file)):
            if value is not None:
                raise SettingError(f"{flag}: is for trainers on several hosts; give --coordinator, or leave it out")
        return
    if job.coordinator.host in ("0.0.0.0", "::"):
        raise SettingError(f"--coordinator: must name an address that other hosts reach, not all of them; got {job.coordinator}")
    if job.trainers_here > job.trainers:
        raise SettingError(f"--local-trainers: must be at most --trainers, {job.trainers}; got {job.local_trainers}")
    if job.store.local:
        raise SettingError(
            f"--store: must name servers that all hosts reach, by URL, where there is --coordinator; got {job.store}"
        )


def _check_checkpoints(job: TrainJob) -> None:
    if job.checkpoint_policy != "planned":
        return
    if job.checkpoint_every is None or job.checkpoint_every.steps is None or job.follow:
        raise SettingError(
            "--checkpoint-policy: planned needs to know the steps of all checkpoints to come; give --checkpoint-every as a number of steps, and "
            "a schedule that is complete, without --follow"
        )
