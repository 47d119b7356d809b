"""Trainings by `foreload train`'s own launcher in which trainers are killed or stopped one after the other, and how each loss went."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreload.trainer.cluster.messages.control import AskStatus, RunStatus, ask
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.cluster.messages.trainers import Ready, StepEnded, TermLeft, TrainerEvent
from foreload.trainer.run.timeline import StepTimes, Timeline
from shard_loss import stop_soon

AFTER_SECONDS = 0.2  # at random, that an injection comes after the event that it follows: nothing is synchronous with it


@dataclass(frozen=True, slots=True)
class TrainerFault:
    """What is done to a trainer: SIGKILL, or SIGSTOP. leader: to the one that hosts lane 0; else to the one with the highest number."""

    signal_number: int
    leader: bool


@dataclass(slots=True)
class TrainerLoss:
    """A fault, and when (time.monotonic()) it was injected. trainers: how many there were; since: when the calm before it began.

    left, ready: when the launcher was told of the first trainer that left the term, and of the last that was ready for the next one.
    """

    fault: TrainerFault
    trainers: int
    since: float
    injected: float
    left: float = 0.0
    ready: float = 0.0


@dataclass(slots=True)
class _Seen:
    """What the injector knows of the run: the last loss, if it is not over, and when the calm began."""

    loss: TrainerLoss | None = None
    calm_since: float = 0.0
    steps: int = 0  # of this calm
    over: bool = False


class TrainerInjector(RunObserver):
    """Injects faults into trainers, each once the run was calm for long enough, and then has the run stop.

    calm: seconds, and steps, enough for new copies to have every slot. seed: of the moments.
    """

    def __init__(self, run: Path, faults: Sequence[TrainerFault], calm: tuple[float, int], seed: int) -> None:
        self.trainer_losses: list[TrainerLoss] = []
        self._run, self._faults, self._calm = run, list(faults), calm
        self._random = random.Random(seed)
        self._steps = StepTimes()
        self._seen = _Seen()
        self._last_step = -1

    @property
    def timeline(self) -> Timeline:
        """All steps, one at least."""
        return self._steps.timeline

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Note what happens; inject, or stop, when it is time."""
        seen, now = self._seen, time.monotonic()
        match event:
            case TermLeft():
                if seen.loss is not None and not seen.loss.left:
                    seen.loss.left = now
            case Ready():
                if seen.loss is not None:
                    seen.loss.ready = now
            case StepEnded(report, at):
                self._steps.note(report, at)
                if report.step > self._last_step:
                    self._last_step = report.step
                    self._count(at)

    def _count(self, at: float) -> None:
        """A step more has ended."""
        seen = self._seen
        if seen.loss is not None:
            if not seen.loss.ready or at <= seen.loss.ready:
                return  # of before the loss
            seen.loss = None
            seen.calm_since, seen.steps = at, 0
        seen.calm_since = seen.calm_since or at
        seen.steps += 1
        if seen.over or at - seen.calm_since < self._calm[0] or seen.steps < self._calm[1]:
            return
        seen.over = not self._faults
        if seen.over:
            stop_soon(self._run)
            return
        fault = self._faults.pop(0)
        seen.loss = TrainerLoss(fault, 0, seen.calm_since, float("inf"))
        timer = threading.Timer(AFTER_SECONDS * self._random.random(), self._inject, (seen.loss,))
        timer.daemon = True
        timer.start()

    def _inject(self, loss: TrainerLoss) -> None:
        status = ask(self._run, AskStatus())
        assert isinstance(status, RunStatus)
        victim = status.lanes[0] if loss.fault.leader else max(set(status.lanes))
        loss.trainers = len(set(status.lanes))
        self.trainer_losses.append(loss)
        loss.injected = time.monotonic()
        os.kill(status.trainers[victim], loss.fault.signal_number)
