"""Live trainers of a configuration, trained turn by turn, each turn between two fixed pieces of work, in whose units its times are told."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from bench_torchrec import free_port, processor_seconds
from comparison import tell
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.namespace import claim
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.job_shape import cores
from foreload.trainer.resources.step_model import Load, Observation, Setup
from interleaved import Ranks
from workload import ROOT

LANES, DIM, TABLE_ROWS = 4, 16, 20_000
MODELS = {
    "small": {"bottom": "64-16", "top": "64-1"},
    "large": {"bottom": "512-256-16", "top": "512-256-1"},
}
_PIECE = 400_000  # numbers that a piece of work sorts


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is varied. slots: of a lane; parity: off or 2+1."""

    trainers: int
    shards: int
    parity: str
    slots: int
    model: str
    batch_size: int

    @property
    def code(self) -> tuple[int, int]:
        """k and r."""
        return (1, 0) if self.parity == "off" else (2, 1)

    @property
    def copies(self) -> int:
        """As `foreload train` has them if nothing is said."""
        return min(self.trainers, 2)

    def levels(self) -> list[tuple[str, int | str]]:
        """What it has of each factor."""
        return list(asdict(self).items())


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a configuration: means a step. unit_ms: of the pieces of work around it; drift: by how much the slower of the two took longer, of the
    faster one; total, thread, processor: times in units.
    """

    unit_ms: float
    drift: float
    total: float
    thread: float
    processor: float
    load: Mapping[str, float]


class Piece:
    """A fixed piece of work on all cores at once."""

    def __init__(self) -> None:
        self._count = cores()
        self._data = [np.random.default_rng(lane).random(_PIECE) for lane in range(self._count)]
        self._pool = ThreadPoolExecutor(self._count)

    def seconds(self) -> float:
        """How long it takes now."""
        begun = time.perf_counter()
        list(self._pool.map(np.sort, self._data))
        return time.perf_counter() - begun


def schedule_of(folder: Path, batch_size: int, slots: int, steps: int) -> Schedule:
    """The schedule of a configuration, prepared where it is not there yet."""
    out = folder / f"steps-{batch_size}-{slots}-{steps}"
    if not (out / "schedule.json").exists():
        tell(f"preparing {steps} steps of {batch_size}, {slots} slots")
        given = [
            "--format",
            "synthetic",
            "--rows",
            str(steps * batch_size),
            "--batch-size",
            str(batch_size),
            "--table-rows",
            str(TABLE_ROWS),
        ]
        command = [sys.executable, "-m", "foreload.pipelines.prepare", *given, "--lanes", str(LANES), "--slots", str(slots)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, "--out", str(out), "--overwrite"], env=environment, stdout=subprocess.DEVNULL, check=True)
    return Schedule(out)


def job_of(schedule: Schedule, model: str) -> dict[str, Any]:
    """The settings of TrainJob."""
    options = MODELS[model]
    return {
        "schedule": str(schedule.path), "run": "none", "store": "local:1", "dim": DIM, "model_options": options, "namespace": "bench",
        "history": "off",
    }  # fmt: skip


@contextmanager
def trainers(
    configuration: Configuration, schedule: Schedule, folder: Path, in_turn: bool = False
) -> Iterator[tuple[Ranks, LocalStores]]:
    """Its trainers, which wait for their first steps, and its servers; all of it is gone afterwards."""
    with ExitStack() as stack:
        stores_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="stores-")))
        stores = LocalStores(configuration.shards, stores_folder).start()
        stack.callback(stores.stop, save=False)
        with Store(stores.urls, timedelta(seconds=60)) as store:
            claim(store, "bench", {"run": "bench", "lanes": LANES}, "new")
        log = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="log-")) if configuration.code[1] else ""
        spec = {
            "ranks": configuration.trainers, "port": free_port(), "job": job_of(schedule, configuration.model), "urls": list(stores.urls),
            "parity": configuration.code, "copies": configuration.copies, "log": log, "in_turn": in_turn,
        }  # fmt: skip
        script = str(ROOT / "benchmarks" / "profiled_rank.py")
        commands = [[sys.executable, script, json.dumps({"rank": rank, **spec})] for rank in range(configuration.trainers)]
        ranks = Ranks(str(configuration), commands, {"PYTHONPATH": str(ROOT)})
        stack.callback(ranks.close)
        yield ranks, stores


def turn(ranks: Ranks, stores: LocalStores, piece: Piece, steps: int) -> Turn:
    """Train some steps between two pieces of work."""
    before, servers = piece.seconds(), processor_seconds(stores.pids)
    answers = ranks.run(steps, 1)
    servers = processor_seconds(stores.pids) - servers
    after = piece.seconds()
    unit = (before + after) / 2

    def of(answer: Mapping[str, Any], name: str) -> float:
        return statistics.mean(answer["further"][name])

    # As in metrics.jsonl: rows and bytes of all together, times of the slowest; the step's thread, of that which needs most.
    load = {
        name: sum(of(answer, name) for answer in answers)
        for name in ("rows_used", "rows_arrived", "rows_fetched", "rows_written_back", "bytes_sent")
    }
    load["samples"] = of(answers[0], "samples")
    total = max(statistics.median(answer["seconds"]) for answer in answers)
    thread = max(statistics.median(answer["further"]["seconds_thread"]) for answer in answers)
    processor = sum(statistics.median(answer["further"]["seconds_processor"]) for answer in answers)
    processor += servers / (steps + 1)
    return Turn(1000 * unit, max(before, after) / min(before, after) - 1, total / unit, thread / unit, processor / unit, load)


def observation(configuration: Configuration, dense: int, turns: list[Turn]) -> Observation:
    """What the turns of a configuration come to: their medians."""

    def median(values: Iterator[float]) -> np.ndarray:
        return np.array([statistics.median(values)])

    names = ("samples", "rows_used", "rows_arrived", "rows_fetched", "rows_written_back", "bytes_sent")
    load = Load(*(np.array([statistics.mean(one.load[name] for one in turns)]) for name in names))
    setup = Setup(
        configuration.trainers,
        1,
        configuration.copies,
        configuration.shards,
        *configuration.code,
        lanes=LANES,
        dense=dense,
        cores=cores(),
    )
    times = (median(getattr(one, name) for one in turns) for name in ("total", "thread", "processor"))
    return Observation(setup, load, *times)
