"""Trained samples a second with two trainers, beside TorchRec on two ranks.

python benchmarks/bench_torchrec.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from comparison import Claim, Ratio, Results, Table, alternate, arguments, cpu_capability, ratio, save, spread, tell
from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.compute.numerics import ENVIRONMENTS, LINEAR
from interleaved import Ranks
from lanes import LanesWorkload
from torchrec_environment import TORCHREC
from virtual_environment import NotToBeHad
from workload import BATCH, DIM, FULL, LR, MODELS, QUICK, ROOT, SEED, SLOTS, describe, shares

RANKS = 2
DENSE_LR = 0.01
OURS, AVX2 = "Foreload", "Foreload, --cpu-capability avx2"
CLAIM = ("trained samples/s, 2 trainers, {} model", "TorchRec on CPU, 2 ranks")
LEAST = {"small": 1.15, "Bagpipe's": 1.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of a run, those before them that do not count, the most pairs, and the share of the script's time after which none begins."""

    steps: int
    discarded: int
    pairs: int
    share: float


# Untimed steps outlast what traffic had fetched ahead while the other contender had its run (8 steps).
PLANS = {"small": Plan(10, 10, 60, 0.5), "Bagpipe's": Plan(4, 9, 12, 1.0)}
QUICK_PLANS = {"small": Plan(8, 10, 5, 1.0)}


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def steps_of(plan: Plan, pairs: int) -> int:
    """All steps that a contender trains in so many pairs, those before the first included."""
    return 1 + plan.discarded + pairs * (plan.steps + plan.discarded)


