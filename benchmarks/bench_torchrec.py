"""Trained samples a second with two trainers, beside TorchRec on two ranks.

python benchmarks/bench_torchrec.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torchrec_environment
from cache.local import LocalStores
from comparison import Claim, Results, Table, alternate, arguments, ratio, save, spread, tell
from lanes import LanesWorkload
from pipelines.schedule import Schedule
from torchrec_environment import NotToBeHad
from trainer.layout import model_spec
from turns import Ranks
from workload import BATCH, DIM, FULL, LR, MODELS, QUICK, ROOT, SEED, SLOTS, describe, shares

RANKS = 2
DENSE_LR = 0.01
CLAIM = ("trained samples/s, 2 trainers, {} model", "TorchRec on CPU, 2 ranks", "ahead: > 1.0")


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of a turn, those before them that do not count, the most pairs, and the share of the script's time after which none begins."""

    steps: int
    discarded: int
    pairs: int
    share: float


# Untimed steps outlast what traffic had fetched ahead while the other side had its turn (8 steps).
PLANS = {"small": Plan(25, 12, 12, 0.6), "Bagpipe's": Plan(5, 9, 4, 1.0)}
QUICK_PLANS = {"small": Plan(15, 12, 5, 1.0)}


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def steps_of(plan: Plan) -> int:
    """All steps that a side may train."""
    return 1 + plan.discarded + plan.pairs * (plan.steps + plan.discarded)


def torchrec(python: Path, schedule: Schedule, slices: Path, model: str) -> Ranks:
    """TorchRec's side."""
    order = {
        "ranks": RANKS,
        "port": free_port(),
        "samples": str(slices),
        "tables": [table.rows for table in schedule.header.features.tables],
        "dim": DIM,
        "lr": LR,
        "dense_lr": DENSE_LR,
        "dense_width": model_spec(schedule.header.features, DIM).dense_width,
        "model": MODELS[model],
        "seed": SEED,
    }
    script = str(ROOT / "benchmarks" / "torchrec_side.py")
    commands = [[str(python), script, json.dumps({"rank": rank, **order})] for rank in range(RANKS)]
    return Ranks("TorchRec", commands, {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})


def foreload(schedule: Schedule, model: str, stores: LocalStores) -> Ranks:
    """This project's side: two trainers on a copy of the filled store."""
    order = {"ranks": RANKS, "port": free_port(), "schedule": str(schedule.path), "model": model, "urls": list(stores.urls)}
    script = str(ROOT / "benchmarks" / "foreload_rank.py")
    commands = [[sys.executable, script, json.dumps({"rank": rank, **order})] for rank in range(RANKS)]
    return Ranks("Foreload", commands, {"PYTHONPATH": str(ROOT)})


def processor_seconds(pids: Sequence[int | None]) -> float:
    """Processor time that processes have taken so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def turn(side: Ranks, plan: Plan) -> dict[str, float]:
    """A turn's figures; the times of a step are the mean of the two processes."""
    answers = side.turn(plan.steps, plan.discarded)
    seconds = max(sum(answer["seconds"]) for answer in answers)
    found = {
        "samples_per_second": BATCH * plan.steps / seconds,
        "ms": 1000 * seconds / plan.steps,
        "processor_ms": 1000 * sum(answer["processor"] for answer in answers) / plan.steps,
        "loss": statistics.mean(answer["loss"] for answer in answers),
    }
    for name in ("seconds_compute", "seconds_exchange", "seconds_waiting", "bytes_sent"):
        if name in answers[0]["further"]:
            found[name] = statistics.mean(statistics.mean(answer["further"][name]) for answer in answers)
    return found


