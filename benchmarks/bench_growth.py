"""Step time as tables grow from 10^5 to 10^8 rows while the accesses stay the same.

python benchmarks/bench_growth.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench_torchrec import free_port
from comparison import Cell, Claim, Ratio, Results, Series, Table, alternate, arguments, ratio, save, spread, tell
from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule
from interleaved import Ranks
from workload import BATCH, DIM, ROOT, SHARDS, SLOTS

SIZES = {"10^5": 10**5, "10^6": 10**6, "10^7": 10**7, "10^8": 10**8}
VALUES = 100_000  # distinct ones a column, whatever the size of its table
MODEL = "small"
STEPS, DISCARDED = 10, 10  # of a run; the discarded steps are more than traffic had fetched ahead while others ran


def prepare(out: Path, table_rows: int, samples: int) -> float:
    """Two epochs over the same samples, whatever the tables' sizes; returns the seconds that it took."""
    given = ["--format", "synthetic", "--rows", str(samples), "--values", str(VALUES), "--table-rows", str(table_rows)]
    given += ["--batch-size", str(BATCH), "--epochs", "2", "--slots", str(SLOTS), "--out", str(out)]
    begun = time.monotonic()
    command = [sys.executable, "-m", "foreload.pipelines.prepare", *given]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - begun


def check_same_accesses(one: Schedule, other: Schedule) -> None:
    """Raises SystemExit unless two schedules move and look up the same in every event; their ids differ, as their tables do."""
    for event, other_event in zip(one.events(), other.events(), strict=True):
        first, second = one.lane(event, 0), other.lane(other_event, 0)
        pairs = [(getattr(first, name), getattr(second, name)) for name in ("slots", "index", "users", "labels", "dense")]
        pairs += [(getattr(first.arrivals, name), getattr(second.arrivals, name)) for name in ("slot", "table", "ordinal", "tag")]
        if not all(np.array_equal(a, b) for a, b in pairs):
            raise SystemExit(f"{other.path}: event {event.step} accesses other rows than that of {one.path}")


def start(schedule: Path, stores: LocalStores) -> Ranks:
    """A trainer on stores that hold nothing yet."""
    spec = {"rank": 0, "ranks": 1, "port": free_port(), "schedule": str(schedule), "model": MODEL, "urls": list(stores.urls)}
    command = [sys.executable, str(ROOT / "benchmarks" / "foreload_rank.py"), json.dumps(spec)]
    return Ranks(schedule.name, [command], {"PYTHONPATH": str(ROOT)})


def run(contender: Ranks) -> dict[str, float]:
    """The median step of a run, in ms, and the median time of it spent waiting for rows."""
    (answer,) = contender.run(STEPS, DISCARDED)
    waiting = statistics.median(answer["further"]["seconds_waiting"])
    return {"ms": 1000 * statistics.median(answer["seconds"]), "waiting_ms": 1000 * waiting}


@dataclass(frozen=True, slots=True)
class Measured:
    """By size: the seconds of prepare, the counts of its manifest, and the figures of each run, as `run` gives them."""

    prepare_seconds: dict[str, float]
    counts: dict[str, dict[str, int]]
    runs: dict[str, list[Mapping[str, float]]]


def measure(given: argparse.Namespace, epoch: int) -> Measured:
    """Prepare for every size, and train the contenders in interleaved runs. epoch: the steps of one."""
    seconds: dict[str, float] = {}
    schedules: dict[str, Schedule] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.out, prefix="growth-")))
        contenders: dict[str, Ranks] = {}
        sizes = {name: SIZES[name] for name in ("10^5", "10^8")} if given.quick else SIZES
        for name, table_rows in sizes.items():
            tell(f"preparing tables of {name} rows")
            schedule = folder / name
            seconds[name] = prepare(schedule, table_rows, epoch * BATCH)
            schedules[name] = Schedule(schedule)
            if name != "10^5":
                check_same_accesses(schedules["10^5"], schedules[name])
            stores = stack.enter_context(LocalStores(SHARDS, folder / f"store-{name}"))
            contenders[name] = start(schedule, stores)
            stack.callback(contenders[name].close)
        for name, contender in contenders.items():
            tell(f"tables of {name} rows: training the first epoch")
            contender.run(1, epoch - 1)
        runs = alternate(
            {name: partial(run, contender) for name, contender in contenders.items()}, given.pairs, given.budget.until(0.95)
        )
        return Measured(
            seconds, {name: dict[str, Any](schedule.manifest["counts"]) for name, schedule in schedules.items()}, runs
        )


def main() -> None:
    """Measure and save."""
    # The machine's speed may change within a second, so interleaved runs are short and many.
    given = arguments(__doc__, pairs=(30, 6))
    epoch = given.pairs * (STEPS + DISCARDED)
    measured = measure(given, epoch)
    ms = {name: [result["ms"] for result in results] for name, results in measured.runs.items()}
    ratios: dict[str, Ratio] = {name: ratio(of, ms["10^5"]) for name, of in ms.items()}
    worst = max(ratios.values(), key=lambda of_size: abs(of_size.median - 1))
    claim = Claim(
        "step time as tables grow from 10^5 to 10^8 rows", "itself at 10^5", "flat within 5 %", worst, least=0.95, most=1.05,
        note="the size that is furthest from 1",
    )  # fmt: skip
    rows: list[list[Cell]] = [
        [
            name, str(spread(of)), str(ratios[name]), statistics.median(result["waiting_ms"] for result in measured.runs[name]),
            measured.counts[name]["rows_used"], measured.counts[name]["arrivals"], measured.prepare_seconds[name],
        ]
        for name, of in ms.items()
    ]  # fmt: skip
    columns = [
        "rows of a table",
        "ms a step (spread)",
        "ratio to 10^5",
        "waiting for rows (ms)",
        "rows used",
        "arrivals",
        "prepare (s)",
    ]
    table = Table("Step time as tables grow", columns, rows, note="26 tables each; prepare ran once for each, both epochs.")
    plot = Series(
        "Step time as tables grow",
        "rows of a table",
        "ms a step",
        "bars",
        {"step time": [(name, statistics.median(of)) for name, of in ms.items()]},
    )
    notes = [
        f"26 synthetic tables, {VALUES:,} values a column, spread over the whole of its table: which sample uses which value, and so every "
        f"move of the schedule, is the same for all sizes (compared, event by event; only ids differ). One trainer, {SHARDS} shards, batch "
        f"{BATCH:,}, dim {DIM}, row-wise Adagrad, the {MODEL} model, {SLOTS:,} slots. Timed in the second of two epochs, when rows are fetched "
        "from the store.",
        "Trainers of all sizes live throughout, each with a store of its own, and train in turn.",
    ]
    settings = {
        "pairs": len(ms["10^5"]),
        "steps of a run": STEPS,
        "untimed steps before": DISCARDED,
        "samples of an epoch": epoch * BATCH,
    }
    save(Results("growth", "Growing tables", [claim], [table], [plot], settings, notes), given.out)


if __name__ == "__main__":
    main()