def torchrec(python: Path, schedule: Schedule, slices: Path, model: str) -> Ranks:
    """TorchRec's contender."""
    spec = {
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
    script = str(ROOT / "benchmarks" / "torchrec_contender.py")
    commands = [[str(python), script, json.dumps({"rank": rank, **spec})] for rank in range(RANKS)]
    return Ranks("TorchRec", commands, {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})


def foreload(schedule: Schedule, model: str, stores: LocalStores, numerics: Mapping[str, str], root: Path = ROOT) -> Ranks:
    """This project's contender: two trainers on a copy of the filled store. numerics: settings other than the project's own; root: of its sources."""
    spec = {"ranks": RANKS, "port": free_port(), "schedule": str(schedule.path), "model": model, "urls": list(stores.urls)}
    script = str(root / "benchmarks" / "foreload_rank.py")
    commands = [[sys.executable, script, json.dumps({"rank": rank, **spec})] for rank in range(RANKS)]
    return Ranks("Foreload", commands, {"PYTHONPATH": str(root), **numerics})


def settings_of() -> dict[str, dict[str, str]]:
    """Foreload's contenders, name -> variables: with this processor's widest instructions and, if these are others, with AVX2, its default."""
    contenders: dict[str, dict[str, str]] = {OURS: {}}
    if cpu_capability() != "avx2":
        contenders[AVX2] = ENVIRONMENTS["avx2"] | {LINEAR: "torch"}
    return contenders


def processor_seconds(pids: Sequence[int | None]) -> float:
    """Processor time that processes have taken so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run(contender: Ranks, plan: Plan) -> dict[str, float]:
    """A run's figures: speed and ms of a step by the slower process, processor time of both, the rest as their mean."""
    answers = contender.run(plan.steps, plan.discarded)
    seconds = max(sum(answer["seconds"]) for answer in answers)
    figures = {
        "samples_per_second": BATCH * plan.steps / seconds,
        "ms": 1000 * seconds / plan.steps,
        "processor_ms": 1000 * sum(answer["processor"] for answer in answers) / plan.steps,
        "loss": statistics.mean(answer["loss"] for answer in answers),
    }
    for name in ("seconds_compute", "seconds_exchange", "seconds_waiting", "bytes_sent"):
        if name in answers[0]["further"]:
            figures[name] = statistics.mean(statistics.mean(answer["further"][name]) for answer in answers)
    return figures


def _tables(
    model: str, measured: Mapping[str, Sequence[Mapping[str, float]]], redis_ms: Mapping[str, float], ours: Sequence[str]
) -> list[Table]:
    """All contenders' steps, and what those of Foreload's contenders, `ours`, are made of. redis_ms: the servers' processor time of a step."""

    def median(contender: str, figure: str) -> float:
        return statistics.median(result[figure] for result in measured[contender])

    def shown(contender: str) -> str:
        rate = spread([result["samples_per_second"] for result in measured[contender]])
        return f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"

    rows: list[list[str | float]] = [
        [
            contender,
            shown(contender),
            median(contender, "ms"),
            median(contender, "processor_ms"),
            redis_ms.get(contender, "-"),
            median(contender, "loss"),
        ]
        for contender in measured
    ]
    columns = [
        "contender",
        "samples/s, median (spread)",
        "ms a step",
        "processor ms of both trainers",
        "of Redis",
        "loss of the last",
    ]
    parts: list[list[str | float]] = [
        [
            name,
            *(1000 * median(name, f"seconds_{part}") for part in ("compute", "exchange", "waiting")),
            median(name, "bytes_sent"),
        ]
        for name in ours
    ]
    return [
        Table(f"Two trainers, {model} model", columns, rows, f"{len(measured[OURS])} pairs."),
        Table(
            f"A step of Foreload's two trainers, {model} model (ms)",
            ["contender", "compute", "exchange", "waiting for rows", "bytes that a trainer sends"],
            parts,
        ),
    ]


def claim(model: str, contender: str, value: Ratio | None, note: str = "") -> Claim:
    """What is held against TorchRec of a model, trained by one of Foreload's contenders."""
    least = LEAST[model]
    bar = f">= {least}" if least > 1 else "ahead: > 1.0"
    return Claim(CLAIM[0].format(model) + contender.removeprefix(OURS), CLAIM[1], bar, value, least=least, note=note)


def compare(
    work: LanesWorkload, second: Schedule, python: Path, model: str, plan: Plan, until: float
) -> tuple[list[Claim], list[Table], dict[str, float]]:
    """One model's claims, its tables, and of the pairs that there was time for: how many, and the rows that their steps used."""
    slices = work.slices(second)
    ours = settings_of()
    with ExitStack() as stack:
        tell(f"{model}: starting TorchRec and Foreload")
        stores = {name: stack.enter_context(work.stores()) for name in ours}
        contenders = {"TorchRec": torchrec(python, second, slices, model)}
        stack.callback(contenders["TorchRec"].close)
        for name, numerics in ours.items():
            contenders[name] = foreload(second, model, stores[name], numerics)
            stack.callback(contenders[name].close)
        for contender in contenders.values():
            contender.run(1, plan.discarded)  # compiles
        before = {name: processor_seconds(own.pids) for name, own in stores.items()}
        measured = alternate({name: partial(run, contender, plan) for name, contender in contenders.items()}, plan.pairs, until)
        pairs = len(measured[OURS])
        steps = pairs * (plan.steps + plan.discarded)
        redis_ms = {name: 1000 * (processor_seconds(own.pids) - before[name]) / steps for name, own in stores.items()}
    rate = {name: [result["samples_per_second"] for result in of] for name, of in measured.items()}
    claims = [claim(model, own, ratio(rate[own], rate["TorchRec"])) for own in ours]
    processor = {name: [result["processor_ms"] for result in of] for name, of in measured.items()}
    what, told = f"processor time a step, 2 trainers, {model} model", "Foreload's over TorchRec's, its traffic included."
    claims.append(Claim(what, CLAIM[1], "none", ratio(processor[OURS], processor["TorchRec"]), note=told))
    tables = _tables(model, measured, redis_ms, list(ours))
    return claims, tables, {"pairs": pairs, **shares(second, plan.discarded + 1, steps_of(plan, pairs))}


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(60, 5))
    plans = QUICK_PLANS if given.quick else PLANS
    plans = {model: replace(plan, pairs=min(plan.pairs, given.pairs)) for model, plan in plans.items()}
    title = "Two trainers, beside TorchRec"
    try:
        if given.quick and not TORCHREC.is_there():
            raise NotToBeHad("--quick does not make its virtual environment; python benchmarks/torchrec_environment.py does")
        python = TORCHREC.make()
    except NotToBeHad as error:
        tell(f"skipped: TorchRec could not be had: {error}")
        claims = [claim(model, OURS, None, f"TorchRec could not be had: {error}") for model in plans]
        save(Results("torchrec", title, claims), given.out)
        return
    work = LanesWorkload(given.out / "work", QUICK if given.quick else FULL, RANKS)
    second = work.second(steps=max(steps_of(plan, plan.pairs) for plan in plans.values()))
    results = [compare(work, second, python, model, plan, given.budget.until(plan.share)) for model, plan in plans.items()]
    seen = {model: result[2] for model, result in zip(plans, results, strict=True)}
    fetched = ", ".join(f"{of['fetched_share']:.1%} ({model} model)" for model, of in seen.items())
    notes = [
        describe(work).replace("one lane,", f"one lane a trainer, {SLOTS // RANKS:,} slots each,"),
        f"Arrivals fetched from the store: {fetched}.",
        "TorchRec 1.8.0 with FBGEMM 1.8.0 for the CPU: DistributedModelParallel over gloo, each table whole on one of the two ranks "
        "(by size in turn), row-wise Adagrad fused into FBGEMM's backward pass, the dense part (this project's module and the same "
        "optimizer) under DistributedDataParallel, one thread a rank. It reads the same slices, written down beforehand in its own order, so "
        "that its KeyedJaggedTensors cost it one copy. Its whole tables lie in memory. TrainPipelineSparseDist was tried and takes 1.1 x "
        "the time: without a GPU nothing overlaps.",
        "TorchRec runs as it comes, with AVX-512 where the processor has it. Foreload is told what to use, so that all hosts of a run compute "
        "the same bits: here --cpu-capability avx512, and beside it its default, avx2, which any host has.",
        "All contenders' processes live throughout; each trains runs of steps while the other waits.",
    ]
    settings: dict[str, str | int | float | bool] = {
        **{f"{model}: {name}": getattr(plan, name) for model, plan in plans.items() for name in ("steps", "discarded")},
        **{f"{model}: {name}": value for model, of in seen.items() for name, value in of.items()},
    }
    tables = [table for result in results for table in result[1]]
    save(
        Results("torchrec", title, [claim for result in results for claim in result[0]], tables, settings=settings, notes=notes),
        given.out,
    )


if __name__ == "__main__":
    main()
