"""Training steps beside those of tables in memory, rows on demand, and an LRU cache.

python benchmarks/bench_step.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from caches import lru_arrivals, minimum_arrivals
from comparison import Cell, Claim, Point, Ratio, Results, Series, Table, alternate, arguments, ratio, save, spread, tell
from contenders import FORELOAD, PROTECTED, Answer, Contender, ContenderSpec
from foreload.cache.client.local import LocalStores
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.reader import Schedule
from workload import BATCH, FULL, QUICK, SLOTS, Kind, Workload, describe, shares

LEAD = int(inspect.signature(Traffic).parameters["lead_events"].default)
DISCARDED = LEAD + 1
"""Steps at the start of a run that are not counted: more than what traffic fetches ahead, so all work for those counted is within the run."""

IN_MEMORY = ("one table", "26 bags")
FASTER_IN_MEMORY = "tables in memory, the faster way"
ON_DEMAND = ("on demand", "on demand, shards in turn")
SKIPPING = ("floor", *ON_DEMAND)  # need no warm-up: how fast they are does not depend on the steps before
STORES: dict[str, Kind] = {"foreload": "rows", PROTECTED: "parity", "LRU": "rows", **dict.fromkeys(ON_DEMAND, "plain")}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long contenders run: pairs of interleaved runs at most; in steps, warm_up before the first run, of each run those counted (steps) and those
    discarded before them.

    until: when no more pairs are begun, by time.monotonic. Runs are short, since the machine's speed may change within a second.
    """

    pairs: int
    warm_up: int
    steps: int
    until: float = math.inf
    discarded: int = DISCARDED

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.end_of(self.pairs)

    def end_of(self, pairs: int) -> int:
        """The step after the last one of so many pairs."""
        return self.warm_up + pairs * (self.discarded + self.steps)


@dataclass(frozen=True, slots=True)
class Contest:
    """What contenders did in alternation.

    answers: by contender and round; redis_ms: processor time of its redis-servers, ms a step; fetched_share: of the arrivals; arrivals: a step.
    """

    answers: dict[str, list[Answer]]
    redis_ms: dict[str, float]
    fetched_share: float
    arrivals: float

    def ms(self, contender: str) -> list[float]:
        """Milliseconds of a step, by round."""
        return [answer.mean_ms for answer in self.answers[contender]]

    def processor_ms(self, contender: str) -> list[float]:
        """Milliseconds of its processor time a step, by round."""
        return [answer.processor_ms for answer in self.answers[contender]]

    @property
    def pairs(self) -> int:
        """Rounds of interleaved runs."""
        return len(next(iter(self.answers.values())))

    @property
    def in_memory(self) -> str:
        """The better of the contenders in memory."""
        return min(
            (contender for contender in IN_MEMORY if contender in self.answers),
            key=lambda contender: statistics.median(self.ms(contender)),
        )

    def gain(self, contender: str) -> Ratio:
        """Foreload's samples a second over those of a contender."""
        return ratio(self.ms(contender), self.ms("foreload"))

    def above_floor(self, contender: str) -> list[float]:
        """Milliseconds of a step beyond the floor of the same round."""
        return [own - floor for own, floor in zip(self.ms(contender), self.ms("floor"), strict=True)]

    def floor_gain(self, contender: str) -> Ratio:
        """By round, how many times less Foreload's step takes beyond the floor than a contender's: inf where it takes no longer than that, 0 where
        the contender's does not either. At least x is theirs - floor >= x (own - floor), so the bound of the median is one of both.
        """
        pairs = zip(self.above_floor(contender), self.above_floor("foreload"), strict=True)
        return spread([0.0 if theirs <= 0 else theirs / own if own > 0 else math.inf for theirs, own in pairs])

    @property
    def note(self) -> str:
        """Which way in memory was the faster, and how many pairs there are."""
        return f"{self.in_memory[0].upper()}{self.in_memory[1:]} was the faster. {self.pairs} pairs."


