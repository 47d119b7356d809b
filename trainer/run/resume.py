"""What a call of `foreload train` goes by, and whether a run can be trained so: a new one that is no continuation, or one that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreload.pipelines.base.settings import read_job_file, settings_of
from foreload.pipelines.errors import SettingError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import MANIFEST, Run
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.manifest import Manifest, Stage

# Settings that the trained model does not depend on: a run may go on with other ones.
FREE_SETTINGS = (
    "schedule",
    "run",
    "model_folder",
    "store",
    "parity",  # checked against RUN's placement, which holds in any case
    "trainers",
    "memory",
    "namespace",
    "store_timeout",
    "copies",
    "peer_timeout",
)

# Settings of the numerics fingerprint: a run may go on with other ones where that is accepted.
NUMERICS_SETTINGS = ("threads", "cpu_capability", "device")


def check_trainable(schedule: Schedule, job: TrainJob) -> None:
    """Raise RunError for a schedule of evaluation steps only, and for one that continues a run unless that is to be resumed."""
    header = schedule.header
    if not header.training_samples:
        raise RunError(
            f"schedule {schedule.path}: has evaluation steps only; evaluate a run on it: foreload evaluate RUN {schedule.path}"
        )
    if job.resume or header.parent is None:
        return
    run = Run(job.run)
    last = run.manifest.stages[-1] if (run.path / MANIFEST).exists() else None
    if last is not None and last.checksum == header.parent:
        raise RunError(
            f"schedule {schedule.path}: continues run {job.run}, which was trained on {last.path}; give --resume to go on with it"
        )
    parent = schedule.made_with("after") or "the schedule that it was prepared after"
    raise RunError(
        f"schedule {schedule.path}: continues the run that was trained on {parent}, not a new one; give that run's folder with --run, "
        "and --resume"
    )


def call_values(given: Mapping[str, Any], job_file: str | Path | None) -> tuple[dict[str, Any], Any]:
    """The settings of a call of `foreload train`, by their names, for TrainJob.of: what its caller gives, else what the table [train] of the job
    file says, if there is one, else, with `resume`, what the run was started with.

    Also where the job file wants the summary, which is no setting of the training; None where it says nothing. Raises SettingError and RunError.
    """
    in_file = {} if job_file is None else read_job_file(job_file, "train", TrainJob, ["json"])
    summary = in_file.pop("json", None)
    values = in_file | dict(given)
    return (_resumed_values(values) if values.get("resume") else values), summary


def _resumed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values.get("run"):
        raise SettingError("--run: is missing; give the run that --resume goes on with")
    manifest = Run.open(values["run"]).manifest
    # Runs of earlier versions remember an address, which is each call's own by now.
    own = {name for name, setting in settings_of(TrainJob).items() if not setting.stated}
    remembered = {name: value for name, value in manifest.job.items() if name not in own}
    return remembered | {"schedule": manifest.stages[-1].path} | dict(values)


def resumed(run: Run, job: TrainJob, schedule: Schedule) -> tuple[Manifest, int]:
    """The manifest of a run that goes on, and the last step already trained.

    With the schedule that was being trained when it stopped, or with one prepared --after it. Raises RunError.
    """
    manifest, status = run.manifest, run.saved_status()
    before = manifest.training_job
    for name, setting in settings_of(TrainJob).items():
        of_numerics = name in NUMERICS_SETTINGS
        if name in FREE_SETTINGS or not setting.stated or (of_numerics and job.accept_numerics):
            continue
        if getattr(before, name) != getattr(job, name):
            was, now = before.to_dict()[name], job.to_dict()[name]
            remedy = "leave it out" + (", or add --accept-numerics" if of_numerics else "")
            raise RunError(f"{setting.flag}: must be what the run was started with, {was!r}; got {now!r}; {remedy}")
    if job.accept_numerics:
        manifest = replace(manifest, job=manifest.job | {name: getattr(job, name) for name in NUMERICS_SETTINGS})
    placement = run.placement
    if job.parity is not None and job.code(placement.shard_count) != (placement.k, placement.r):
        was = f"{placement.k}+{placement.r}" if placement.r else "off"
        raise RunError(f"--parity: must be what the run was started with, {was}; got {job.parity}; leave it out")
    if schedule.header.lanes != manifest.lanes:
        raise RunError(
            f"schedule {schedule.path}: has {schedule.header.lanes} lanes, the run {manifest.lanes}; prepare it with --after"
        )
    last, stage = manifest.stages[-1], Stage.of(schedule)
    if stage.identity == last.identity:
        if status.state == "ended":
            raise RunError(
                f"run {run.path}: is at the end of {schedule.path} already; prepare further data with `foreload prepare --after`, "
                "and give that schedule"
            )
        if schedule.complete:  # else trainers find out, who wait for it
            check_same(last, schedule)
        stage = replace(stage, segments=last.segments, prefix=last.prefix)
        return replace(manifest, stages=(*manifest.stages[:-1], stage)), status.step
    if stage.path == last.path:
        raise RunError(
            f"schedule {schedule.path}: is not the one that the run was trained on, but was prepared in its place since; prepare that one "
            "again, with the same data and options, or give one that was prepared --after it"
        )
    if schedule.header.parent is None or schedule.header.parent != last.checksum:
        raise RunError(
            f"schedule {schedule.path}: does not continue {last.path}, which the run was trained on; prepare it with --after that"
        )
    if status.state != "ended":
        raise RunError(
            f"run {run.path}: stopped after step {status.step}, before the end of {last.path}; --resume with that one first"
        )
    return replace(manifest, stages=(*manifest.stages, stage)), stage.first_step - 1


def check_same(stage: Stage, schedule: Schedule) -> None:
    """Raise RunError if a run was trained on other segments of a schedule than there are now, or will be; those are waited for."""
    if stage.identity == schedule.identity and stage.segments and schedule.prefix(stage.segments) != stage.prefix:
        raise RunError(
            f"schedule {schedule.path}: was prepared anew, and its first {stage.segments} segments are not those that the run was trained on; "
            "prepare it from the same data, with the same options"
        )
