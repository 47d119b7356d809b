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

from comparison import Claim, Results, Series, Table, arguments, save, tell
from foreload.trainer.commands.train import train
from foreload.trainer.run.job import TrainJob
from workload import BATCH, DIM, SLOTS, job, prepare_first_steps

STEPS = (3600, 160)  # trained, in full and with --quick
EVERY = (600, 50)  # steps between checkpoints
MODEL = "small"
MINUTE_MS = 60_000.0
WARM_STEPS = 20  # left out at the beginning
BASELINE_ROWS = 5_000_000


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, as metrics.jsonl tells of it, and the steps' times while it was under way, in ms."""

    told: dict[str, Any]
    meanwhile: list[float]


def train_saving(schedule: Path, run: Path, every: int, **settings: Any) -> tuple[list[Saved], list[float]]:
    """Train with checkpoints; returns them, and the times of all steps during which none was under way."""
    given = job(schedule, MODEL, run=str(run), store="local:3", checkpoint_every=every, keep=1, **settings)
    train(TrainJob.of(given))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["ms"] for line in lines if line["kind"] == "step"}
    made: list[Saved] = []
    busy: set[int] = set()
    for place, line in enumerate(lines):
        if line["kind"] == "checkpoint" and "step" in line:
            before = [other["step"] for other in lines[:place] if other["kind"] == "step" and other["step"] > line["step"]]
            busy |= set(before)
            made.append(Saved(line, [steps[step] for step in before]))
    return made, [ms for step, ms in steps.items() if step not in busy and step >= WARM_STEPS]


def milliseconds(work: Callable[[], object]) -> float:
    """How long something takes."""
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


def plain_copy() -> float:
    """Milliseconds that copying a partition's bytes takes, the least of five: weights and state of all slots."""
    source = np.ones((SLOTS, DIM + 1), np.float32)
    target = np.zeros_like(source)
    return min(milliseconds(lambda: np.copyto(target, source)) for _ in range(5))


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


def claims(made: Sequence[Saved], normal: Sequence[float], copy_ms: float, beside: dict[str, float]) -> list[Claim]:
    """What is to be shown."""
    stalls = [1000 * one.told["seconds_stalled"] for one in made]
    meanwhile = [ms for one in made for ms in one.meanwhile]
    largest = max(made, key=lambda one: one.told["rows"])
    seconds = largest.told["seconds"] * BASELINE_ROWS / largest.told["rows"]
    slower = median(meanwhile) / median(normal)
    return [
        Claim("longest stall, at one a minute", "the interval", "at most 0.1 %, 60 ms", 100 * max(stalls) / MINUTE_MS, most=0.1),
        Claim("longest stall", "a plain copy of the slots", "at most 3 x", max(stalls) / copy_ms, most=3.0),
        Claim("median step while one is under way", "other steps", "at most 1.1 x", slower, most=1.1),
        Claim(f"seconds for {BASELINE_ROWS:,} rows, at the pace of the largest", "", "at most 180", seconds, most=180.0),
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
    every_claim: list[Claim] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for policy in ("full", "intermittent"):
        tell(f"training with checkpoints every {every} steps, policy {policy}")
        made, normal = train_saving(folder / "schedule", folder / policy, every, checkpoint_policy=policy)
        for one in made:
            told = one.told
            rows.append(
                [
                    policy, told["step"] + 1, told["rows"], told["bytes"] / 2**20, 1000 * told["seconds_stalled"], told["seconds"],
                    median(one.meanwhile) / median(normal) if one.meanwhile else "none",
                ]
            )  # fmt: skip
        curves[policy] = [(one.told["step"] + 1, one.told["seconds"]) for one in made]
        if policy == "full":
            largest = max(one.told["rows"] for one in made)
            every_claim = claims(made, normal, copy_ms, others(largest, folder))
            about = f"median step {median(normal):.1f} ms; a plain copy of the {SLOTS:,} slots takes {copy_ms:.1f} ms."
    columns = ["policy", "steps", "rows", "MiB", "stall (ms)", "in all (s)", "steps meanwhile, x normal"]
    plot = Series("Seconds from the copy to the last file", "steps trained", "s", "lines", curves)
    note = (
        f"26 synthetic tables of the Kaggle sizes, batch {BATCH:,}, dim {DIM}, row-wise Adagrad, one trainer, {SLOTS:,} slots, 2+1 on three "
        f"servers of this machine; {about}"
    )
    settings = {"steps": steps, "every": every, "quick": given.quick}
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