def _processor_seconds(stores: LocalStores) -> float:
    """Processor time that the servers have used so far."""
    total = 0
    for pid in stores.pids:
        # The name, in brackets, may hold spaces.
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def contest(
    work: Workload, schedule: Schedule, model: str, contenders: Sequence[str], plan: Plan, first_epoch: bool = False
) -> Contest:
    """Run contenders over the same steps of a schedule, in alternation."""
    ids = work.ids(schedule, plan.end if first_epoch else None)
    with ExitStack() as stack:
        logs = stack.enter_context(TemporaryDirectory(dir=work.folder, prefix="logs-"))
        stores: dict[str, LocalStores] = {}
        for name in contenders:
            # The contenders on demand leave every row where it was, so they share a store.
            shared = next((stores[other] for other in ON_DEMAND if other in stores), None) if name in ON_DEMAND else None
            if name in STORES:
                stores[name] = shared or stack.enter_context(work.stores("empty" if first_epoch else STORES[name]))

        def start(name: str) -> Contender:
            skipped = plan.warm_up - 3 if name in SKIPPING or (model != "small" and name not in FORELOAD) else 0
            urls = stores[name].urls if name in stores else ()
            spec = ContenderSpec(
                name, str(schedule.path), model, str(ids), str(work.first.path), urls, schedule.header.slots[0], skipped, logs
            )
            contender = Contender(spec)
            stack.callback(contender.close)
            contender.run(1, plan.warm_up - skipped - 1)
            return contender

        tell(f"{model} model: starting {', '.join(contenders)}")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            running = dict(zip(contenders, pool.map(start, contenders), strict=True))
        answers: dict[str, list[Answer]] = {name: [] for name in contenders}
        redis_seconds = dict.fromkeys(stores, 0.0)

        def run(name: str) -> float:
            before = _processor_seconds(stores[name]) if name in stores else 0.0
            answers[name].append(running[name].run(plan.steps, plan.discarded))
            if name in stores:
                redis_seconds[name] += _processor_seconds(stores[name]) - before
            return answers[name][-1].mean_ms

        alternate({name: partial(run, name) for name in contenders}, plan.pairs, plan.until)
    end = plan.end_of(min(len(of) for of in answers.values()))
    redis_ms = {name: 1000 * seconds / (end - plan.warm_up) for name, seconds in redis_seconds.items()}
    seen = shares(schedule, plan.warm_up, end)
    return Contest(answers, redis_ms, seen["fetched_share"], seen["arrivals"])


def step_table(title: str, contest: Contest) -> Table:
    """The contenders of a contest."""
    rows: list[list[Cell]] = []
    for contender in contest.answers:
        ms = spread(contest.ms(contender))
        redis = contest.redis_ms.get(contender)
        rows.append([
            "dense floor" if contender == "floor" else contender, 1000 * BATCH / ms.median, f"{ms.median:.2f}", f"{ms.low:.2f} to {ms.high:.2f}",
            f"{statistics.median(contest.above_floor(contender)):.2f}",
            f"{statistics.median(contest.processor_ms(contender)):.2f}", "-" if redis is None else f"{redis:.1f}",
        ])  # fmt: skip
    note = f"{contest.pairs} pairs. Arrivals a step: {contest.arrivals:,.0f}, of which {contest.fetched_share:.1%} are fetched from the store."
    columns = [
        "contender",
        "samples/s",
        "ms a step",
        "spread",
        "ms beyond the floor",
        "processor ms a step",
        "Redis CPU, ms a step",
    ]
    return Table(title, columns, rows, note)


def breakdown(*contests: Contest) -> Series:
    """Step time by what it goes to, over the floor of the same contest; Foreload's is of the first."""
    layers: dict[str, list[Point]] = {
        "dense part": [], "waiting for rows": [], "exchange": [], "gather, gradients, updates": []
    }  # fmt: skip
    contenders = {contender: contest for contest in reversed(contests) for contender in contest.answers if contender != "floor"}
    for contender, contest in sorted(contenders.items(), key=lambda item: statistics.median(item[1].ms(item[0]))):
        answers, floor = contest.answers[contender], statistics.median(contest.ms("floor"))
        known = {
            layer: statistics.median(answer.parts.get(layer, 0.0) for answer in answers)
            for layer in ("waiting for rows", "exchange")
        }
        rest = statistics.median(contest.ms(contender)) - floor - sum(known.values())
        of_contender = {"dense part": floor, **known, "gather, gradients, updates": max(rest, 0.0)}
        for layer, ms in of_contender.items():
            layers[layer].append((contender, ms))
    return Series("Step time broken down, small model", "", "ms a step", "stacked", layers)


