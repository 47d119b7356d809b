"""Write a run's kept rows (`kept_lanes`) to the store; the run has then stopped cleanly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.handover.takeover import TakenLane, take_over_lost
from foreload.cache.protocol.ownership.batch_log import BatchLog
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.dense_file import write_dense
from foreload.trainer.job.job import TrainJob, layouts_of
from foreload.trainer.run.directory import STORES, Run
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.servers import asked, servers_of
from foreload.trainer.saved.kept import keep_schedule
from foreload.trainer.saved.kept_lanes import KeptLane, checked, forget_kept_lanes, kept_lanes, read_lane
from foreload.trainer.saved.kept_manifest import KeptLanes
from foreload.trainer.saved.run_rows import own_rows
from foreload.trainer.saved.stopped_stores import log_of, next_owner


def put_kept_back(run: Run, job: TrainJob, schedule: Schedule) -> Status | None:
    """Write the rows that a run keeps to its servers, before it goes on.

    Local servers are started for that, and ended. The run has then stopped cleanly, as its status
    says.

    Args:
        job: The job that goes on with it.
        schedule: The schedule that it was trained on last.

    Returns:
        The run's new status. None if it keeps no rows.

    Raises:
        RunError: The kept files are damaged, or the run's folder does not own the rows on the
            servers.
        CacheError: A server fails.
    """
    kept = kept_lanes(run.path)
    if kept is None:
        return None
    if run.manifest.local_stores is None:
        return put_back(run, job, schedule, kept, servers_of(run, str(job.store)))
    placement = run.placement
    local = LocalStores(placement.shard_count, run.path / STORES, adopt=True, removed=placement.removed).start()
    try:
        status = put_back(run, job, schedule, kept, local.urls)
    except BaseException:
        local.discard()
        raise
    local.leave(changed=True)
    return status


def put_back(run: Run, job: TrainJob, schedule: Schedule, kept: KeptLanes, urls: Sequence[str]) -> Status:
    """Write kept rows to a run's servers; as `put_kept_back`, for servers that are running.

    If it is interrupted, it can be repeated: each attempt takes the lanes over in a further term.

    Args:
        job: The job that goes on with it.
        schedule: The schedule that it was trained on last.
        kept: What the run keeps.
        urls: The servers' URLs by number, with passwords.
    """
    # Check the dense part first: nothing on the servers changes if it is damaged.
    manifest, placement = kept.manifest, run.placement
    dense = checked(run.path, kept.dense).read_bytes()
    with Store.connect(asked(urls), job.store_silence, placement.r, job.patience.time) as store:
        own_rows(run, store, job.folder_moved)
        ownership = next_owner(run, run.term)
        stored = StoredRows(store, placement, layouts_of(manifest.training_job, schedule.header.features), manifest.namespace)
        lanes = [read_lane(run.path, file) for file in kept.files]
        with log_of(run) as log:
            if log is not None:
                _hold(log, lanes)
            copied = {number: lane.copied for number, lane in enumerate(lanes)}
            taken = take_over_lost(stored, ownership, log, copied, last_owner_dead=True)
            with Traffic(stored, 0, log=log, ownership=ownership, patience=job.patience) as traffic:
                for lane in taken.values():
                    _write(traffic, lane)
                traffic.flush()
                lost = traffic.repair_shards(timedelta())
                batches = {str(lane): traffic.last_batch(lane) for lane in taken}
    # Every row is on the store. Forget the kept files only after the run's folder says so: until
    # then, another attempt needs them.
    status = replace(kept.status, batches=batches, lost=lost, term=ownership.term)
    write_dense(run.dense(status.step), dense)
    run.record_stop(manifest, status)
    forget_kept_lanes(run.path)
    keep_schedule(run, schedule, status.step)
    return status


def _hold(log: BatchLog, lanes: Sequence[KeptLane]) -> None:
    """Put records that were in trainers' memory into the run's log, unless it has them already."""
    for number, lane in enumerate(lanes):
        held = log.held(number)
        if lane.record is not None and (held is None or held.number < lane.record.number):
            log.hold(number, lane.record)


def _write(traffic: Traffic, lane: TakenLane) -> None:
    """Hand over to the traffic the rows of a lane that the store lacks."""
    traffic.add_lane(lane.plan(iter(())))
    boundary = lane.released_boundary
    for boundary, rows in lane.to_write:
        traffic.write_back(lane.lane, boundary, rows)
    # Rows in slots leave at one boundary after all others, as they do when training stops.
    traffic.write_back(lane.lane, boundary + 1, lane.ending.select(np.flatnonzero(~lane.stored)), at_stop=True)