def compare(
    work: LanesWorkload, second: Schedule, python: Path, model: str, plan: Plan, until: float
) -> tuple[Claim, list[Table], dict[str, float]]:
    """One model's claim, its tables, and shares of its arrivals."""
    slices = work.slices(second)
    with ExitStack() as stack:
        stores = stack.enter_context(work.stores())
        tell(f"{model}: starting TorchRec")
        sides = {"TorchRec": torchrec(python, second, slices, model)}
        stack.callback(sides["TorchRec"].close)
        sides["Foreload"] = foreload(second, model, stores)
        stack.callback(sides["Foreload"].close)
        for side in sides.values():
            side.turn(1, plan.discarded)  # compiles
        before = processor_seconds(stores.pids)
        found = alternate({name: partial(turn, side, plan) for name, side in sides.items()}, plan.pairs, until)
        pairs = len(found["Foreload"])
        redis_ms = 1000 * (processor_seconds(stores.pids) - before) / (pairs * (plan.steps + plan.discarded))
    rate = {name: [of_turn["samples_per_second"] for of_turn in of] for name, of in found.items()}
    gain = ratio(rate["Foreload"], rate["TorchRec"])
    name, against, bar = CLAIM
    claim = Claim(name.format(model), against, bar, gain, least=1.0)

    def median(side: str, figure: str) -> float:
        return statistics.median(of_turn[figure] for of_turn in found[side])

    rows: list[list[str | float]] = [
        [
            side,
            str(spread([round(value) for value in rate[side]])),
            median(side, "ms"),
            median(side, "processor_ms"),
            redis_ms if side == "Foreload" else "-",
            median(side, "loss"),
        ]
        for side in sides
    ]
    columns = ["side", "samples/s, median (spread)", "ms a step", "processor ms of both trainers", "of Redis", "loss of the last"]
    parts = [1000 * median("Foreload", f"seconds_{part}") for part in ("compute", "exchange", "waiting")]
    tables = [
        Table(f"Two trainers, {model} model", columns, rows),
        Table(
            f"A step of Foreload's two trainers, {model} model (ms)",
            ["compute", "exchange", "waiting for rows", "bytes that a trainer sends"],
            [[*parts, median("Foreload", "bytes_sent")]],
        ),
    ]
    return claim, tables, {"pairs": pairs, **shares(second, plan.discarded + 1, steps_of(plan))}


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(12, 5))
    plans = QUICK_PLANS if given.quick else PLANS
    plans = {model: replace(plan, pairs=min(plan.pairs, given.pairs)) for model, plan in plans.items()}
    title = "Two trainers, beside TorchRec"
    try:
        if given.quick and not torchrec_environment.is_there():
            raise NotToBeHad("--quick does not make its virtual environment; python benchmarks/torchrec_environment.py does")
        python = torchrec_environment.make()
    except NotToBeHad as error:
        tell(f"skipped: TorchRec could not be had: {error}")
        claims = [Claim(CLAIM[0].format(model), *CLAIM[1:], None, note=f"TorchRec could not be had: {error}") for model in plans]
        save(Results("torchrec", title, claims), given.out)
        return
    work = LanesWorkload(given.out / "work", QUICK if given.quick else FULL, RANKS)
    second = work.second(steps=max(steps_of(plan) for plan in plans.values()))
    results = [compare(work, second, python, model, plan, given.budget.until(plan.share)) for model, plan in plans.items()]
    seen = results[0][2]
    notes = [
        describe(work).replace("one lane,", f"one lane a trainer, {SLOTS // RANKS:,} slots each,"),
        f"Arrivals fetched from the store: {seen['fetched_share']:.1%}.",
        "TorchRec 1.8.0 with FBGEMM 1.8.0 for the CPU: DistributedModelParallel over gloo, each table whole on one of the two ranks "
        "(by size in turn), row-wise Adagrad fused into FBGEMM's backward pass, the dense part (this project's module and the same "
        "optimizer) under DistributedDataParallel, one thread a rank. It reads the same slices, written down beforehand in its own order, so "
        "that its KeyedJaggedTensors cost it one copy. Its whole tables lie in memory. TrainPipelineSparseDist was tried and takes 1.1 x "
        "the time: without a GPU nothing overlaps.",
        "Both sides' processes live throughout; each trains turns of steps while the other waits.",
    ]
    settings: dict[str, str | int | float | bool] = {
        **{f"{model}: {name}": getattr(plan, name) for model, plan in plans.items() for name in ("steps", "discarded")},
        **seen,
    }
    tables = [table for result in results for table in result[1]]
    save(Results("torchrec", title, [result[0] for result in results], tables, settings=settings, notes=notes), given.out)


if __name__ == "__main__":
    main()
