"""What a run keeps of its schedule, to read its model when the schedule no longer exists."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.kept import keep, note_position
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import KEPT, Run


def keep_schedule(run: Run, schedule: Schedule, step: int | None = None) -> None:
    """Keep in RUN what commands that read its model need of a schedule, once that is complete.

    A failure to keep it is reported and stops nothing.

    Args:
        schedule: The schedule that it is trained on.
        step: The last step trained, if the run has stopped: then what was kept of earlier schedules
            is deleted. None if training begins.

    Raises:
        ScheduleError: The schedule to be trained on is damaged.
    """
    if not schedule.complete:
        return
    folder = run.path / KEPT / schedule.identity[:16]
    try:
        if not folder.exists():
            keep(schedule, folder)
        if step is not None:
            note_position(schedule, folder, step)
            for other in [path for path in folder.parent.iterdir() if path != folder]:
                shutil.rmtree(other)
    except (OSError, ScheduleError) as error:
        # A damaged schedule could not be trained on either.
        if step is None and isinstance(error, ScheduleError):
            raise
        sys.stderr.write(
            f"the run cannot keep a copy of what it needs of its schedule, so {schedule.path} must stay where it is: {error}\n"
        )


def schedule_of(run: Run) -> Schedule:
    """Return the schedule that a run was trained on last, or what the run keeps of it.

    Raises RunError if neither exists.
    """
    stage = run.manifest.stages[-1]
    why = f"{stage.path} is now a different schedule"
    for path in (Path(stage.path), run.path / KEPT / stage.identity[:16]):
        try:
            schedule = Schedule(path)
            if schedule.identity == stage.identity:
                return schedule
        except ScheduleError as error:
            why = why if path.parent == run.path / KEPT else str(error)
    raise RunError(f"run {run.path}: needs the schedule that it was trained on: {why}; put that one back")


def open_schedule(job: TrainJob) -> Schedule:
    """Return the schedule to train on.

    Raises:
        ScheduleError: It cannot be opened.
        RunError: It cannot be opened, and a run cannot go on without it.
    """
    try:
        return Schedule(job.schedule, follow=job.follow)
    except ScheduleError as error:
        if not job.resume:
            raise
        raise RunError(
            f"run {job.run}: to go on, it needs its whole schedule; it keeps only what evaluate, export and digest need of it: {error}; "
            f"or name the folder that has it now: foreload train SCHEDULE --run {job.run} --resume"
        ) from error
