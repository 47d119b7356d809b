"""Prepare runs that training cannot go on with as they are.

These are new runs made from a checkpoint, crashed runs, and runs whose folder keeps rows that the
servers lacked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Literal

from foreload.base.progress import progress_bar
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_urls
from foreload.cache.errors import CacheError, RowsLost, StoreFull
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.namespace import FolderId, claim, foreign_note, owner, remove
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.checkpoints.lineage import newest_of_run, unusable
from foreload.trainer.checkpoints.restoring import check_restorable, restore_dense, restore_rows, restored_manifest
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.coordinator.trainer_group import TrainerGroup
from foreload.trainer.cluster.member.run_folder import rows_stay
from foreload.trainer.errors import (
    CheckpointError,
    CheckpointUnreachable,
    RunError,
    RunRefused,
    ShardsLost,
    TrainerError,
    after_step,
)
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import LOG, METRICS, PLACEMENT, STORES, Run
from foreload.trainer.run.event_log import CallEnded, EventLog, RowsKept
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.reach import reach
from foreload.trainer.run.report import reported_step
from foreload.trainer.run.resume import check_code_of_run, check_place
from foreload.trainer.run.servers import asked, servers_of, with_named
from foreload.trainer.saved.kept_lanes import folder_of, forget_kept_lanes, kept_lanes
from foreload.trainer.saved.kept_rows import put_back, put_kept_back
from foreload.trainer.saved.run_rows import check_not_training, own_rows
from foreload.trainer.saved.stopped_stores import check_rows, log_of


@contextlib.contextmanager
def claimed(job: TrainJob, run: Run, manifest: Manifest, start: Status, urls: Sequence[str]) -> Iterator[None]:
    """Claim the run's namespace on its servers while entered.

    With --resume, also check that the rows there are those of the run's last clean stop.

    Args:
        manifest: The run's manifest, as it will be published.
        start: The status with which the call begins.
        urls: The URLs of the store shards, with passwords.

    Raises:
        RunError, CacheError: The namespace cannot be claimed, or the rows are others.
    """
    # A resumed run can do without as many shards as parity covers.
    goes_on = job.resume and any(start.batches.values())
    spared = run.placement.r if goes_on else 0
    with Store.connect(asked(urls), job.store_silence, spared, job.patience.time) as store:
        mode: Literal["new", "resume", "overwrite"] = "resume" if goes_on else "overwrite" if job.overwrite else "new"
        own_rows(run, store, job.folder_moved)
        if mode == "overwrite":
            check_not_training(manifest.namespace, store, FolderId.of(run.path))
        claim(store, manifest.namespace, manifest.identity, mode, spared, FolderId.of(run.path))
        if job.resume:
            before = run.saved_status()
            check_rows(run, store, before)
            if before.state == "training":
                # The log's batches are newer than the rows, so it would be wrong to replay them.
                shutil.rmtree(run.path / LOG, ignore_errors=True)
                where = "from the beginning" if before.step < manifest.stages[0].first_step else after_step(before.step)
                sys.stderr.write(f"resumed {where}: the run has crashed since, and the rows are those of its last clean stop\n")
    try:
        yield
    except BaseException:
        # A call that failed before training began frees the namespace, so that the next call needs
        # no --overwrite.
        if run.status is None:
            with contextlib.suppress(Exception), Store(asked(urls), job.store_silence, timedelta(seconds=1)) as store:
                remove(store, manifest.namespace)
        raise


def restore_crashed(job: TrainJob, run: Run, before: Status, schedule: Schedule, model: DenseModel) -> TrainJob:
    """Restore a crashed run from its newest checkpoint, as if it had stopped cleanly there.

    The checkpoint is used only if it is later than the run's last clean stop, or if the rows of
    that stop no longer exist. Otherwise the run is left as it is.

    The run's rows on the store are deleted; the namespace stays. If this call is killed before it
    ends, the run still counts as crashed, and the same call can be made again.

    Args:
        before: The status that the crashed call left.

    Returns:
        The job with which training goes on.

    Raises:
        RunError, CheckpointError, CacheError: The run cannot be restored.
    """
    check_place(run, job)
    check_code_of_run(run, job)
    manifest, count, placement = run.manifest, run.manifest.local_stores, run.placement
    checkpoint = _newest(run, job, before.step)
    # Local stores always start with the rows that they saved at that stop.
    if checkpoint is None and not count and not _has_rows_of(run, job, before):
        checkpoint = _newest(run, job)
    if checkpoint is None:
        if job.checkpoint is not None and "://" not in job.checkpoint and not os.path.isdir(job.checkpoint):
            sys.stderr.write(
                f"foreload: warning: run {run.path}: crashed, and {job.checkpoint}, where its checkpoints should be, does not exist\n"
            )
        return job
    contents = checkpoint.contents
    try:
        with progress_bar(checkpoint.total_bytes, "B") as bar:
            check_restorable(checkpoint, job, model, bar.update)
    except CheckpointUnreachable:
        raise
    except CheckpointError as error:
        raise unusable(checkpoint.place, error) from error
    if not count:
        reach(parse_urls(str(job.store)), job.store_silence, job.patience.time)
        # The run is restored to the servers that --store names.
        manifest = with_named(manifest, placement, str(job.store))
    restored = restored_manifest(checkpoint, job, schedule, manifest)
    if not count:
        with Store.connect(asked(servers_of(run, str(job.store))), job.store_silence, 0, job.patience.time) as store:
            own_rows(run, store, job.folder_moved)
            # If another run has claimed the namespace since, its rows must not be deleted.
            claim(store, manifest.namespace, manifest.identity, "new", folder=FolderId.of(run.path))
    elif (left := LocalStores.find(run.path / STORES)) is not None:
        left.stop(save=False)
    # The status says "training" until `restore` has written everything. So if this call is killed
    # in between, the same call can be made again.
    start = replace(before, term=before.term + 1)
    run.raise_term(start.term)
    shutil.rmtree(run.path / LOG, ignore_errors=True)
    run.write_manifest(restored)
    # The restored rows replace whatever local stores saved before, so the placement of that time is
    # no longer needed.
    placement.save(run.path / PLACEMENT)
    run.forget_saved_placement()
    reported = reported_step(run.path / METRICS)
    again = f"; steps {contents.step + 1} to {reported} are repeated" if reported is not None and reported > contents.step else ""
    sys.stderr.write(f"run {run.path}: crashed, and continues from its newest checkpoint{again}\n")
    job = replace(job, resume=False, from_checkpoint=str(checkpoint.place), overwrite=True, namespace=manifest.namespace)
    stores = LocalStores(placement.shard_count, run.path / STORES, removed=placement.removed) if count else None
    return restore(job, run, checkpoint, start, stores)


def _newest(run: Run, job: TrainJob, after: int = -1) -> Checkpoint | None:
    """Return the newest checkpoint of a run after step `after`, in any of its folders, or None.

    Raises:
        CheckpointError: The checkpoint cannot be used.
    """
    manifest, found = run.manifest, list[Checkpoint]()
    for folder in run.checkpoint_folders(job.checkpoint):
        if (checkpoint := newest_of_run(folder, manifest, after)) is not None:
            found.append(checkpoint)
            after = checkpoint.contents.step
    return found[-1] if found else None


def _has_rows_of(run: Run, job: TrainJob, before: Status) -> bool:
    """Return whether the servers of a run have the rows of its last clean stop.

    Raises:
        CacheError: The servers cannot be asked.
    """
    manifest, spared = run.manifest, run.placement.r
    with Store.connect(asked(servers_of(run, str(job.store))), job.store_silence, spared, job.patience.time) as store:
        there = [shard for shard in run.placement.live if shard not in store.down]
        # If another program has overwritten the run's key, the rows may still exist. `claim`
        # decides.
        noted = [
            shard
            for shard in there
            if foreign_note(store, shard, manifest.namespace) or owner(store, manifest.namespace, shard) is not None
        ]
        if len(noted) < len(run.placement.live) - spared:
            return False
        try:
            claim(store, manifest.namespace, manifest.identity, "resume", spared)
            check_rows(run, store, before)
        except RunError:
            return False
    return True


def restore(job: TrainJob, run: Run, checkpoint: Checkpoint, start: Status, local: LocalStores | None) -> TrainJob:
    """Restore a checkpoint into a run that was just made, as if the run had stopped cleanly there.

    The status is written last, after local stores are saved. Whatever is killed before that, the
    same call can be made again.

    Args:
        start: The status with which the run begins.
        local: The run's local stores, if it has them. They are started and ended here.

    Returns:
        The job that resumes the run.

    Raises:
        RunError, CheckpointError, CacheError: The checkpoint cannot be restored.
    """
    manifest, contents = run.manifest, checkpoint.contents
    if local is not None:
        local.start()
    try:
        urls = local.urls if local is not None else servers_of(run, str(job.store))
        with claimed(job, run, manifest, start, urls):
            ownership = Ownership(start.term, manifest.identity)
            with (
                Store(asked(urls), job.store_silence) as store,
                log_of(run) as log,
                progress_bar(checkpoint.row_count, "row") as bar,
            ):
                rows = restore_rows(checkpoint, store, run.placement, manifest.namespace, log, ownership, bar.update)
            restore_dense(checkpoint, run.dense(contents.step))
            if local is not None:
                local.stop(save=True, lost=rows.lost)
            run.write_status(
                replace(
                    start,
                    state=contents.state,
                    step=contents.step,
                    batches=rows.batches,
                    totals=contents.totals,
                    lost=rows.lost,
                )
            )
    except StoreFull as error:
        if local is None:
            raise
        raise RunError(
            f"--run: the restored rows cannot be saved in {run.path}; free disk space, and run the same command again"
        ) from error
    finally:
        if local is not None:
            local.discard()
    sys.stderr.write(
        f"resumed from checkpoint {checkpoint.place}, {after_step(contents.step)}, with {checkpoint.row_count:,} rows\n"
    )
    return replace(job, from_checkpoint=None, resume=True, overwrite=False)


def stopped_again(job: TrainJob, run: Run, before: Status, schedule: Schedule, model: DenseModel, events: EventLog) -> TrainJob:
    """Bring a run that did not stop cleanly to a clean stop.

    If its folder keeps the rows that its servers lacked, these are put back, and the run continues
    from where it ended. Otherwise it is restored from its newest checkpoint, if that is possible.

    Args:
        before: The status that the last call left.

    Returns:
        The job with which training goes on.

    Raises:
        RunError, CheckpointError, CacheError: The run cannot be brought to a clean stop.
    """
    check_place(run, job)
    try:
        status = put_kept_back(run, job, schedule)
    except CacheError as error:
        if rows_stay(error):
            raise
        newest = run.newest_checkpoint(job.checkpoint)
        raise RunRefused(
            f"{error}; without these rows, those kept in {folder_of(run.path)} are of no use: delete that folder, and --resume goes on from "
            f"{'the last clean stop, if it can' if newest is None else f'checkpoint {newest}'}"
        ) from error
    if status is None:
        return restore_crashed(job, run, before, schedule, model)
    events.step, events.term = status.step, status.term
    sys.stderr.write(f"run {run.path}: the rows that it kept are on its servers again; it goes on {after_step(status.step)}\n")
    return job


def stop_at_end(job: TrainJob, group: TrainerGroup, shards: StoreShards, schedule: Schedule, events: EventLog) -> None:
    """Bring a run whose folder keeps rows to a clean stop at the end of a call.

    The servers lacked these rows when training ended. They are put back if the servers answer by
    now; then `group` has the final status.

    Raises:
        TrainerError: The servers do not answer. The rows stay in the run's folder.
        ShardsLost: More local servers have died than parity covers.
    """
    run, why = Run.open(job.run), group.failure
    kept = kept_lanes(run.path)
    assert kept is not None
    events.step, events.term = kept.status.step, kept.status.term
    events.note(RowsKept(cause=why))
    gone = [] if shards.local is None else [shard for shard in run.placement.live if shards.local.pids[shard] is None]
    if len(gone) > run.placement.r:
        # The rows of the dead servers exist nowhere else, so the kept rows are of no use.
        forget_kept_lanes(run.path)
        raise ShardsLost(str(RowsLost(gone, run.placement.r, why="their servers have died")), gone)
    # The trainers have already waited for these servers, so do not wait long again.
    impatient = replace(job, store_patience=0.0, store_timeout=min(job.store_silence.total_seconds(), 1.0))
    try:
        status = put_back(run, impatient, schedule, kept, shards.urls)
    except CacheError as error:
        raise TrainerError(
            f"{why}; training ended {after_step(kept.status.step)}, and the rows that its servers lack are kept in {run.path}: "
            "once they answer, go on with "
            "--resume"
        ) from error
    group.status, group.stopped = status, True
    events.note(CallEnded(state=status.state, cause=why))
    group.failure = f"{why} (training stopped {after_step(status.step)}, with everything saved)"
