"""`foreload train`, and what a program calls to train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.pipelines.base.settings import read_job_file, settings_of
from foreload.pipelines.errors import SettingError
from foreload.trainer.checkpoints.format import Checkpoint
from foreload.trainer.checkpoints.lineage import named_or_newest
from foreload.trainer.cluster.processes import ChildProcess, StartProcess
from foreload.trainer.compute import numerics
from foreload.trainer.run.directory import Run
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.resume import FREE_SETTINGS
from foreload.trainer.run.servers import store_setting

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending
    from foreload.trainer.cluster.faults import RunObserver


def train(job: TrainJob, observer: RunObserver | None = None, start_process: StartProcess = ChildProcess) -> Ending | None:
    """`foreload.trainer.cluster.launcher.train` under the environment that the job asks for: torch, which reads it, is imported only then."""
    numerics.set_environment(job.cpu_capability, job.threads)
    from foreload.trainer.cluster import launcher

    return launcher.train(job, observer, start_process)


def restored(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Make a run of a checkpoint, which rests. given: settings of `train`, by their names. Returns what the run is.

    Raises SettingError, RunError, CheckpointError, CacheError.
    """
    values, _ = call_values({**given, "from_checkpoint": path}, None)
    job = TrainJob.of(values)
    numerics.set_environment(job.cpu_capability, job.threads)
    from foreload.trainer.cluster import launcher

    status = launcher.restored(job)
    assert job.from_checkpoint is not None
    rows = Checkpoint.open(job.from_checkpoint).row_count
    return {"run": job.run, "checkpoint": job.from_checkpoint, "state": status.state, "step": status.step, "rows": rows}


def call_values(given: Mapping[str, Any], job_file: str | Path | None) -> tuple[dict[str, Any], Any]:
    """The settings of a call of `foreload train`, by their names, for TrainJob.of: what its caller gives, else what the table [train] of the job
    file says, if there is one, else, with `resume` or `from_checkpoint`, what the run was started with.

    Also where the job file wants the summary, which is no setting of the training; None where it says nothing. Raises SettingError, RunError and
    CheckpointError.
    """
    in_file = {} if job_file is None else read_job_file(job_file, "train", TrainJob, ["json"])
    summary = in_file.pop("json", None)
    values = in_file | dict(given)
    if values.get("resume") and values.get("from_checkpoint"):
        return values, summary  # TrainJob says that these do not go together
    if values.get("resume"):
        if not values.get("run"):
            raise SettingError("--run: is missing; give the run that --resume goes on with")
        run = Run.open(values["run"])
        return _remembered(run.manifest) | {"store": store_setting(run.manifest, run.placement)} | values, summary
    if values.get("from_checkpoint"):
        checkpoint = named_or_newest(values["from_checkpoint"])
        values["from_checkpoint"] = str(checkpoint.place)
        before = _remembered(checkpoint.contents.run)
        # Where it was trained says nothing of where it is to be.
        elsewhere = set(FREE_SETTINGS) - {"schedule", "model_folder", "stop_early"}
        return {name: value for name, value in before.items() if name not in elsewhere} | values, summary
    return values, summary


def _remembered(manifest: Manifest) -> dict[str, Any]:
    """The settings with which a run goes on where nothing else is said."""
    # Runs of earlier versions remember an address, which is each call's own by now.
    own = {name for name, setting in settings_of(TrainJob).items() if not setting.stated}
    return {name: value for name, value in manifest.job.items() if name not in own} | {"schedule": manifest.stages[-1].path}
