"""Checkpoints while a run trains: how long training stands still, how much slower steps are meanwhile, and how long each takes.

python benchmarks/bench_checkpoint_stall.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from comparison import Claim, Results, Series, Table, arguments, save, spread, tell
from foreload.trainer.commands.train import train
from foreload.trainer.job.job import TrainJob
from workload import BATCH, DIM, SLOTS, job, prepare_first_steps

STEPS = (3600, 160)  # trained, in full and with --quick
EVERY = (600, 50)  # steps between checkpoints
MODEL = "small"
MINUTE_MS = 60_000.0
WARM_STEPS = 20  # left out at the beginning
NEAR_STEPS = 300  # without a checkpoint, that steps beside one are held against
BASELINE_ROWS = 5_000_000


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, as metrics.jsonl tells of it; median ms of a step while it was under way, and of the nearest when none was; to_end: training
    ended meanwhile, so that the rest was read without a pause.
    """

    told: dict[str, Any]
    meanwhile: float
    normal: float
    to_end: bool

    @property
    def slower(self) -> float:
        """How much slower steps were."""
        return self.meanwhile / self.normal


def train_saving(schedule: Path, run: Path, every: int, **settings: Any) -> list[Saved]:
    """Train with checkpoints; returns them."""
    given = job(schedule, MODEL, run=str(run), store="local:3", checkpoint_every=every, keep=1, **settings)
    train(TrainJob.of(given))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["ms"] for line in lines if line["kind"] == "step"}
    beside: list[tuple[dict[str, Any], list[int]]] = []
    for place, line in enumerate(lines):
        if line["kind"] == "checkpoint" and "step" in line:
            before = [other["step"] for other in lines[:place] if other["kind"] == "step" and other["step"] > line["step"]]
            beside.append((line, before))
    busy = {step for _, some in beside for step in some}
    idle = [step for step in steps if step not in busy and step >= WARM_STEPS]
    made = []
    for line, some in beside:
        if not some:
            continue
        near = sorted(idle, key=lambda step: min(abs(step - some[0]), abs(step - some[-1])))[:NEAR_STEPS]
        normal, meanwhile = (median(steps[step] for step in which) for which in (near, some))
        made.append(Saved(line, meanwhile, normal, some[-1] == max(steps)))
    return made


def milliseconds(work: Callable[[], object]) -> float:
    """How long something takes."""
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


def plain_copy() -> float:
    """Milliseconds that copying what a partition's slots hold takes, the median of nine: of each row weights, state, table, ordinal, id and tag."""
    sources: list[np.ndarray] = [np.ones((SLOTS, DIM), np.float32), np.ones((SLOTS, 1), np.float32)]
    sources += [np.ones(SLOTS, kind) for kind in (np.int16, np.int64, np.int64, np.int32)]
    targets = [np.ones_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    return median(milliseconds(copy) for _ in range(9))


def others(rows: int, folder: Path) -> dict[str, float]:
    """Milliseconds that training stands still where a state of so many rows is all in memory: torch.save, and async_save of torch.distributed."""
    state = {"weights": torch.zeros(rows, DIM), "state": torch.zeros(rows, 1)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        blocking = milliseconds(lambda: torch.save(state, folder / "all.pt"))
        (folder / "all.pt").unlink()
        begun = time.perf_counter()
        writing = dcp.async_save(state, checkpoint_id=str(folder / "dcp"))
        staged = 1000 * (time.perf_counter() - begun)
        writing.result()  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
    return {"torch.save": blocking, "torch.distributed.checkpoint.async_save": staged}


def claims(made: Sequence[Saved], copy_ms: float, beside: dict[str, float]) -> list[Claim]:
    """What is to be shown."""
    stalls = [1000 * one.told["seconds_stalled"] for one in made]
    # Of those with all rows, at the pace beside training.
    paces = [one.told["seconds"] * BASELINE_ROWS / one.told["rows"] for one in made if not one.to_end]
    return [
        Claim("longest stall, at one a minute", "the interval", "at most 0.1 %, 60 ms", 100 * max(stalls) / MINUTE_MS, most=0.1),
        Claim("stall", "a plain copy of the slots", "at most 3 x", spread([stall / copy_ms for stall in stalls]), most=3.0),
        Claim(
            "median step while one is under way", "those near", "at most 1.1 x", spread([one.slower for one in made]), most=1.1
        ),
        Claim(f"seconds for {BASELINE_ROWS:,} rows", "", "at most 180", spread(paces) if paces else None, most=180.0),
        *(
            Claim(f"longest stall, against {name} of as many rows in memory", name, "less", max(stalls) / ms, most=1.0)
            for name, ms in beside.items()
        ),
    ]


def measure(given: argparse.Namespace, folder: Path) -> Results:
    """Train with checkpoints of all rows, then with increments."""
    steps, every = STEPS[given.quick], EVERY[given.quick]
    tell(f"preparing {steps} steps")
    prepare_first_steps(folder / "schedule", steps)
    copy_ms = plain_copy()
    rows: list[list[str | int | float]] = []
    saved: list[Saved] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for policy in ("full", "intermittent"):
        tell(f"training with checkpoints every {every} steps, policy {policy}")
        made = train_saving(folder / "schedule", folder / policy, every, checkpoint_policy=policy)
        for one in made:
            told = one.told
            rows.append(
                [
                    policy, told["step"] + 1, told["rows"], told["bytes"] / 2**20, 1000 * told["seconds_stalled"],
                    f"{told['seconds']:.1f}{' (to the end)' if one.to_end else ''}", one.meanwhile, one.normal, one.slower,
                ]
            )  # fmt: skip
        curves[policy] = [(one.told["step"] + 1, one.told["seconds"]) for one in made]
        saved += made
    largest = max(one.told["rows"] for one in saved)
    every_claim = claims(saved, copy_ms, others(largest, folder))
    about = f"a plain copy of the {SLOTS:,} slots takes {copy_ms:.1f} ms"
    columns = ["policy", "steps", "rows", "MiB", "stall (ms)", "in all (s)", "a step meanwhile (ms)", "near (ms)", "x"]
    plot = Series("Seconds from the copy to the last file", "steps trained", "s", "lines", curves)
    note = (
        f"26 synthetic tables of the Kaggle sizes, batch {BATCH:,}, dim {DIM}, row-wise Adagrad, one trainer, {SLOTS:,} slots, 2+1 on three "
        f"servers of this machine; {about}."
    )
    settings = {"steps": steps, "every": every}
    tables = [Table("Checkpoints while it trains", columns, rows)]
    return Results("checkpoint_stall", "Checkpoints while a run trains", every_claim, tables, [plot], settings, [note])


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(1, 1))
    with tempfile.TemporaryDirectory(dir=given.out, prefix="checkpoint-stall-") as name:
        results = measure(given, Path(name).absolute())
    save(results, given.out)


if __name__ == "__main__":
    main()
