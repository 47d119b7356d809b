"""Memory that was predicted before a run, beside that which was measured: of store shards at every hundredth of it, of trainers at their peak.

python benchmarks/bench_memory_forecast.py [--quick] [--out DIR]

Used memory is what INFO says, sampled all the time, in one go with how many rows each lane has there. That tells which step a sample is of: the store
is behind the trainers by what is on its way, some steps more or less, and a table that doubles within a few of them is a tenth of what is used. It is
known to a step, so the prediction of that step, of the one before and of the one after are looked at, and the nearest counts. What comes out by the
step that the trainers had ended is shown beside it, and so is by how many steps the store was behind. At which step a limit is reached is told by the
step that the trainers had ended. Servers are local ones, started as `--store local:N` starts them, of each kind there is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from comparison import Cell, Claim, Results, Series, Table, arguments, save, tell
from foreload.cache.client.local import LocalStores
from foreload.cache.client.local_server import available, version_of
from foreload.cache.client.store import Store
from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.fence import read_epochs
from foreload.cache.protocol.shards.namespace import lane_key
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.cluster.messages.trainers import StepEnded, TrainerEvent
from foreload.trainer.commands.train import train
from foreload.trainer.job.job import TrainJob, layouts_of
from foreload.trainer.memory.row_timeline import RowTimeline
from foreload.trainer.memory.store_memory import StoreMemory
from foreload.trainer.resources.features import step_counts
from foreload.trainer.resources.job_memory import LaneLoad, TrainerMemory
from foreload.trainer.resources.step_model import setup_of
from foreload.trainer.run import history

PARTS = 100
PAUSE_SECONDS = 0.02
SHARDS = 3
LIMITS = 40  # of each shard: what it used at as many moments, as limits that it might have had
UNCERTAIN = 0.005  # of used memory: how far a prediction is known to be off
MOST_STORE, MOST_STEP, MOST_TRAINER = 0.03, 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Training:
    """A training whose memory is looked at. rows, batch, lanes, slots: of its schedule; server: its kind, "" for that which `local:N` takes."""

    rows: int
    batch: int
    lanes: int
    slots: int
    dim: int
    trainers: int
    parity: str
    server: str = ""

    @property
    def schedule(self) -> str:
        """Words of `prepare`."""
        shape = f"--rows {self.rows} --batch-size {self.batch} --lanes {self.lanes} --slots {self.slots}"
        return f"--format synthetic {shape}"


def trainings(quick: bool) -> list[Training]:
    """Those of which each server's memory is looked at, then those of which only that of trainers is."""
    rows = 20_000 if quick else 150_000
    sampled = [Training(rows, 64, 2, 6000, 16, 2, parity, server) for server in sorted(available()) for parity in ("off", "2+1")]
    if quick:
        return sampled
    wide = [Training(300_000, 1024, 2, 60_000, 64, *more) for more in ((1, "off"), (2, "off"), (2, "2+1"))]
    others = [
        Training(300_000, 1024, 4, 20_000, 32, 3, "2+1"), Training(300_000, 1024, 4, 20_000, 128, 4, "off"),
        Training(100_000, 4096, 1, 100_000, 128, 1, "2+1"), Training(20_000, 128, 2, 3_000, 8, 2, "off"),
        Training(200_000, 512, 2, 40_000, 48, 2, "2+1"), Training(200_000, 2048, 4, 30_000, 16, 4, "2+1"),
    ]  # fmt: skip
    return sampled + wide + others


@dataclass(slots=True)
class _Steps(RunObserver):
    """When each step ended: by the trainer that said so first."""

    at: dict[int, float] = field(default_factory=dict)

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        if isinstance(event, StepEnded):
            self.at.setdefault(event.report.step, event.at)


