"""What a trainer knows after it has joined its job, shared by the parts of its process."""

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
    """A trainer that has joined the rendezvous of its job.

    Attributes:
        start: What the process was started with.
        store: The rendezvous store, on which `rendezvous` is built.
        job: The job of `spec`, with the schedule's folder on this host.
        interrupts: The signals received, if a scheduler started this process. None if the launcher
            started it.
        reach_point: Called with each fault point that the trainer reaches (`messages.faults`).
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
        """The trainer's number."""
        return self.start.trainer

    @property
    def joins(self) -> bool:
        """Whether this trainer was started while others train."""
        return self.start.plan is not None

    @property
    def run(self) -> Path:
        """Path of the run's folder, on hosts that have it."""
        return Path(self.job.run)

    @property
    def has_run(self) -> bool:
        """Whether this host has the run's folder."""
        return self.start.on_host is None or self.start.on_host.has_run

    @property
    def device(self) -> str:
        """The torch device of the dense part; trainers share the CUDA devices in turn."""
        return "cpu" if self.job.device != "cuda" else f"cuda:{self.number % max(torch.cuda.device_count(), 1)}"

    @property
    def connect(self) -> Callable[[], Any] | None:
        """A function that opens a further connection to the rendezvous store.

        None under a scheduler, where the job does not survive the loss of a trainer.
        """
        return None if self.interrupts is not None else lambda: join_store(self.start.rendezvous, JOIN_TIMEOUT)
