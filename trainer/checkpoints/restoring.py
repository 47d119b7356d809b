"""Restore a checkpoint's rows to a store, whatever its shards, its parity and the schedule's slots.

The caller owns every lane and writes the rows by ordinary traffic.
"""

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
from foreload.trainer.saved.stopped_traffic import owned_lanes


def on_other_slots(checkpoint: Checkpoint, schedule: Schedule) -> Manifest:
    """Return the manifest of a checkpoint's run, with the last schedule replaced by this one.

    It is replaced if the two schedules differ in slots alone; otherwise the manifest is returned
    unchanged. If they differ so, the call reads all rows of the checkpoint, and takes 12 bytes of
    memory per row of the largest table.

    Raises:
        CheckpointError: The schedule is not complete, or the checkpoint's rows are not those of
            this schedule.
        ScheduleError: The schedule cannot be read.
    """
    contents = checkpoint.contents
    run, stage = contents.run, Stage.of(schedule)
    last = run.stages[-1]
    # Schedules that differ in slots alone have the same program, but not the same identity.
    if contents.state == "ended" or stage.identity == last.identity or stage.program != last.program:
        return run
    if not schedule.complete:
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: was saved with other --slots than schedule {schedule.path} has, which must be complete first; wait "
            "for `foreload prepare`"
        )
    ordinals = given_ordinals(schedule, contents.step)
    if ordinals.tolist() != [list(lane) for lane in contents.ordinals] or not _same_rows(checkpoint, schedule, ordinals):
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: its rows are not those that schedule {schedule.path} trains up to this point, "
            f"{after_step(contents.step)}; prepare "
            f"that schedule from the same log as {last.path}, with the same options except --slots"
        )
    # The manifest is to be that of a run trained on this schedule, in which the segments up to the
    # one with the checkpoint's step have begun.
    begun = next(
        segment.index + 1
        for segment in schedule.segments()
        if segment.kind == "train" and segment.first + len(segment.samples) > contents.step
    )
    stage = replace(stage, segments=begun, prefix=schedule.prefix(begun))
    return replace(run, stages=(*run.stages[:-1], stage))


def _same_rows(checkpoint: Checkpoint, schedule: Schedule, ordinals: np.ndarray) -> bool:
    """Return whether every row has the id, and where known the tag, of its ordinal in a schedule.

    Args:
        schedule: A complete schedule.
        ordinals: See `table_rows`.
    """
    for lane, expected in table_rows(schedule, checkpoint.contents.step, ordinals):
        for first, rows in newest_rows(checkpoint, lane, expected.table):
            part = slice(first, first + len(rows.id))
            known = expected.exact[part]
            if not np.array_equal(rows.id, expected.id[part]) or not np.array_equal(rows.tag[known], expected.tag[part][known]):
                return False
    return True


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """The state of a checkpoint's rows on a store.

    Attributes:
        batches: By lane, the number of its last write-back batch.
        lost: The shards that were lost meanwhile. Their rows can only be decoded from their
            stripes.
    """

    batches: dict[str, int]
    lost: list[int]


def check_restorable(checkpoint: Checkpoint, job: TrainJob, model: DenseModel, on_bytes: Callable[[int], object]) -> None:
    """Check that a job can make a run of a checkpoint, before anything is deleted or started.

    Args:
        checkpoint: The checkpoint. Every file is read.
        job: The job of the new run.
        model: The job's model, into which the dense part is loaded.
        on_bytes: As for `Checkpoint.verify`.

    Raises:
        CheckpointError: A file is damaged, or the rows are not as the job's model has them.
        RunError: The dense part does not fit the model.
        FingerprintError: This process computes with other numerics than the run, and the job does
            not accept that.
    """
    contents = checkpoint.contents
    if contents.tables != tuple(model.layouts):
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: its rows must have the layout that this call's model gives them; "
            f"if {job.model} has changed, use the model of the run"
        )
    checkpoint.verify(on_bytes)
    with checkpoint.local_dense() as path:
        load_dense(path, model.module, model.optimizer, contents.step)
    # Only CPU numerics can be checked here. Trainers with a GPU, and trainers on other hosts, are
    # checked when they join.
    if contents.run.fingerprint is not None and job.device == "cpu" and not job.accept_numerics:
        numerics.set_up(job.threads, cpu_capability=job.cpu_capability)
        numerics.check(numerics.fingerprint(), contents.run.fingerprint, goes_on="--from")


def restored_manifest(
    checkpoint: Checkpoint, job: TrainJob, schedule: Schedule, made: Manifest, goes_on: bool = True
) -> Manifest:
    """Return the manifest of a run that is made from a checkpoint.

    Args:
        job: The job of the new run.
        schedule: The schedule that the run goes on with.
        made: The manifest of a new run of the same job.
        goes_on: If False, the run may also stay stopped at the end of the schedule.

    Raises:
        RunError: A run that had stopped at the checkpoint's step could not go on like this.
        CheckpointError: The rows are not those of the schedule.
        ScheduleError: The schedule cannot be read.
    """
    contents = checkpoint.contents
    run = on_other_slots(checkpoint, schedule)
    going_on, _ = continued(f"checkpoint {checkpoint.place}", run, contents.state, contents.step, job, schedule, goes_on)
    stages = run.stages
    if len(going_on.stages) == len(stages):
        # The run goes on with the same schedule; its stage says where that is now.
        stages = going_on.stages
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
    """Write every row of a checkpoint, with its parity, to a store.

    The run's lanes have no rows there, or what an earlier attempt left.

    Args:
        store: Open on the run's servers.
        log: Where the batches are held. None without parity.
        ownership: The owner of all lanes.
        on_rows: Called with the number of rows just handed over.

    Raises:
        CheckpointError: A file is damaged.
        CacheError: As training raises it.
    """
    contents = checkpoint.contents
    lanes, tables = contents.run.lanes, len(contents.tables)
    stored = StoredRows(store, placement, contents.tables, namespace)
    nothing = np.zeros((lanes, tables), np.int64)
    with owned_lanes(stored, ownership, log, [0] * lanes, nothing, step=-1) as traffic:
        boundaries = [0] * lanes
        for table, lane in product(range(tables), range(lanes)):
            # Each row is written once. The order of ordinals brings the rows of a stripe together.
            for first, rows in newest_rows(checkpoint, lane, table):
                traffic.write_back(lane, boundaries[lane], _ended(table, first, rows))
                boundaries[lane] += 1
                on_rows(len(rows.id))
        batches = {str(lane): traffic.release_lane(lane) for lane in range(lanes)}
        return RestoredRows(batches, traffic.shards.lost)


def _ended(table: int, first: int, rows: CheckpointRows) -> EndedRows:
    """Return rows as if their residencies had ended and the store had never had them.

    Args:
        table: The table of all rows.
        first: The ordinal of the first row; the others follow without gaps.
    """
    count = len(rows.id)
    tables, ordinals = np.full(count, table, np.int16), np.arange(first, first + count)
    # A stored tag of 0 says that the store never had the row. Its base, the last two arguments, is
    # not read then, so the row's own values stand in for it.
    stored = np.zeros(count, np.int32)
    return EndedRows(tables, ordinals, rows.id, rows.tag, stored, rows.weights, rows.state, rows.weights, rows.state)


def restore_dense(checkpoint: Checkpoint, path: Path) -> None:
    """Write the dense part of a checkpoint to the file of a run's dense part.

    Raises CheckpointError and RunError.
    """
    write_dense(path, checkpoint.read(checkpoint.contents.dense))
