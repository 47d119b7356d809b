"""Rows that a training with parity moves to and from the store: counted where they are asked for and sent, beside what accounts for them."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.step import Trainer
from foreload.trainer.compute.transport import LocalHub
from foreload.trainer.run.assembly import DenseModel, Start, assemble
from foreload.trainer.run.job import TrainJob
from workload import PARITY, SHARDS, Workload, job


def rows_moved(work: Workload, schedule: Schedule) -> dict[str, int]:
    """Train a schedule after the first one to its end; rows by kind, what they add up to (accounted), and what the client moved (moved)."""
    training = TrainJob.of(job(schedule.path, "small"))
    (transport,) = LocalHub(1).transports()
    dense = DenseModel.build(training, schedule)
    placement = Placement.spread(SHARDS, *PARITY)
    with (
        work.stores("parity") as stores,
        tempfile.TemporaryDirectory() as logs,
        Store(stores.urls, timedelta(seconds=60)) as store,
    ):
        log = FileLog(Path(logs))
        part, events = assemble(training, schedule, dense, Start.anew(schedule), [0], transport, store, placement, log)
        with part.traffic:
            trainer = Trainer(part)
            trainer.run(events, lambda step: False, lambda report: None, lambda report: None)
            trainer.write_everything_back(schedule.header.end_step, at_stop=False)
            counted = part.traffic.counters()
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
