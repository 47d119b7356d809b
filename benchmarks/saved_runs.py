"""A run of the reference workload that is stopped and saved again and again, for benchmarks of checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foreload.trainer.cluster.messages.faults import RunObserver, TrainerFault
from foreload.trainer.commands.train import train
from foreload.trainer.job.job import TrainJob
from foreload.trainer.saved.stopped_run import StoppedRun, open_stopped
from workload import job

STOP_LAG = 2  # steps that a training goes on once it was asked to stop


def stopped_after(schedule: Path, steps: Sequence[int], run: Path, **settings: Any) -> Iterator[StoppedRun]:
    """Train the small model, stopped after each of these steps and resumed from there; gives the run that was saved."""
    for number, step in enumerate(steps):
        observer = RunObserver()
        observer.faults = [TrainerFault(0, "rows applied", step - STOP_LAG, signal.SIGTERM)]
        train(TrainJob.of(job(schedule, "small", run=str(run), resume=number > 0, **settings)), observer)
        with open_stopped(str(run), None) as saved:
            yield saved