def step_claims(small: Contest, slower: Contest, large: Contest) -> list[Claim]:
    """What the contests say: of the small model beside tables in memory, and beside what fetches late; of the large one."""
    waiting = [answer.parts["waiting for rows"] / answer.mean_ms for answer in small.answers["foreload"]]
    samples, above = "trained samples/s", "step time beyond the dense floor"
    kept = "an LRU cache of the same slots over this project's store client"
    bound = ", lower 95 % bound of the median"
    own, ceiling = slower.gain("on demand"), ratio(slower.ms("on demand"), slower.ms("floor"))
    near = ratio(slower.ms("floor"), slower.ms("foreload"))
    to_ceiling = (
        f"No rate is above the dense floor's, here {ceiling} of that of rows on demand; Foreload has {near} of the floor's."
    )
    processor = ratio(small.processor_ms("foreload"), small.processor_ms(small.in_memory))
    return [
        Claim(f"{samples}, small model", FASTER_IN_MEMORY, f">= 1.1{bound}", small.gain(small.in_memory), 1.1, note=small.note, by_bound=True),
        Claim("processor time a step, small model", FASTER_IN_MEMORY, "none", processor, note="Foreload's over theirs, its traffic included."),
        Claim(f"{samples}, Bagpipe's model", FASTER_IN_MEMORY, ">= 1.0", large.gain(large.in_memory), 1.0, note=large.note),
        Claim(above, FASTER_IN_MEMORY, f">= 2.0 x less{bound}", small.floor_gain(small.in_memory), 2.0, note=small.note, by_bound=True),
        Claim(above, "on demand", ">= 20 x less", slower.floor_gain("on demand"), 20),
        Claim(f"{samples}, small model", "on demand, redis-py with hiredis", ">= 5.6", own, 5.6, note=to_ceiling),
        Claim(f"{samples} of the dense floor, small model", "on demand, redis-py with hiredis", "none: it is the ceiling", ceiling),
        Claim(f"{samples}, small model", "the dense floor", "none", near),
        Claim(f"{samples}, small model", kept, ">= 1.25", slower.gain("LRU"), 1.25),
        Claim("waiting for rows", "its step time", "< 0.5 %", spread(waiting), most=0.005),
    ]  # fmt: skip


def arrivals(work: Workload, slots: Sequence[int]) -> tuple[list[Claim], Table, Series]:
    """Arrivals over the second schedule, beside the minimum and LRU."""
    rows: list[list[Cell]] = []
    lines: dict[str, list[Point]] = {"LRU": [], "Foreload": [], "Belady's minimum": []}
    claims: list[Claim] = []
    lookups = np.load(work.ids(work.second()), mmap_mode="r")
    total = int(work.bases[-1])
    for number in slots:
        tell(f"arrivals with {number:,} slots: the minimum and LRU")
        own = int(work.second(number).manifest["counts"]["arrivals"])
        least, lru = (count(lookups, number, total) for count in (minimum_arrivals, lru_arrivals))
        rows.append([number, own, least, f"{own / least:.6f}", lru, f"{lru / own:.3f}"])
        for line, value in (("LRU", lru), ("Foreload", own), ("Belady's minimum", least)):
            lines[line].append((number, value))
        over = f"arrivals over {len(lookups):,} steps"
        if number == SLOTS:
            claims.append(Claim(over, "an LRU cache of the same slots", ">= 1.5 x fewer", lru / own, 1.5))
        claims.append(Claim(f"{over}, {number:,} slots", "Belady's minimum", "<= 1.001", own / least, most=1.001))
    title = f"Arrivals over {len(lookups):,} steps, from an empty cache"
    table = Table(title, ["slots", "Foreload", "Belady's minimum", "ratio", "LRU", "LRU / Foreload"], rows)
    return claims, table, Series(title, "slots", "arrivals", "lines", lines)


def slot_table(contests: dict[int, Contest]) -> tuple[Table, Series]:
    """Throughput against slots."""
    rows: list[list[Cell]] = []
    lines: dict[str, list[Point]] = {"Foreload": [], "in memory": []}
    for number, contest in sorted(contests.items()):
        memory = contest.in_memory
        ours, theirs = (1000 * BATCH / statistics.median(contest.ms(contender)) for contender in ("foreload", memory))
        floor = 1000 * BATCH / statistics.median(contest.ms("floor"))
        rows.append([number, f"{contest.arrivals:,.0f}", ours, theirs, floor, str(contest.gain(memory))])
        lines["Foreload"].append((number, ours))
        lines["in memory"].append((number, theirs))
    columns = ["slots", "arrivals a step", "Foreload, samples/s", "in memory, samples/s", "dense floor, samples/s", "ratio"]
    title = "Throughput against slots, small model"
    return Table(title, columns, rows), Series(title, "slots", "samples/s", "lines", lines)


