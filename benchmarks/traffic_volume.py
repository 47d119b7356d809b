"""Rows that a training with parity moves to and from the store: counted where they are asked for and sent, beside what accounts for them."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel, StoreAccess, begin_term, join_term
from foreload.trainer.assembly.start import Start
from foreload.trainer.job.job import TrainJob
from foreload.trainer.step.transport import LocalHub
from workload import PARITY, SHARDS, Workload, job, last_batches


def rows_moved(work: Workload, schedule: Schedule) -> dict[str, int]:
    """Train a schedule after the first one to its end; rows by kind, what they add up to (accounted), and what the client moved (moved)."""
    training = TrainJob.of(job(schedule.path, "small"))
    (transport,) = LocalHub([0]).transports()
    dense = DenseModel.build(training, schedule)
    placement = Placement.spread(SHARDS, *PARITY)
    with (
        work.stores("parity") as stores,
        tempfile.TemporaryDirectory() as logs,
        Store(stores.urls, timedelta(seconds=60)) as store,
    ):
        parts = dense.parts(training, schedule)
        access = StoreAccess(store, placement, training.run_namespace, FileLog(Path(logs)))
        trainer, events = begin_term(
            parts, access, join_term(parts, transport, [0]), Start(schedule.header.first_step - 1, last_batches(schedule))
        )
        with trainer.lanes.traffic as traffic:
            trainer.run(events, lambda step: False, lambda report: None, lambda report: None)
            trainer.lanes.write_everything_back(schedule.header.end_step, at_stop=False)
            counted = traffic.counters()
        moved = store.rows_read + store.rows_written
    fetched = arrived = 0
    for event in schedule.events():
        arrivals = schedule.arrivals(event, 0)
        fetched, arrived = fetched + int(np.count_nonzero(arrivals.tag)), arrived + len(arrivals)
    # Every arrival's residency ends in one write-back.
    kinds = {
        "fetches": fetched,
        "write-backs": arrived,
        "parity rows read": counted.parity_rows_read,
        "parity rows written": counted.parity_rows_written,
    }
    return {**kinds, "accounted": sum(kinds.values()), "moved": moved}
