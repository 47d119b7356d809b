"""Memory that was predicted before a run, beside that which was measured: of each store shard at every hundredth of it.

Used memory is what INFO says, sampled all the time. Which step a sample is of is known to a step, so the prediction of that step, of the one before
and of the one after are looked at, and the nearest counts. Servers are local ones, started as `--store local:N` starts them, of each kind there is.

    python benchmarks/bench_store_memory.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foreload.cache.client.local import LocalStores
from foreload.cache.client.servers import available, version_of
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.faults import RunObserver
from foreload.trainer.cluster.messages import StepEnded, TrainerEvent
from foreload.trainer.commands.train import train
from foreload.trainer.compute.layouts import layouts
from foreload.trainer.models import load_model
from foreload.trainer.resources.row_timeline import RowTimeline
from foreload.trainer.resources.store_memory import StoreMemory
from foreload.trainer.run.job import TrainJob

PARTS = 100
PAUSE_SECONDS = 0.01


@dataclass(slots=True)
class _Steps(RunObserver):
    """When each step ended: by the trainer that said so first."""

    at: dict[int, float] = field(default_factory=dict)

    def see(self, trainer: int, event: TrainerEvent) -> None:
        if isinstance(event, StepEnded):
            self.at.setdefault(event.report.step, event.at)


@dataclass(frozen=True, slots=True)
class Compared:
    """A run: what was predicted and measured at each hundredth, float64 [parts, shards], bytes."""

    name: str
    steps: np.ndarray
    predicted: np.ndarray
    measured: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """By how much the prediction is more than what was measured, of that."""
        errors: np.ndarray = self.predicted / self.measured - 1
        return errors


def compare(schedule: Path, folder: Path, server: str, parity: str, dim: int, trainers: int) -> Compared:
    """Predict, then train, and sample meanwhile."""
    whole = Schedule(schedule)
    with LocalStores(3, folder / "stores", available()[server]) as stores, Store(stores.urls) as store:
        job = TrainJob.of(
            {
                "schedule": str(schedule), "run": str(folder / "run"), "store": ",".join(stores.urls), "parity": parity, "dim": dim,
                "trainers": trainers, "history": "off",
            }
        )  # fmt: skip
        features = whole.header.features
        rows = layouts(features, load_model(job.model, job.model_folder), job.dim, job.row_optimizers(features))
        placement = Placement.spread(3, *job.code(3))
        nothing = np.zeros((whole.header.lanes, len(rows)), np.int64)
        timeline = RowTimeline(whole, placement, rows, whole.header.first_step - 1, nothing)
        memory = StoreMemory.ask(timeline, store, "bench", trainers)
        memory.advance()
        predicted = np.stack([memory.used(one) for one in memory.servers], axis=1)
        samples: list[tuple[float, list[int]]] = []
        over = threading.Event()

        def sample() -> None:
            while not over.wait(PAUSE_SECONDS):
                samples.append((time.monotonic(), [int(store.info(shard)["used_memory"]) for shard in range(3)]))

        sampling = threading.Thread(target=sample)
        sampling.start()
        steps = _Steps()
        train(job, steps)
        over.set()
        sampling.join()
    ended = np.array([steps.at[step] for step in sorted(steps.at)])
    times, used = np.array([at for at, _ in samples]), np.array([bytes_used for _, bytes_used in samples], float)
    marks = np.unique(np.linspace(0, len(ended) - 1, PARTS + 1).astype(int))[1:]
    nearest = np.minimum(np.searchsorted(times, ended[marks]), len(times) - 1)
    # The step that was done when the sample nearest to a mark was taken.
    done = np.minimum(np.searchsorted(ended, times[nearest], side="right") - 1, len(ended) - 1)
    moments = np.searchsorted(timeline.steps, done + whole.header.first_step)
    name = f"{version_of(available()[server])}, {'plain' if parity == 'off' else parity}, dim {dim}"
    measured = used[nearest]
    about = np.stack([predicted[np.clip(moments + beside, 0, len(predicted) - 1)] for beside in (-1, 0, 1)])
    best = np.abs(about / measured - 1).argmin(axis=0)
    return Compared(name, done, np.take_along_axis(about, best[None], 0)[0], measured)


def table(runs: Sequence[Compared]) -> str:
    """The worst error of each run, and what there was at its tenths, of shard 0."""
    lines = [
        "| servers, parity, rows | worst error | median | MiB at 1 %, 10 %, 50 %, 100 % of the run: predicted (measured) |",
        "| --- | --- | --- | --- |",
    ]
    for run in runs:
        shown = [
            f"{run.predicted[at, 0] / 2**20:.2f} ({run.measured[at, 0] / 2**20:.2f})"
            for at in (0, len(run.steps) // 10 - 1, len(run.steps) // 2 - 1, -1)
        ]
        errors = np.abs(run.errors)
        lines.append(f"| {run.name} | {errors.max():.2%} | {np.median(errors):.2%} | {', '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--schedule", type=Path, help="one that is there")
    parser.add_argument("--out", type=Path, help="a folder for the figures, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        schedule = given.schedule or folder / "schedule"
        if given.schedule is None:
            rows = "20000" if given.quick else "150000"
            options = f"--format synthetic --rows {rows} --batch-size 64 --lanes 2 --slots 6000 --out {schedule}"
            subprocess.run([sys.executable, "-m", "foreload.pipelines.prepare", *options.split()], check=True, stdout=sys.stderr)
        runs = [
            compare(schedule, folder / f"{server}-{parity}", server, parity, 16, 2)
            for server in sorted(available())
            for parity in ("off", "2+1")
        ]
    print(table(runs))
    if given.out is not None:
        told = [
            {
                "name": run.name,
                "steps": run.steps.tolist(),
                "predicted": run.predicted.tolist(),
                "measured": run.measured.tolist(),
            }
            for run in runs
        ]
        (given.out / "store_memory.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
