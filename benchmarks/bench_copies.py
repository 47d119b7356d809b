"""What copies of lanes on another trainer cost where nothing fails: step time, bytes, memory.

python benchmarks/bench_copies.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench_torchrec import free_port, processor_seconds
from comparison import Cell, Claim, Results, Table, alternate, arguments, ratio, save, spread, tell
from foreload.cache.client.local import LocalStores
from foreload.pipelines.planning.sizing import slot_bytes
from foreload.pipelines.schedule.reader import Schedule
from interleaved import Ranks
from lanes import LanesWorkload
from replica_volume import volumes
from workload import BATCH, DIM, FULL, QUICK, ROOT, SLOTS, describe, shares

RANKS = 2
WITHOUT, WITH = "1 copy", "2 copies"
COPIES = {WITHOUT: 1, WITH: 2}
PARITIES = ("off", "2+1")
VOLUME_STEPS = (150, 25)


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of a run, those before them that do not count, the most pairs, the bar, and the share of the script's time at which none begins."""

    steps: int
    discarded: int
    pairs: int
    most: float
    shares: tuple[float, float]


PLANS = {
    "small": Plan(30, 12, 16, 1.15, (0.25, 0.5)),
    "Bagpipe's": Plan(5, 9, 8, 1.05, (0.72, 0.95)),
}
QUICK_PLANS = {"small": Plan(15, 12, 3, 1.15, (0.4, 0.8))}


@dataclass(frozen=True, slots=True)
class Contest:
    """What both contenders did, run by run; pairs, and the memory that a trainer has taken beyond that without copies, bytes."""

    model: str
    parity: str
    runs: Mapping[str, Sequence[Mapping[str, float]]]
    redis_ms: Mapping[str, float]

    def figures(self, contender: str, figure: str) -> list[float]:
        """A figure of every run."""
        return [run[figure] for run in self.runs[contender]]

    def median(self, contender: str, figure: str) -> float:
        """Its median."""
        return statistics.median(self.figures(contender, figure))

    @property
    def further_bytes(self) -> float:
        """Memory of a trainer with copies beyond that of one without, at the end."""
        return max(self.figures(WITH, "resident_bytes")) - max(self.figures(WITHOUT, "resident_bytes"))


def steps_of(plan: Plan, pairs: int) -> int:
    """All steps that a contender trains in so many pairs, those before the first included."""
    return 1 + plan.discarded + pairs * (plan.steps + plan.discarded)


def contender(name: str, schedule: Schedule, model: str, stores: LocalStores, log: str) -> Ranks:
    """Two trainers on a copy of the filled store. log: empty without parity."""
    spec = {
        "ranks": RANKS, "port": free_port(), "schedule": str(schedule.path), "model": model, "urls": list(stores.urls),
        "copies": COPIES[name], "log": log, "bound": True,
    }  # fmt: skip
    script = str(ROOT / "benchmarks" / "foreload_rank.py")
    return Ranks(
        name, [[sys.executable, script, json.dumps({"rank": rank, **spec})] for rank in range(RANKS)], {"PYTHONPATH": str(ROOT)}
    )


def run(ranks: Ranks, plan: Plan) -> dict[str, float]:
    """A run's figures: ms of a step by the slower process, processor time of both trainers, the rest as their mean."""
    answers = ranks.run(plan.steps, plan.discarded)
    further = [answer["further"] for answer in answers]
    figures = {
        "ms": 1000 * max(sum(answer["seconds"]) for answer in answers) / plan.steps,
        "median_ms": 1000 * max(statistics.median(answer["seconds"]) for answer in answers),
        "processor_ms": 1000 * sum(answer["processor"] for answer in answers) / plan.steps,
        "loss": statistics.mean(answer["loss"] for answer in answers),
        "resident_bytes": statistics.mean(of["resident_bytes"][-1] for of in further),
    }
    for name in ("seconds_compute", "seconds_exchange", "seconds_waiting", "bytes_sent"):
        figures[name] = statistics.mean(statistics.mean(of[name]) for of in further)
    replicas = [of["replica_bytes_so_far"] for of in further]
    figures["replica_bytes"] = statistics.mean((of[-1] - of[0]) / (len(of) - 1) for of in replicas)
    return figures


def compare(work: LanesWorkload, second: Schedule, model: str, parity: str, plan: Plan, until: float) -> Contest:
    """Both contenders in turn."""
    with ExitStack() as stack:
        tell(f"{model} model, parity {parity}: starting")
        stores = {name: stack.enter_context(work.stores("parity" if parity != "off" else "rows")) for name in COPIES}
        ranks = {}
        for name in COPIES:
            log = stack.enter_context(tempfile.TemporaryDirectory(dir=work.folder, prefix="log-"))
            ranks[name] = contender(name, second, model, stores[name], log if parity != "off" else "")
            stack.callback(ranks[name].close)
        for one in ranks.values():
            one.run(1, plan.discarded)  # compiles
        before = {name: processor_seconds(own.pids) for name, own in stores.items()}
        runs = alternate({name: partial(run, one, plan) for name, one in ranks.items()}, plan.pairs, until)
        steps = len(runs[WITH]) * (plan.steps + plan.discarded)
        redis_ms = {name: 1000 * (processor_seconds(own.pids) - before[name]) / steps for name, own in stores.items()}
    return Contest(model, parity, runs, redis_ms)


