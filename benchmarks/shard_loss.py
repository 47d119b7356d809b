"""Trainings by `foreload train`'s own launcher, in which injected faults make store shards be lost again and again, and how each loss went."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from comparison import cpu_capability
from foreload.trainer.compute import numerics

# Before torch is imported, as in the launcher.
numerics.set_environment(cpu_capability())

from foreload.cache.client.local import LocalStores  # noqa: E402
from foreload.cache.parity.placement import Placement  # noqa: E402
from foreload.cache.protocol.shards.shard_status import ShardSnapshot  # noqa: E402
from foreload.pipelines.schedule.reader import Schedule  # noqa: E402
from foreload.trainer.assembly.assembly import DenseModel  # noqa: E402
from foreload.trainer.assembly.dense_file import save_dense  # noqa: E402
from foreload.trainer.cluster.messages.control import AskStop, ask  # noqa: E402
from foreload.trainer.cluster.messages.faults import RunObserver  # noqa: E402
from foreload.trainer.cluster.messages.trainers import ShardsReport, StepEnded, TrainerEvent  # noqa: E402
from foreload.trainer.commands.train import train  # noqa: E402
from foreload.trainer.job.job import TrainJob  # noqa: E402
from foreload.trainer.run.directory import STORES, Run  # noqa: E402
from foreload.trainer.run.manifest import Status, new_manifest  # noqa: E402
from foreload.trainer.run.timeline import StepTimes, Timeline  # noqa: E402
from workload import FILLED, RUN_ID, SHARDS, Workload, job  # noqa: E402


def launched(schedule: Schedule, run: Path, **settings: Any) -> dict[str, Any]:
    """The settings of a training of the small model by the launcher, on local stores."""
    store = f"local:{SHARDS}"
    return job(schedule.path, "small", run=str(run), store=store, cpu_capability=cpu_capability(), **settings)


@dataclass(frozen=True, slots=True)
class Injection:
    """What is done to a store shard: SIGKILL, or SIGSTOP with a later SIGCONT; its server is away for down_seconds."""

    signal_number: int
    down_seconds: float


@dataclass(frozen=True, slots=True)
class ShardLoss:
    """A fault, and when (time.monotonic()) it was injected and its shard was lost, back and whole; since: when the calm before it began."""

    injection: Injection
    shard: int
    since: float
    injected: float
    lost: float
    back: float
    whole: float


def stop_soon(run: Path) -> None:
    """Have a run stop. An observer is called by the thread that answers requests, so another one makes this request."""
    threading.Thread(target=ask, args=(run, AskStop()), daemon=True).start()


class ShardInjector(RunObserver):
    """Injects faults into the shards in turn, each once the run was whole and calm for long enough, and then has the run stop.

    budget_seconds: counted from the first step; nothing more is injected after it. stop: whether the run is stopped when all is done.
    """

    def __init__(
        self, run: Path, injections: Sequence[Injection], calm_seconds: float, budget_seconds: float, stop: bool = True
    ) -> None:
        self.shard_losses: list[ShardLoss] = []
        self.unexpected = 0  # losses of shards that nothing was done to
        self.first_step_at = 0.0
        self._run, self._injections, self._stop = run, list(injections), stop
        self._calm_seconds, self._budget_seconds = calm_seconds, budget_seconds
        self._steps = StepTimes()
        self._whole_at = 0.0
        self._told: dict[int, ShardSnapshot] = {}  # by each trainer, the last
        self._lost: set[int] = set()
        self._injected: tuple[Injection, int, float] | None = None
        self._seen: dict[str, float] = {}
        self._timer: threading.Timer | None = None

    @property
    def timeline(self) -> Timeline:
        """All steps, one at least."""
        return self._steps.timeline

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Note what happens; inject, or stop, when it is time."""
        match event:
            case StepEnded(report, at):
                self._steps.note(report, at)
                if not self.first_step_at:
                    self.first_step_at = self._whole_at = at
            case ShardsReport(shards, at):
                for shard, status in shards.changes_since(self._told.get(trainer)).items():
                    self._note(shard, status.state, at)
                self._told[trainer] = shards
        if not isinstance(event, StepEnded) or self._injected is not None or self._lost:
            return
        now = time.monotonic()
        if now - self._whole_at < self._calm_seconds:
            return
        if self._injections and now - self.first_step_at < self._budget_seconds:
            self._inject(self._injections.pop(0))
        elif self._stop:
            self._stop = False
            stop_soon(self._run)

    def _note(self, shard: int, what: str, at: float) -> None:
        injected = self._injected
        if what == "lost":
            self._lost.add(shard)
        if injected is None or shard != injected[1]:
            self.unexpected += what == "lost"
        else:
            # A shard that is lost again while it is rebuilt has its first loss counted, and its last return.
            self._seen[what] = self._seen.get(what, at) if what == "lost" else at
        if what == "ok":
            self._lost.discard(shard)
            if injected is not None and shard == injected[1]:
                injection, _, injected_at = injected
                self.shard_losses.append(
                    ShardLoss(injection, shard, self._whole_at, injected_at, self._seen["lost"], self._seen["rebuilding"], at)
                )
                self._injected, self._seen = None, {}
            self._whole_at = at

    def _inject(self, injection: Injection) -> None:
        shard = len(self.shard_losses) % SHARDS
        local = LocalStores.find(self._run / STORES)
        pid = local.pids[shard] if local is not None else None
        if pid is None:
            raise SystemExit(f"store shard {shard} has no server to be stopped")
        self._injected = injection, shard, time.monotonic()
        os.kill(pid, injection.signal_number)
        if injection.signal_number == signal.SIGSTOP:
            self._timer = threading.Timer(injection.down_seconds, os.kill, (pid, signal.SIGCONT))
            self._timer.daemon = True
            self._timer.start()

    def may_start(self, shard: int) -> bool:
        """Not before the server was down for long enough."""
        injected = self._injected
        return injected is None or injected[1] != shard or time.monotonic() >= injected[2] + injected[0].down_seconds