def loss_difference(contest: Contest) -> str:
    """How far the contenders' losses are apart: they train the same model."""
    apart = max(
        abs(own.loss - other.loss) / own.loss
        for own, other in zip(contest.answers["foreload"], contest.answers[contest.in_memory], strict=True)
    )
    return f"The losses of Foreload and of the tables in memory, at the last step of each run, differ by at most {apart:.1e} of them."


def contests(work: Workload, given: argparse.Namespace) -> tuple[Contest, list[Contest]]:
    """Both ways to have tables in memory, in a few rounds; then the small model beside the faster one, and beside what fetches late; and Bagpipe's.

    Where differences are small there are many short runs, of a schedule of their own.
    """
    until, quick = given.budget.until, given.quick
    second = work.second()
    few = Plan(3, 30, 8) if quick else Plan(4, 120, 15)
    both = contest(work, second, "small", ["floor", *IN_MEMORY, "foreload"], few)
    three = ["floor", both.in_memory, "foreload"]
    many = Plan(5, 30, 5) if quick else Plan(15 * given.pairs, 120, 8, until(0.45))
    small = contest(work, work.second(steps=many.end), "small", three, many)
    slow_ones = ["LRU", *ON_DEMAND[: 1 if quick else 2]]
    late = replace(few, pairs=given.pairs, until=until(0.57))
    slower = contest(work, second, "small", ["floor", "foreload", *slow_ones], late)
    slow = Plan(2, 6, 2, discarded=2) if quick else Plan(given.pairs, 12, 6, until(0.76))
    return both, [small, slower, contest(work, second, "Bagpipe's", three, slow)]


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(14, 3))
    until = given.budget.until
    work = Workload(given.out / "work", QUICK if given.quick else FULL)
    slots = [50_000, SLOTS] if given.quick else [50_000, 100_000, SLOTS, 400_000]
    both, (small, slower, large) = contests(work, given)
    tables = [
        step_table("Small model (bottom 13-64-32, top 64-1), second epoch: both ways to have tables in memory", both),
        step_table("Small model, second epoch: many short runs", small),
        step_table("Small model, second epoch: contenders that wait for their rows", slower),
        step_table("Bagpipe's model (bottom 13-512-256-64-32, top 1024-1024-1024-256-128-1), second epoch", large),
    ]
    three, short = list(small.answers), Plan(3, 30, 8) if given.quick else Plan(6, 120, 15)
    if not given.quick:
        epoch = contest(work, work.first, "small", three, replace(short, until=until(0.81)), first_epoch=True)
        tables.append(step_table("Small model, first epoch: new rows cost no request", epoch))
    arrival_claims, arrival_table, arrival_plot = arrivals(work, slots)
    by_slots = {SLOTS: small}
    for place, number in enumerate(others := [number for number in slots if number != SLOTS], 1):
        plan = replace(short, until=until(0.86 + 0.11 * place / len(others)))
        by_slots[number] = contest(work, work.second(number), "small", three, plan)
    slots_of, slots_plot = slot_table(by_slots)
    tables += [slots_of, arrival_table]
    notes = [
        describe(work),
        "Each contender is a process of its own; their runs alternate, and the first steps of each are not counted, since Foreload's traffic fetches "
        f"{LEAD} steps ahead while another contender has its run. In memory: the faster of one nn.Embedding (lookups sorted, gradients summed by "
        "embedding_bag, row-wise Adagrad by hand) and 26 nn.EmbeddingBag(sparse=True). On demand: redis-py's connections with commands under way "
        "on all shards at once, and beside it its clients' pipelines, one shard after the other. Processor time is that of the contender's process, "
        "Foreload's traffic included.",
        loss_difference(small),
    ]
    claims = [*step_claims(small, slower, large), *arrival_claims]
    settings = {
        "slots": SLOTS,
        "batch": BATCH,
        "rows in the store": work.rows,
        "discarded steps a run": DISCARDED,
        "pairs": small.pairs,
    }
    plots = [breakdown(small, slower, both), slots_plot, arrival_plot]
    save(Results("step", "Training steps", claims, tables, plots, settings, notes), given.out)


if __name__ == "__main__":
    main()
