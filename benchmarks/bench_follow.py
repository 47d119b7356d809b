"""`train --follow` beside `prepare`: seconds from the start of both to the first step, however much there is to prepare.

python benchmarks/bench_follow.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from comparison import Cell, Claim, Results, Table, alternate, arguments, save, spread, tell
from workload import BATCH, ROOT, SLOTS

SIZES, QUICK_SIZES = (2_000_000, 32_000_000), (200_000, 2_000_000)
WINDOW = 2_000_000
LONGER_SECONDS = 2.0  # that the larger may take
PATIENCE_SECONDS = 300.0


def first_step(folder: Path, rows: int) -> float:
    """Seconds from the start of both commands to the first step; both are stopped then."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    schedule, run = folder / "schedule", folder / "run"
    prepare = ["prepare", "--format", "synthetic", "--rows", str(rows), "--batch-size", str(BATCH), "--slots", str(SLOTS)]
    prepare += ["--window", str(WINDOW), "--out", str(schedule)]
    train = ["train", str(schedule), "--follow", "--run", str(run), "--store", "local:1", "--dim", "16", "--history", "off"]
    begun = time.monotonic()
    jobs = [_start(prepare, folder / "prepare.txt"), _start(train, folder / "train.txt")]
    metrics = run / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            for job, told in zip(jobs, ("prepare.txt", "train.txt"), strict=True):
                if job.poll():
                    raise SystemExit(f"{rows:,} rows: {(folder / told).read_text()}")
            if time.monotonic() - begun > PATIENCE_SECONDS:
                raise SystemExit(f"{rows:,} rows: no step in {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.01)
        return time.monotonic() - begun
    finally:
        for job in jobs:
            job.send_signal(signal.SIGINT)
        for job in jobs:
            job.wait()


def _start(command: list[str], told: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with told.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "foreload.trainer.cli", *command], env=environment, stdout=file, stderr=file
        )


def main() -> None:
    """Measure, print, save."""
    given = arguments(__doc__, pairs=(5, 1))
    base = given.out / "work"
    base.mkdir(parents=True, exist_ok=True)
    sizes = QUICK_SIZES if given.quick else SIZES
    with tempfile.TemporaryDirectory(prefix="follow-", dir=base) as folder:
        contenders: dict[str, Callable[[], float]] = {
            f"{rows:,} rows": partial(first_step, Path(folder).absolute() / "job", rows) for rows in sizes
        }
        tell("a first run, which compiles the kernels")
        next(iter(contenders.values()))()
        taken = alternate(contenders, given.pairs, given.budget.until(1.0))
    small, large = taken.values()
    lines: list[list[Cell]] = [[name, spread(values).median, min(values), max(values)] for name, values in taken.items()]
    table = Table(
        "Seconds from the start to the first step",
        ["", "median", "least", "most"],
        lines,
        "prepare and train --follow start together.",
    )
    claim = Claim(
        f"first step of train --follow, {sizes[1]:,} rows, s later", f"{sizes[0]:,} rows", "<= 2",
        spread([b - a for a, b in zip(small, large, strict=True)]), most=LONGER_SECONDS,
    )  # fmt: skip
    settings = {"batch_size": BATCH, "slots": SLOTS, "window": WINDOW, "pairs": len(small)}
    save(Results("follow", "Training beside prepare", [claim], [table], settings=settings), given.out)


if __name__ == "__main__":
    main()