@dataclass(frozen=True, slots=True)
class Sample:
    """What servers had. at: time.monotonic(); used: of each server; rows: int64 [shards, lanes], with parity rows."""

    at: float
    used: list[int]
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class StoreCompared:
    """What was predicted of servers, and measured. predicted, measured: float64 [parts, shards], bytes at each hundredth of the run; steps: that the
    trainers had ended at each of these; of_step: predicted of that step; behind: by how many steps the store was behind it, of every sample; off: of
    each limit looked at, by how many of all steps the one at which it is reached was missed; doubling: whether it falls into one.
    """

    steps: np.ndarray
    predicted: np.ndarray
    of_step: np.ndarray
    measured: np.ndarray
    behind: np.ndarray
    off: np.ndarray
    doubling: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """By how much the prediction is more than what was measured, of that."""
        errors: np.ndarray = self.predicted / self.measured - 1
        return errors

    @property
    def errors_of_step(self) -> np.ndarray:
        """The same by the step that the trainers had ended."""
        errors: np.ndarray = self.of_step / self.measured - 1
        return errors


@dataclass(frozen=True, slots=True)
class Compared:
    """A training. trainer_bytes: predicted and measured peak of a trainer; stores: where they were sampled."""

    training: Training
    trainer_bytes: tuple[int, int]
    stores: StoreCompared | None

    @property
    def trainer_error(self) -> float:
        """Relative."""
        return self.trainer_bytes[0] / self.trainer_bytes[1] - 1