def claims_of(contest: Contest, plan: Plan) -> list[Claim]:
    """Step time with copies over without."""
    what = f"step time, 2 trainers, parity {contest.parity}, {contest.model} model"
    return [
        Claim(f"{what}: 2 copies of each lane", "1 copy", f"<= {plan.most}", ratio(contest.figures(WITH, "ms"), contest.figures(WITHOUT, "ms")),
              most=plan.most),
    ]  # fmt: skip


def step_table(contests: Sequence[Contest]) -> Table:
    """All contenders' steps, and what they are made of."""
    rows: list[list[Cell]] = []
    for contest in contests:
        for name in COPIES:
            ms = spread(contest.figures(name, "ms"))
            parts = (f"{1000 * contest.median(name, f'seconds_{part}'):.2f}" for part in ("compute", "exchange", "waiting"))
            rows.append([
                contest.model, contest.parity, name, f"{ms.median:.2f} ({ms.low:.2f} to {ms.high:.2f})",
                f"{min(contest.figures(name, 'median_ms')):.2f}", f"{contest.median(name, 'processor_ms'):.1f}", f"{contest.redis_ms[name]:.1f}",
                *parts,
                contest.median(name, "bytes_sent"), contest.median(name, "replica_bytes"),
            ])  # fmt: skip
    columns = [
        "model", "parity", "contender", "ms a step, median (spread)", "least median of a run", "processor ms of both trainers", "of Redis", "compute",
        "exchange", "waiting for rows", "bytes that a trainer sends", "of these replicas",
    ]  # fmt: skip
    return Table(
        "Steps of two trainers with and without copies", columns, rows, f"{len(contests[0].runs[WITH])} pairs of the first."
    )


def pair_table(contests: Sequence[Contest]) -> Table:
    """Further ways to see the same pairs: by each run's median step, and by processor time, which other work on the machine disturbs less."""
    rows: list[list[Cell]] = [
        [
            contest.model, contest.parity, len(contest.runs[WITH]),
            *(str(ratio(contest.figures(WITH, figure), contest.figures(WITHOUT, figure))) for figure in ("ms", "median_ms", "processor_ms")),
            f"{min(contest.figures(WITH, 'median_ms')) / min(contest.figures(WITHOUT, 'median_ms')):.3f}",
        ]
        for contest in contests
    ]  # fmt: skip
    columns = ["model", "parity", "pairs", "mean step", "median step", "processor time", "least median step"]
    return Table("With copies over without", columns, rows)


def volume_table(folder: Path, steps: int) -> Table:
    """Bytes of replicas."""
    rows: list[list[Cell]] = [
        [
            of.optimizer,
            of.placement,
            of.trainers,
            f"{of.sent:,.0f}",
            f"{of.full:,.0f}",
            f"{of.sent / of.full:.3f}",
            f"{of.used_next:.1%}",
        ]
        for of in volumes(folder, steps)
    ]
    columns = [
        "row optimizer", "placement", "trainers", "bytes of a step's replicas, all trainers", "of full replication", "ratio",
        "of the rows changed, those that the copy's trainer uses next",
    ]  # fmt: skip
    note = f"Counted by the schedule: 4 lanes, batch {BATCH:,}, dim {DIM}, {steps} steps, 2 copies of each lane."
    return Table("Bytes of replicas over full replication of the rows and states that a step changed", columns, rows, note)


def memory_table(contests: Sequence[Contest]) -> Table:
    """Memory of a trainer: measured, and what `foreload train` says of a copy."""
    told = slot_bytes(DIM + 1, with_base=False) * (SLOTS // RANKS)
    rows: list[list[Cell]] = [
        [
            contest.model, contest.parity, *(f"{max(contest.figures(name, 'resident_bytes')) / 2**20:,.0f}" for name in COPIES),
            f"{contest.further_bytes / 2**20:,.1f}", f"{told / 2**20:,.1f}",
        ]
        for contest in contests
    ]  # fmt: skip
    columns = ["model", "parity", *(f"{name}, MiB" for name in COPIES), "further, MiB", "a copy as `train` tells it, MiB"]
    note = "Memory that a trainer alone has (RssAnon), at the end. Each trainer has one lane, and with copies one copy."
    return Table("Memory of a trainer", columns, rows, note)


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(16, 3))
    plans = QUICK_PLANS if given.quick else PLANS
    plans = {model: replace(plan, pairs=min(plan.pairs, given.pairs)) for model, plan in plans.items()}
    work = LanesWorkload(given.out / "work", QUICK if given.quick else FULL, RANKS)
    second = work.second(steps=max(steps_of(plan, plan.pairs) for plan in plans.values()))
    contests, claims = [], []
    for model, plan in plans.items():
        for parity, share in zip(PARITIES, plan.shares, strict=True):
            contests.append(compare(work, second, model, parity, plan, given.budget.until(share)))
            claims += claims_of(contests[-1], plan)
    fetched = shares(second, 1, steps_of(plans["small"], len(contests[0].runs[WITH])))["fetched_share"]
    notes = [
        describe(work).replace("one lane,", f"one lane a trainer, {SLOTS // RANKS:,} slots each,"),
        f"Arrivals fetched from the store: {fetched:.1%}. All contenders' processes live throughout; each trains runs of "
        "steps while the other waits.",
    ]
    settings: dict[str, str | int | float | bool] = {"slots": SLOTS, "batch": BATCH}
    tables = [
        pair_table(contests),
        step_table(contests),
        volume_table(work.folder, VOLUME_STEPS[given.quick]),
        memory_table(contests),
    ]
    save(Results("copies", "Copies of lanes, where nothing fails", claims, tables, settings=settings, notes=notes), given.out)


if __name__ == "__main__":
    main()
