"""`foreload train`, and the functions that programs call to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.base.errors import ForeloadError, SettingError
from foreload.base.interrupts import heeded_afterwards
from foreload.base.settings import named, names_by_resume, read_job_file, settings_of
from foreload.cache.errors import CacheError
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.checkpoints.lineage import named_or_newest
from foreload.trainer.cluster.processes.starting import ChildProcess, StartProcess
from foreload.trainer.compute import numerics
from foreload.trainer.errors import after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import AUTO
from foreload.trainer.run.directory import MANIFEST, Run
from foreload.trainer.run.event_log import CallBegan, CallEnded, read_events
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.servers import own_servers, store_setting

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending
    from foreload.trainer.cluster.messages.faults import RunObserver

# Settings that apply only to a run that is resumed.
_GOING_ON = ("accept_numerics", "accept_model", "folder_moved")


def train(job: TrainJob, observer: RunObserver | None = None, start_process: StartProcess = ChildProcess) -> Ending | None:
    """Call `trainer.cluster.launcher.train` in the environment that the job asks for.

    torch reads that environment when it is imported, so it is imported only afterwards.
    """
    numerics.set_environment(job.cpu_capability, job.threads)
    with heeded_afterwards():
        from foreload.trainer.cluster import launcher

        report = _report_of(job)
    ending = launcher.train(job, observer, start_process, report)
    if ending is not None and job.digest and ending.no_digest is None and "digest" not in ending.summary:
        # The run had ended in an earlier call that did not ask for the digest.
        from foreload.trainer.commands import digest

        try:
            ending.summary["digest"] = digest.run(job.run, None if job.store.local else str(job.store)).digest
        except ForeloadError as error:
            return replace(ending, no_digest=error)
    return ending


def _report_of(job: TrainJob) -> Callable[[Path], None]:
    """Return the function that leaves a report in the folder of a run that has stopped."""
    if job.no_report:
        return lambda run: None
    from foreload.trainer.pages.report import leave_report

    return leave_report


def is_permanent(error: ForeloadError, run: str) -> bool:
    """Return whether a call that failed with an error would fail again if it were repeated.

    It would if the error is permanent, and not caused by the present state of this machine or the
    servers. It would also if the run stopped twice in a row after the same step, for the same
    reason.
    """
    if error.permanent and not isinstance(error.__cause__, OSError | RuntimeError | CacheError):
        return True
    # The events show a repetition if the last three are an end, a begin and an end of a call.
    events = [event for event in read_events(Path(run)) if event.get("kind") in (CallBegan.kind, CallEnded.kind)][-3:]
    if [event["kind"] for event in events] != [CallEnded.kind, CallBegan.kind, CallEnded.kind]:
        return False
    before, after = ((event.get("step"), str(event.get("cause"))) for event in (events[0], events[2]))
    return before == after and str(error).startswith(after[1])


@dataclass(frozen=True, slots=True)
class Restored:
    """A run that was made from a checkpoint.

    Attributes:
        state: the state of the run.
        rows: the number of rows in the checkpoint's model.
    """

    run: str
    checkpoint: str
    state: str
    step: int
    rows: int

    def text(self) -> str:
        """Describe the run, and say how to resume it."""
        return (
            f"run {self.run}: {self.state} {after_step(self.step)}, {self.rows:,} rows; go on with: "
            f"foreload train SCHEDULE --run {self.run} --resume"
        )


def restored(path: str, given: Mapping[str, Any]) -> Restored:
    """Make a stopped run from a checkpoint.

    Args:
        path: the folder of the checkpoint.
        given: settings of `train`, by name.

    Raises:
        SettingError: a setting is malformed, or does not fit the checkpoint.
        RunError: the run cannot be made.
        CheckpointError: the checkpoint cannot be used.
        CacheError: a server failed.
    """
    values, _ = call_values({**given, "from_checkpoint": path}, None)
    job = TrainJob.of(values)
    numerics.set_environment(job.cpu_capability, job.threads)
    with heeded_afterwards():
        from foreload.trainer.cluster import launcher

    status = launcher.restored(job)
    assert job.from_checkpoint is not None
    rows = Checkpoint.open(job.from_checkpoint).row_count
    return Restored(job.run, job.from_checkpoint, status.state, status.step, rows)


def call_values(given: Mapping[str, Any], job_file: str | Path | None) -> tuple[dict[str, Any], Any]:
    """Return the settings of a call of `foreload train`, by name, for TrainJob.of.

    A setting is taken from the caller; else from the table [train] of the job file, if there is
    one; else, with `resume` or `from_checkpoint`, from the run or the checkpoint. With
    --resume=auto, `as_it_stands` decides later which of these applies.

    Args:
        given: the caller's settings, by name.
        job_file: the path of the job file.

    Returns:
        The settings, and where the job file wants the summary, which is no setting of the training;
        None if the file does not say.

    Raises:
        SettingError: a setting is malformed.
        RunError: the run to resume cannot be opened.
        CheckpointError: the checkpoint cannot be opened.
    """
    in_file = {} if job_file is None else read_job_file(job_file, "train", TrainJob, ["json"])
    summary = in_file.pop("json", None)
    values = in_file | named(TrainJob, given, "train:")
    return (values if values.get("resume") == AUTO else _completed(values)), summary


def as_it_stands(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, with --resume=auto resolved.

    The state of the run's folder now decides whether the call starts the run or resumes it.

    Raises:
        SettingError: a setting is missing, or does not go with --resume=auto.
        RunError: the run to resume cannot be opened.
        CheckpointError: the checkpoint cannot be opened.
    """
    if values.get("resume") != AUTO:
        return dict(values)
    if values.get("overwrite"):
        raise SettingError("--resume=auto and --overwrite: only one of them can be given; --resume=auto never deletes a run")
    if not values.get("run"):
        raise SettingError("--run: is missing; give the folder in which --resume=auto finds the run, or starts it")
    run = Run(values["run"])
    if not (run.path / MANIFEST).exists() or run.status is None:
        return _completed({name: value for name, value in values.items() if name not in ("resume", *_GOING_ON)})
    going_on = {name: value for name, value in values.items() if name != "from_checkpoint"}
    if "store" in going_on:
        going_on["store"] = own_servers(run.manifest, run.placement, str(going_on["store"]))
    return _completed(going_on)


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in the settings that the run or the checkpoint remembers."""
    if values.get("resume") and values.get("from_checkpoint"):
        # TrainJob raises the error that these two do not go together.
        return values
    if values.get("resume"):
        if not values.get("run"):
            raise SettingError("--run: is missing; give the run that --resume goes on with")
        run = Run.open(values["run"])
        return _remembered(run.manifest) | {"store": store_setting(run.manifest, run.placement)} | values
    if values.get("from_checkpoint"):
        checkpoint = named_or_newest(values["from_checkpoint"])
        values["from_checkpoint"] = str(checkpoint.place)
        before = _remembered(checkpoint.contents.run)
        # Settings that describe where the checkpoint was trained do not apply to where it is
        # trained next.
        elsewhere = set(names_by_resume(TrainJob, "free")) - {"schedule", "model_folder", "stop_early"}
        return {name: value for name, value in before.items() if name not in elsewhere} | values
    return values


def _remembered(manifest: Manifest) -> dict[str, Any]:
    """Return the settings with which a run is resumed unless the caller gives others."""
    # Runs of earlier versions remember an address, which now belongs to each call.
    own = {name for name, setting in settings_of(TrainJob).items() if not setting.stated}
    return {name: value for name, value in manifest.job.items() if name not in own} | {"schedule": manifest.stages[-1].path}
