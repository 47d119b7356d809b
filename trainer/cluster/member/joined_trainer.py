"""What a trainer has once it has come to the rendezvous of its job, for the parts of its process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from foreload.base.interrupts import Interrupts
from foreload.trainer.cluster.messages.rendezvous import EventSender, Rendezvous, join_store
from foreload.trainer.cluster.messages.trainers import LaunchSpec
from foreload.trainer.cluster.processes.starting import TrainerStart
from foreload.trainer.job.job import TrainJob

JOIN_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class JoinedTrainer:
    """start: what its process was started with; store: the rendezvous store, which `rendezvous` is on; job: the spec's, with the schedule's folder on
    this host. interrupts: of a process that a scheduler started; None: the launcher started it. reach_point: called with the points of `faults`.
    """

    start: TrainerStart
    store: Any
    rendezvous: Rendezvous
    events: EventSender
    spec: LaunchSpec
    job: TrainJob
    interrupts: Interrupts | None
    reach_point: Callable[[str], None] = lambda point: None

    @property
    def number(self) -> int:
        """Which trainer it is."""
        return self.start.trainer

    @property
    def joins(self) -> bool:
        """Whether it was started while others train."""
        return self.start.plan is not None

    @property
    def run(self) -> Path:
        """The run's folder, on hosts that have it."""
        return Path(self.job.run)

    @property
    def has_run(self) -> bool:
        """Whether this host does."""
        return self.start.on_host is None or self.start.on_host.has_run

    @property
    def device(self) -> str:
        """Where the dense part is."""
        return "cpu" if self.job.device != "cuda" else f"cuda:{self.number % max(torch.cuda.device_count(), 1)}"

    @property
    def connect(self) -> Callable[[], Any] | None:
        """Makes a further connection to the rendezvous store; None where the loss of another trainer is not survived: under a scheduler."""
        return None if self.interrupts is not None else lambda: join_store(self.start.rendezvous, JOIN_TIMEOUT)
