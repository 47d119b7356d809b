"""Restore a checkpoint's rows to a store, whatever its shards, parity and the schedule's slots: as owner of every lane, by ordinary traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import BatchLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.staging import EndedRows
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.dense_file import load_dense, write_dense
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.checkpoints.row_files import CheckpointRows, newest_rows
from foreload.trainer.compute import numerics
from foreload.trainer.errors import CheckpointError, after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.manifest import Inexact, Manifest, Stage
from foreload.trainer.run.resume import continued
from foreload.trainer.saved.model_rows import given_ordinals, table_rows
from foreload.trainer.saved.owned_at_rest import owned_lanes


def on_other_slots(checkpoint: Checkpoint, schedule: Schedule) -> Manifest:
    """What the run of a checkpoint is, its last schedule being this one where the two differ in slots alone; otherwise what it was.

    Costs, where they do, what reading all rows of the checkpoint does, and 12 bytes of memory a row of the largest table. Raises CheckpointError
    where the rows are not those of this schedule, ScheduleError.
    """
    contents = checkpoint.contents
    run, stage = contents.run, Stage.of(schedule)
    last = run.stages[-1]
    if contents.state == "ended" or stage.identity == last.identity or stage.program != last.program:
        return run
    if not schedule.complete:
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: was saved with other --slots than schedule {schedule.path} has, which is to be complete for that; wait "
            "for `foreload prepare`"
        )
    ordinals = given_ordinals(schedule, contents.step)
    if ordinals.tolist() != [list(lane) for lane in contents.ordinals] or not _same_rows(checkpoint, schedule, ordinals):
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: its rows are not those that schedule {schedule.path} has trained {after_step(contents.step)}; prepare "
            f"that from the same log as {last.path}, with the same options but for --slots"
        )
    begun = next(
        segment.index + 1
        for segment in schedule.segments()
        if segment.kind == "train" and segment.first + len(segment.samples) > contents.step
    )
    stage = replace(stage, segments=begun, prefix=schedule.prefix(begun))
    return replace(run, stages=(*run.stages[:-1], stage))


def _same_rows(checkpoint: Checkpoint, schedule: Schedule, ordinals: np.ndarray) -> bool:
    """Whether every row has, at its ordinal, the id that a schedule gives it, and the tag, where that is known. ordinals: see `table_rows`."""
    for lane, expected in table_rows(schedule, checkpoint.contents.step, ordinals):
        for first, rows in newest_rows(checkpoint, lane, expected.table):
            part = slice(first, first + len(rows.id))
            known = expected.exact[part]
            if not np.array_equal(rows.id, expected.id[part]) or not np.array_equal(rows.tag[known], expected.tag[part][known]):
                return False
    return True


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """What the rows of a checkpoint are on a store. batches: of each lane the number of its last write-back batch; lost: shards lost meanwhile,
    whose rows only their stripes give.
    """

    batches: dict[str, int]
    lost: list[int]


def check_restorable(checkpoint: Checkpoint, job: TrainJob, model: DenseModel, on_bytes: Callable[[int], object]) -> None:
    """Raise what is wrong with a checkpoint, or with making a run of a job from it, before anything is deleted or started.

    model: the job's, into which the dense part is put. on_bytes: as for `Checkpoint.verify`. Raises CheckpointError, RunError, FingerprintError.
    """
    contents = checkpoint.contents
    if contents.tables != tuple(model.layouts):
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: its rows must be as the model of this call has them; is {job.model} another one now? Use that of the run"
        )
    checkpoint.verify(on_bytes)
    with checkpoint.local_dense() as path:
        load_dense(path, model.module, model.optimizer, contents.step)
    # Trainers that have a GPU each, and those of other hosts, find out as they join.
    if contents.run.fingerprint is not None and job.device == "cpu" and not job.accept_numerics:
        numerics.set_up(job.threads, cpu_capability=job.cpu_capability)
        numerics.check(numerics.fingerprint(), contents.run.fingerprint, goes_on="--from")


def restored_manifest(
    checkpoint: Checkpoint, job: TrainJob, schedule: Schedule, made: Manifest, goes_on: bool = True
) -> Manifest:
    """The manifest of a run that is made of a checkpoint, with a schedule that it goes on with, or, goes_on=False, may rest at the end of.

    made: that of a new run of the same job.

    Raises RunError where a run that rested where the checkpoint is could not go on so, CheckpointError, ScheduleError.
    """
    contents = checkpoint.contents
    run = on_other_slots(checkpoint, schedule)
    going_on, _ = continued(f"checkpoint {checkpoint.place}", run, contents.state, contents.step, job, schedule, goes_on)
    stages = run.stages
    if len(going_on.stages) == len(stages):
        stages = going_on.stages  # the last schedule, where it is now
    if goes_on:
        going_on = going_on.with_code(made.code, contents.step + 1)
    return Manifest(
        run_id=made.run_id,
        job=made.job,
        namespace=made.namespace,
        lanes=contents.run.lanes,
        store_urls=made.store_urls,
        local_stores=made.local_stores,
        stages=stages,
        fingerprint=contents.run.fingerprint,
        mixed_numerics=contents.run.mixed_numerics,
        rates=going_on.rates,
        watched=going_on.watched,
        code=going_on.code,
        mixed_code=going_on.mixed_code,
        inexact=_restored_once_more(contents.inexact),
        mixes_samples=made.mixes_samples,
    )


def _restored_once_more(inexact: Inexact | None) -> Inexact | None:
    return None if inexact is None else replace(inexact, restores=inexact.restores + 1)


def restore_rows(
    checkpoint: Checkpoint,
    store: Store,
    placement: Placement,
    namespace: str,
    log: BatchLog | None,
    ownership: Ownership,
    on_rows: Callable[[int], object],
) -> RestoredRows:
    """Write every row of a checkpoint, with its parity, to a store on which the run's lanes have nothing, or what an earlier attempt left.

    log: None without parity. on_rows: called with how many more were handed over. Raises CheckpointError, and CacheError as training does.
    """
    contents = checkpoint.contents
    lanes, tables = contents.run.lanes, len(contents.tables)
    stored = StoredRows(store, placement, contents.tables, namespace)
    nothing = np.zeros((lanes, tables), np.int64)
    with owned_lanes(stored, ownership, log, [0] * lanes, nothing, step=-1) as traffic:
        boundaries = [0] * lanes
        for table, lane in product(range(tables), range(lanes)):
            # Each row once, in the order of ordinals, so that the rows of a stripe come together.
            for first, rows in newest_rows(checkpoint, lane, table):
                traffic.write_back(lane, boundaries[lane], _ended(table, first, rows))
                boundaries[lane] += 1
                on_rows(len(rows.id))
        batches = {str(lane): traffic.release_lane(lane) for lane in range(lanes)}
        return RestoredRows(batches, traffic.shards.lost)


def _ended(table: int, first: int, rows: CheckpointRows) -> EndedRows:
    """Rows as if their residencies had ended, and the store had never had them. first: the first one's ordinal."""
    count = len(rows.id)
    tables, ordinals = np.full(count, table, np.int16), np.arange(first, first + count)
    # The base of a row that was never stored is not looked at.
    stored = np.zeros(count, np.int32)
    return EndedRows(tables, ordinals, rows.id, rows.tag, stored, rows.weights, rows.state, rows.weights, rows.state)


def restore_dense(checkpoint: Checkpoint, path: Path) -> None:
    """Put the dense part of a checkpoint where a run has its own. Raises CheckpointError and RunError."""
    write_dense(path, checkpoint.read(checkpoint.contents.dense))