def schedule_of(one: Training, folder: Path) -> Path:
    """Prepared where it was not yet."""
    out = folder / f"{one.rows}-{one.batch}-{one.lanes}-{one.slots}"
    if not out.exists():
        command = [sys.executable, "-m", "foreload.pipelines.prepare", *one.schedule.split(), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


def compare(one: Training, schedule: Path, folder: Path) -> Compared:
    """Predict, then train, and sample meanwhile."""
    whole, log = Schedule(schedule), folder / "history.sqlite"
    executable = available()[one.server] if one.server else None
    with LocalStores(SHARDS, folder / "stores", executable) as stores, Store(stores.urls) as store:
        job = TrainJob.of(
            {
                "schedule": str(schedule), "run": str(folder / "run"), "store": ",".join(stores.urls), "parity": one.parity, "dim": one.dim,
                "trainers": one.trainers, "history": str(log),
            }
        )  # fmt: skip
        features = whole.header.features
        rows = layouts_of(job, features)
        placement = Placement.spread(SHARDS, *job.code(SHARDS))
        nothing = np.zeros((whole.header.lanes, len(rows)), np.int64)
        timeline = RowTimeline(whole, placement, rows, whole.header.first_step - 1, nothing)
        memory = StoreMemory.ask(timeline, store, "bench", one.trainers)
        memory.advance()
        samples: list[Sample] = []
        over = threading.Event()

        def sample() -> None:
            while not over.wait(PAUSE_SECONDS):
                samples.extend(_sample(store, job.run_namespace, whole.header.lanes))

        sampling = threading.Thread(target=sample)
        steps = _Steps()
        if one.server:
            sampling.start()
        train(job, steps)
        over.set()
        if one.server:
            sampling.join()
    profile = history.read(log)[-1]
    expected = TrainerMemory.of(whole, rows).peak_bytes(LaneLoad.of_schedule(step_counts(whole)), setup_of(profile))
    peaks = expected, profile.peak_bytes("trainer")
    if not one.server:
        return Compared(one, peaks, None)
    ended = np.array([steps.at[step] for step in sorted(steps.at)])
    return Compared(one, peaks, _stores(memory, whole.header.first_step, ended, samples))


def _sample(store: Store, namespace: str, lanes: int) -> list[Sample]:
    """What servers have now; nothing where a lane's owner changes."""
    used, rows = [], []
    try:
        for shard in range(SHARDS):
            keys = [
                lane_key(namespace, lane, epoch or 0)
                for lane, epoch in enumerate(read_epochs(store, shard, namespace, range(lanes)))
            ]
            *entries, info = store.commands_at_once(shard, [*(("HLEN", key) for key in keys), ("INFO", "memory")])
            told = re.search(rb"used_memory:(\d+)", info) if isinstance(info, bytes) else None
            assert told is not None
            used.append(int(told[1]))
            # One of a lane's fields is its marker.
            rows.append([max(int(str(count)) - 1, 0) for count in entries])
    except StoreError:
        return []
    return [Sample(time.monotonic(), used, np.array(rows))]


def _nearest(about: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Of three predictions, float64 [3, ...], those that are nearest to what was measured."""
    best = np.abs(about / measured - 1).argmin(axis=0)
    return np.take_along_axis(about, best[None], 0)[0]


def _stores(memory: StoreMemory, first_step: int, ended: np.ndarray, samples: Sequence[Sample]) -> StoreCompared:
    """memory: as it was before the run; ended: when each step did."""
    of_moment, last = memory.timeline.steps - first_step, memory.timeline.known - 1
    predicted = np.stack([memory.used(server) for server in memory.servers], axis=1)
    times, used = np.array([one.at for one in samples]), np.array([one.used for one in samples], float)
    # The step that was done when a sample was taken, and that after which each lane's hash was as it was then.
    done = np.minimum(np.searchsorted(ended, times, side="right") - 1, len(ended) - 1)
    moments = np.searchsorted(of_moment, done)
    reached = np.array([
        [memory.reached(server, one.rows[server.shard], int(step) + first_step + 1) for server in memory.servers]
        for one, step in zip(samples, done, strict=True)
    ])  # fmt: skip
    marks = np.unique(np.linspace(0, len(ended) - 1, PARTS + 1).astype(int))[1:]
    # The last one before: after the last step all rows in slots are on their way to the servers at once.
    nearest = np.maximum(np.searchsorted(times, ended[marks]) - 1, 0)
    measured = used[nearest]
    of_step, by_rows = (
        np.stack([predicted[np.clip(moments[nearest] + beside, 0, last)] for beside in (-1, 0, 1)]),
        np.stack([
            np.stack(
                [
                    memory.used_when(server, np.clip(reached[nearest, place] + beside, 0, last))
                    for place, server in enumerate(memory.servers)
                ],
                axis=1,
            )
            for beside in (-1, 0, 1)
        ]),
    )  # fmt: skip
    while_training = (done >= 0) & (times <= ended[-1])
    off, doubling = zip(
        *(
            _missed(of_moment, predicted[:, shard], done[while_training], used[while_training, shard], len(ended))
            for shard in range(used.shape[1])
        ),
        strict=True,
    )
    behind = of_moment[moments][:, None, None] - of_moment[reached]
    return StoreCompared(
        done[nearest], _nearest(by_rows, measured), _nearest(of_step, measured), measured, behind[while_training].ravel(),
        np.concatenate(off), np.concatenate(doubling),
    )  # fmt: skip


def _missed(
    of_moment: np.ndarray, predicted: np.ndarray, done: np.ndarray, used: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of limits spread over a shard's used memory: how far the predicted step at which each is reached is off, of all steps; and whether it is
    reached by a table that doubles, as was predicted or measured: much more comes within a hundredth of the run before and after than elsewhere, or
    the limit is what was used while two tables stood, and what is used again only long after the old one went.
    """
    most, forecast = np.maximum.accumulate(used), np.maximum.accumulate(predicted)
    limits = np.linspace(most[len(most) // 20], 0.999 * min(most[-1], forecast[-1]), LIMITS)
    reached = done[np.searchsorted(most, limits, side="right").clip(max=len(done) - 1)]
    told = of_moment[np.searchsorted(forecast, limits, side="right").clip(max=len(predicted) - 1)]
    about = max(steps // PARTS, 1)

    def doubles(at: np.ndarray, of: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        come: np.ndarray = np.interp(at + about, of, sizes) - np.interp(at - about, of, sizes)
        return come > 3 * 2 * (sizes[-1] - sizes[0]) / PARTS

    def two_tables(sizes: np.ndarray, peaks: np.ndarray) -> np.ndarray:
        tops = np.unique(peaks[sizes < (1 - UNCERTAIN) * peaks])
        near: np.ndarray = (np.abs(limits[:, None] / tops - 1) <= UNCERTAIN).any(axis=1)
        return near

    doubling = doubles(reached, done, most) | doubles(told, of_moment, forecast)
    return np.abs(told - reached) / steps, doubling | two_tables(used, most) | two_tables(predicted, forecast)


def report(compared: Sequence[Compared]) -> tuple[list[Table], list[Claim], list[Series]]:
    """What is shown of them."""
    stores: list[list[Cell]] = []
    trainers: list[list[Cell]] = []
    claims, plots = [], []
    for one in compared:
        training, of_stores = one.training, one.stores
        predicted, measured = (f"{size / 2**20:.0f}" for size in one.trainer_bytes)
        trainers.append([
            training.trainers, training.lanes, training.slots, training.batch, training.dim, training.parity, predicted, measured,
            f"{one.trainer_error:+.1%}",
        ])  # fmt: skip
        if of_stores is None:
            continue
        name = f"{version_of(available()[training.server])}, {'plain' if training.parity == 'off' else training.parity}"
        errors, outside = np.abs(of_stores.errors), of_stores.off[~of_stores.doubling]
        shown = [
            f"{of_stores.predicted[at, 0] / 2**20:.2f} ({of_stores.measured[at, 0] / 2**20:.2f})"
            for at in (0, len(of_stores.steps) // 10 - 1, len(of_stores.steps) // 2 - 1, -1)
        ]
        by_step, behind = np.abs(of_stores.errors_of_step), of_stores.behind
        stores.append([
            name, f"{errors.max():.2%}", f"{np.median(errors):.2%}", f"{by_step.max():.2%}", f"{np.median(by_step):.2%}",
            f"{np.median(behind):.0f}, {np.percentile(behind, 99):.0f}", ", ".join(shown), f"{outside.max():.2%}",
            f"{len(outside)} of {len(of_stores.off)}",
        ])  # fmt: skip
        worst, moments = float(errors.max()), f"{errors.size} moments."
        claims += [
            Claim(f"used memory, {name}: worst", "measured", "<= 3 %", worst, most=MOST_STORE, note=moments),
            Claim(f"step at which a limit is reached, {name}", "measured", "<= 1 %", float(outside.max()), most=MOST_STEP),
        ]
        lines = {"predicted": of_stores.predicted, "measured": of_stores.measured}
        data = {
            word: [(int(step), float(size) / 2**20) for step, size in zip(of_stores.steps, sizes[:, 0], strict=True)]
            for word, sizes in lines.items()
        }
        plots.append(Series(f"Used memory of shard 0, {name}", "step", "MiB", "lines", data))
    worst = max(abs(one.trainer_error) for one in compared)
    claims.append(
        Claim("peak of a trainer: worst", "measured", "<= 5 %", worst, most=MOST_TRAINER, note=f"{len(compared)} jobs.")
    )
    tables = [
        Table(
            "Servers",
            [
                "servers, parity", "worst error", "median", "by the trainers' step: worst", "median",
                "steps that the store is behind them: median, 99 of 100", "MiB of shard 0 at 1 %, 10 %, 50 %, 100 % of the run: predicted (measured)",
                "step at which a limit is reached: off at most, of all steps", "limits that fall into no doubling",
            ],
            stores,
        ),
        Table(
            "Trainers' peaks, MiB",
            ["trainers", "lanes", "slots a lane", "batch", "dim", "parity", "predicted", "measured", "error"],
            trainers,
        ),
    ]  # fmt: skip
    return tables, claims, plots


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__)
    compared = []
    with tempfile.TemporaryDirectory(dir=given.out.absolute()) as temporary:
        # The first in a new checkout compiles kernels, which takes memory of its own.
        first = Training(20_000, 128, 2, 3_000, 8, 2, "2+1")
        compare(first, schedule_of(first, Path(temporary)), Path(temporary) / "first")
        for number, one in enumerate(trainings(given.quick)):
            schedule = schedule_of(one, Path(temporary))
            compared.append(compare(one, schedule, Path(temporary) / str(number)))
            tell(f"{one}: trainers' peak {compared[-1].trainer_error:+.1%}")
    tables, claims, plots = report(compared)
    save(Results("memory_forecast", "Memory, predicted", claims, tables, plots), given.out)


if __name__ == "__main__":
    main()
