"""`foreload train`, and what a program calls to train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreload.trainer.cluster.processes import ChildProcess, StartProcess
from foreload.trainer.compute import numerics
from foreload.trainer.run.job import TrainJob

if TYPE_CHECKING:
    from foreload.trainer.cluster.faults import RunObserver
    from foreload.trainer.cluster.trainer_group import Ending


def train(job: TrainJob, observer: RunObserver | None = None, start_process: StartProcess = ChildProcess) -> Ending | None:
    """`foreload.trainer.cluster.launcher.train` under the environment that the job asks for: torch, which reads it, is imported only then."""
    numerics.set_environment(job.cpu_capability, job.threads)
    from foreload.trainer.cluster import launcher

    return launcher.train(job, observer, start_process)
