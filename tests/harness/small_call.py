"""A call of `foreload train` for the coordinator's parts, where nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from foreload.base.interrupts import Interrupts
from foreload.cache.parity.placement import Placement
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.event_log import EventLog
from foreload.trainer.run.manifest import Status

EVALUATED = 6
"""After how many steps of it there is an evaluation."""


def small_call(run: Path, lanes: int = 4, step: int = -1, term: int = 1, **settings: Any) -> TrainingCall:
    """A call whose events are noted in a folder, after a step of a term. settings: of its job."""
    job = TrainJob.of({"schedule": "-", "run": str(run), "store": "local:1", **settings})
    placement = Placement.spread(job.store.count, *job.code(job.store.count))
    header = mock.Mock(lanes=lanes, eval_every=EVALUATED, steps_per_epoch=1000, set_names=[""])
    header.next_evaluated = lambda step: (step + 1) // EVALUATED * EVALUATED + EVALUATED - 1
    return TrainingCall(
        job=job,
        run=mock.Mock(path=run, placement=placement),
        manifest=mock.Mock(store_urls=(), run_id="a run"),
        start=Status("training", step, {str(lane): 0 for lane in range(lanes)}, term=term),
        schedule=mock.Mock(header=header),
        layouts=[],
        events=EventLog(run, step, term),
        observer=RunObserver(),
        interrupts=Interrupts(),
    )