class Pulse:
    """A thread that only sleeps: where it is long in waking up, the machine did not run it, whatever else is trained there."""

    PERIOD_SECONDS = 0.005

    def __init__(self) -> None:
        self._woke = [time.monotonic()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._over.wait(self.PERIOD_SECONDS):
            self._woke.append(time.monotonic())

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def longest_pause(self, since: float, until: float) -> float:
        """Seconds between two beats at most, of those beats that came within a time."""
        woke = np.array(self._woke)
        within = (woke[1:] >= since) & (woke[1:] <= until)
        return float(np.diff(woke)[within].max(initial=0.0))


def run_training(training: TrainJob, observer: RunObserver) -> dict[str, Any]:
    """Train by the launcher; returns the summary. Ends the benchmark where a signal ended the training."""
    ending = train(training, observer)
    assert ending is not None
    if ending.signal_number is not None:
        sys.exit(128 + ending.signal_number)
    return ending.summary


def stopped_run(work: Workload, second: Schedule, folder: Path, protected: bool) -> TrainJob:
    """The job that goes on, with the second schedule, from the end of the first, on local stores that hold all rows; the model is untrained."""
    settings = launched(work.first, folder, parity="2+1" if protected else "off")
    before = TrainJob.of(settings)
    manifest = replace(new_manifest(before, work.first, (), SHARDS), run_id=RUN_ID)
    run = Run.create(folder, manifest, Placement.spread(SHARDS, *before.code(SHARDS)), overwrite=False)
    dense, last = DenseModel.build(before, work.first), work.first.header.end_step - 1
    save_dense(run.dense(last), dense.module, dense.optimizer, last)
    (run.path / STORES).mkdir()
    work.copy_store("parity" if protected else "rows", run.path / STORES)
    run.write_status(Status("ended", last, {str(lane): FILLED for lane in range(work.first.header.lanes)}))
    return TrainJob.of(settings | {"schedule": str(second.path), "resume": True})
