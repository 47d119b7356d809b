"""Runs whose trainers kept what the servers lacked: brought to rest at the end of the call, if servers answer by then, or as they go on."""

from __future__ import annotations

import sys
from dataclasses import replace

from foreload.cache.errors import CacheError, RowsLost
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.coordinator.trainer_group import TrainerGroup
from foreload.trainer.cluster.member.keeping import rows_stay
from foreload.trainer.cluster.restored_run import restore_broken_off
from foreload.trainer.errors import RunRefused, ShardsLost, TrainerError, after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import CallEnded, EventLog, RowsKept
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.resume import check_place
from foreload.trainer.saved.kept_lanes import folder_of, forget_kept_lanes, kept_lanes
from foreload.trainer.saved.kept_rows import put_back, put_kept_back


def at_rest_again(job: TrainJob, run: Run, before: Status, schedule: Schedule, model: DenseModel, events: EventLog) -> TrainJob:
    """Have a run that did not come to rest be at rest: as it ended, where it keeps what that takes, or as its newest checkpoint has it, if it can.

    Returns the job with which it goes on. Raises RunError, CacheError.
    """
    check_place(run, job)
    try:
        status = put_kept_back(run, job, schedule)
    except CacheError as error:
        if rows_stay(error):
            raise
        newest = run.newest_checkpoint(job.checkpoint)
        raise RunRefused(
            f"{error}; without these rows, what is kept in {folder_of(run.path)} is of no use: delete that folder, and --resume goes on from "
            f"{'the last clean stop, if it can' if newest is None else f'checkpoint {newest}'}"
        ) from error
    if status is None:
        return restore_broken_off(job, run, before, schedule, model)
    events.step, events.term = status.step, status.term
    sys.stderr.write(f"run {run.path}: the rows that it kept are on its servers again; it goes on {after_step(status.step)}\n")
    return job


def rest_at_end(job: TrainJob, group: TrainerGroup, shards: StoreShards, schedule: Schedule, events: EventLog) -> None:
    """Have a run come to rest that keeps rows which its servers lacked when it ended, if they answer by now. Raises TrainerError and ShardsLost where
    they do not.
    """
    run, why = Run.open(job.run), group.failure
    kept = kept_lanes(run.path)
    assert kept is not None
    events.step, events.term = kept.status.step, kept.status.term
    events.note(RowsKept(cause=why))
    gone = [] if shards.local is None else [shard for shard in run.placement.live if shards.local.pids[shard] is None]
    if len(gone) > run.placement.r:
        # Nobody else has what they had, so what is kept is of no use.
        forget_kept_lanes(run.path)
        raise ShardsLost(str(RowsLost(gone, run.placement.r, why="their servers have died")), gone)
    # They were waited for already.
    impatient = replace(job, store_patience=0.0, store_timeout=min(job.store_silence.total_seconds(), 1.0))
    try:
        status = put_back(run, impatient, schedule, kept, shards.urls)
    except CacheError as error:
        raise TrainerError(
            f"{why}; training ended {after_step(kept.status.step)}, and what its servers lack is kept in {run.path}: once they answer, go on with "
            "--resume"
        ) from error
    group.status, group.at_rest = status, True
    events.note(CallEnded(state=status.state, cause=why))
    group.failure = f"{why} (training stopped {after_step(status.step)}, with everything saved)"
