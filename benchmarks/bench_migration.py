"""Rows that move to another store shard while a run trains: a shard whose link drops to a tenth, and what moving costs a step.

python benchmarks/bench_migration.py [--quick] [--out DIR] [--pairs N] [--minutes M]

Needs root: see bench_links.py. One of three servers is behind a link of its own; a quarter into the run that drops to a tenth. `stores move` has a
spare take the shard's rows while the run trains; or `stores replace` does, which leaves the slow server at once; or the run is stopped, the shard
moved, and the run goes on; or nothing is done, for 1.6 times what `stores move` took at most. Whole runs each, of five minutes where no link
drops; a full round takes some forty minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench_links import Link, Unavailable, listen
from comparison import Cell, Claim, Ratio, Results, Table, alternate, arguments, save, spread, tell
from foreload.cache.client.local import LocalStores
from workload import BATCH, SEED

TRAINERS, PARITY = 1, "2+1"
PORT = 7100
TITLE = "Rows that move while a run trains"
REST_STEPS = 200  # between two moves; those without are compared with those while rows move
MOST_STEP = 1.1  # times a step without
SLOW_SHARD, SPARE = 2, 3
NORMAL_USE = 1 / 3  # of the slow shard's link, before it drops: a tenth of it is then less than training asks for
DROP = 10
GAP_SECONDS, GAP_STEPS = 0.5, 5
POLL_SECONDS = 0.05
WARM_UP = 20  # steps that no median counts
WAYS = MOVE, REPLACE, STOP, NOTHING = "stores move", "stores replace", "stop, move, resume", "nothing is done"
PATIENCE = 1.6  # times what the move took, until a run is given up in which nothing is done


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run went. seconds: from the start of its first call to the end of its last; ms: of each step; moving: the steps while rows moved; digest:
    None where it was given up before its end.
    """

    seconds: float
    ms: Sequence[float]
    quarter: int
    moving: range
    digest: str | None

    @property
    def gap(self) -> float:
        """The longest step from the quarter on, in seconds."""
        return max(self.ms[self.quarter :]) / 1000

    def median(self, steps: range) -> float:
        """ms of a step, the median of these."""
        return statistics.median([self.ms[step] for step in steps]) if len(steps) else float("nan")


class Runs:
    """Runs of one schedule on three servers, one of them behind a link, and a spare."""

    def __init__(self, folder: Path, schedule: Path, link: Link) -> None:
        self.folder, self.schedule, self.link = folder, schedule, link

    @contextmanager
    def servers(self, name: str) -> Iterator[list[str]]:
        """The URLs of three servers and of a spare, all empty."""
        near = LocalStores(3, self.folder / name / "near")
        with near, self.link.far(), LocalStores(1, self.folder / name / "far") as far, self.link.near():
            behind = listen(far.urls, PORT)[0]
            urls = list(near.urls)
            yield [*urls[:SLOW_SHARD], behind, urls[SLOW_SHARD]]

    def call(self, *words: str) -> None:
        """A command of Foreload's; SystemExit where it fails."""
        done = subprocess.run([sys.executable, "-m", "foreload.trainer.cli", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"foreload {' '.join(words)}: {done.stderr.strip()}")

    def new(self, name: str) -> Path:
        """The folder of a run that is to begin: what an earlier call left there says nothing of this one."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name

    def start(self, run: Path, *more: str) -> subprocess.Popen[bytes]:
        """Training begins, or goes on."""
        words = [sys.executable, "-m", "foreload.trainer.cli", "train", str(self.schedule), "--run", str(run), "--history", "off"]
        log = (self.folder / f"{run.name}.log").open("ab")
        return subprocess.Popen([*words, *more], stdout=log, stderr=log)

    def until(self, training: subprocess.Popen[bytes], run: Path, step: int) -> None:
        """Wait until a step is through; SystemExit where the training ends before."""
        told = Lines(run / "metrics.jsonl")
        while not any(record["kind"] == "step" and record["step"] >= step for record in told.more()):
            if training.poll() is not None:
                raise SystemExit(f"{run.name}: ended before step {step}; see {self.folder / run.name}.log")
            time.sleep(POLL_SECONDS)

    def moves(self, run: Path, training: subprocess.Popen[bytes], *words: str) -> range:
        """Have rows moved while a run trains: the steps from when trainers are told to when all is there."""
        told = Lines(run / "events.jsonl")
        told.more()
        self.call("stores", words[0], str(run), *words[1:])
        steps: dict[str, int] = {}
        while "rows-moved" not in steps and training.poll() is None:
            steps |= {event["kind"]: event["step"] for event in told.more()}
            time.sleep(POLL_SECONDS)
        return range(steps["rows-move"], steps.get("rows-moved", len(steps_of(run))))

    def beside(self, quick: bool, number: int) -> dict[str, tuple[range, float]]:
        """A run whose shards are added, removed and moved one after the other, links as they are: of each, the steps meanwhile, and their time, of
        those right before and after. number: of the run.
        """
        run = self.new(f"beside-{number}")
        rest = REST_STEPS // 5 if quick else REST_STEPS
        with LocalStores(6, self.folder / f"beside-{number}-servers") as servers:
            store = ",".join(servers.urls[:3])
            new = ("--store", store, "--parity", PARITY, "--trainers", str(TRAINERS), "--dim", "16", "--overwrite")
            training = self.start(run, *new)
            told: dict[str, tuple[int, range]] = {}
            try:
                self.until(training, run, WARM_UP + rest)
                for words in (("add", *servers.urls[3:5]), ("remove", "1"), ("move", "0", servers.urls[5])):
                    asked = len(steps_of(run))
                    moving = self.moves(run, training, *words)
                    told[f"stores {words[0]}"] = asked, moving
                    self.until(training, run, moving.stop + rest)
                training.send_signal(signal.SIGINT)
                training.wait()
            finally:
                if training.poll() is None:
                    training.kill()
                    training.wait()
            ms = steps_of(run)
        ratios = {}
        for name, (asked, moving) in told.items():
            # Without those during which the command itself starts, which takes a processor here that trainers want.
            about = [*range(max(asked - rest, WARM_UP), asked), *range(moving.stop, min(moving.stop + rest, len(ms)))]
            ratios[name] = moving, statistics.median(ms[at] for at in moving) / statistics.median(ms[at] for at in about)
        return ratios

    def train(self, way: str, megabits: float, quarter: int, number: int = 0, patience: float = math.inf) -> Ending:
        """One run. way: one of WAYS, or "fast link" where it does not drop; number: of the runs of that way; patience: seconds it may take."""
        run = self.new(f"{way.replace(' ', '-').replace(',', '')}-{number}")
        with self.servers(f"{run.name}-servers") as urls:
            spare = urls.pop(SPARE)
            self.link.limit(megabits)
            begun = time.monotonic()
            new = ("--store", ",".join(urls), "--parity", PARITY, "--trainers", str(TRAINERS), "--dim", "16", "--overwrite")
            training = self.start(run, *new)
            moving = range(0)
            try:
                self.until(training, run, quarter)
                if way != "fast link":
                    self.link.limit(megabits / DROP)
                if way == MOVE:
                    moving = self.moves(run, training, "move", str(SLOW_SHARD), spare)
                elif way == REPLACE:
                    self.call("stores", "replace", str(run), str(SLOW_SHARD), spare)
                elif way == STOP:
                    training.send_signal(signal.SIGINT)
                    training.wait()
                    self.call("stores", "move", str(run), str(SLOW_SHARD), spare)
                    training = self.start(run, "--resume")
                with suppress(subprocess.TimeoutExpired):
                    if training.wait(begun + patience - time.monotonic()):
                        raise SystemExit(f"{run.name}: failed; see {self.folder / run.name}.log")
            finally:
                given_up = training.poll() is None
                if given_up:
                    training.kill()
                    training.wait()
            seconds = time.monotonic() - begun
            if given_up:
                return Ending(seconds, steps_of(run), quarter, moving, None)
            self.link.limit(megabits)
            done = subprocess.run(
                [sys.executable, "-m", "foreload.trainer.cli", "digest", str(run)], capture_output=True, text=True, check=True
            )
            return Ending(seconds, steps_of(run), quarter, moving, done.stdout.strip())


class Lines:
    """The lines of a file of JSON, which grows; one that is being written counts later. So little is done meanwhile, beside what is measured."""

    def __init__(self, file: Path) -> None:
        self.file, self._read = file, 0

    def more(self) -> list[Mapping[str, Any]]:
        """What has come since the last time."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]


def steps_of(run: Path) -> list[float]:
    """ms of each step that a run has told of."""
    return [record["ms"] for record in Lines(run / "metrics.jsonl").more() if record["kind"] == "step"]


@dataclass(frozen=True, slots=True)
class Samples:
    """Made-up samples, epochs over them, and slots."""

    rows: int
    values: int
    epochs: int
    slots: int


# Few slots, so that rows go to and fro in every step; and a run of five minutes whose slots hold nine tenths of its rows.
BESIDE, QUICK_BESIDE = Samples(400_000, 20_000, 24, 40_000), Samples(100_000, 20_000, 40, 40_000)
BEHIND, QUICK_BEHIND = Samples(1_000_000, 300_000, 52, 720_000), Samples(100_000, 60_000, 40, 60_000)


def prepare(out: Path, samples: Samples) -> Path:
    """A schedule over these."""
    if not (out / "schedule.json").exists():
        tell(f"preparing {samples.epochs} epochs of {samples.rows:,} samples: {out}")
        given = ["--format", "synthetic", "--rows", str(samples.rows), "--values", str(samples.values)]
        given += ["--epochs", str(samples.epochs), "--slots", str(samples.slots)]
        command = [sys.executable, "-m", "foreload.pipelines.prepare", *given, "--seed", str(SEED), "--batch-size", str(BATCH)]
        subprocess.run([*command, "--out", str(out)], stdout=subprocess.DEVNULL, check=True)
    return out


def compared(runs: Runs, given: argparse.Namespace, megabits: float, quarter: int) -> dict[str, list[Ending]]:
    """All ways in turn, each as often as the time allows."""
    endings: dict[str, list[Ending]] = {way: [] for way in WAYS}

    def run(way: str) -> float:
        known = max((moved.seconds for moved in endings[MOVE]), default=math.inf)
        patience = PATIENCE * known if way == NOTHING else math.inf
        endings[way].append(runs.train(way, megabits, quarter, len(endings[way]), patience))
        return endings[way][-1].seconds

    alternate({way: partial(run, way) for way in WAYS}, given.pairs, given.budget.until(0.97), 1)
    return endings


def claims_of(ways: Mapping[str, Sequence[Ending]], beside: Mapping[str, Sequence[float]], quarter: int) -> list[Claim]:
    """What the rounds say, as medians over them; the longest step is that of all."""
    moved = ways[MOVE]
    step = statistics.median(of.median(range(WARM_UP, quarter)) for of in moved) / 1000
    most = max(GAP_SECONDS, GAP_STEPS * step)

    def saved(other: str) -> Ratio:
        return spread([1 - of.seconds / beside_it.seconds for of, beside_it in zip(moved, ways[other], strict=True)])

    gaps = ", ".join(f"{1000 * of.gap:.0f}" for of in moved)
    return [
        Claim("time in all that stores move saves", NOTHING, ">= 0.36", saved(NOTHING), least=0.36),
        Claim("time in all that stores move saves", STOP, ">= 0.27", saved(STOP), least=0.27),
        Claim("longest step from the drop on, s", MOVE, "<= 0.5, or 5 steps where these are longer", max(of.gap for of in moved), most=most,
              note=f"Of each run, ms: {gaps}."),
        *(
            Claim(f"step time while rows move, median, {name}", "steps before and after", f"<= {MOST_STEP}", spread(ratios), most=MOST_STEP)
            for name, ratios in beside.items()
        ),
    ]  # fmt: skip


def way_table(ways: Mapping[str, Sequence[Ending]], quarter: int, note: str) -> Table:
    """A line for every way, medians of its runs."""
    rows: list[list[Cell]] = []
    for way, endings in ways.items():
        after = [of.median(range(max(of.moving.stop, quarter), len(of.ms))) for of in endings]
        rows.append([
            way, f"{'' if endings[0].digest else '> '}{statistics.median(of.seconds for of in endings):.1f}", *(
                "-" if math.isnan(values[0]) else f"{statistics.median(values):.1f}"
                for values in ([of.median(range(WARM_UP, quarter)) for of in endings], [of.median(of.moving) for of in endings], after)
            ),
            f"{1000 * max(of.gap for of in endings):.0f}", round(statistics.median(len(of.moving) for of in endings)), len(endings),
        ])  # fmt: skip
    columns = [
        "",
        "s in all",
        "ms a step before",
        "while rows move",
        "afterwards",
        "longest step of all, ms",
        "steps while rows moved",
        "runs",
    ]
    told = "Medians over the runs; all digests are equal. A time with > is that of a run that was given up."
    return Table("A shard whose link drops to a tenth", columns, rows, f"{note} {told}")


def measure(given: argparse.Namespace, link: Link) -> None:
    """All ways, and the claims."""
    folder = (given.out / "work" / ("migration-quick" if given.quick else "migration")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    beside_runs = Runs(folder, prepare(folder / "beside", QUICK_BESIDE if given.quick else BESIDE), link)
    beside: dict[str, list[float]] = {}
    for number in range(given.pairs):
        if number and time.monotonic() > given.budget.until(0.15):
            break
        for name, (moving, over) in beside_runs.beside(given.quick, number).items():
            tell(f"{name}: {len(moving)} steps meanwhile, {over:.3f} x others")
            beside.setdefault(name, []).append(over)
    samples = QUICK_BEHIND if given.quick else BEHIND
    schedule = prepare(folder / "behind", samples)
    steps = json.loads((schedule / "schedule.json").read_text())["counts"]["training_steps"]
    quarter = steps // 4
    runs = Runs(folder, schedule, link)
    before = sum(link.bytes_passed())
    fast = runs.train("fast link", 10_000, quarter)
    # Both ways together, less than what the busier one takes twice.
    per_second = (sum(link.bytes_passed()) - before) / 2 * 8 / (sum(fast.ms) / 1000)
    megabits = round(per_second / 1e6 / NORMAL_USE, 1)
    tell(f"the link: {megabits:g} Mbit/s, a tenth from step {quarter} on")
    ways = compared(runs, given, megabits, quarter)
    digests = {ending.digest for ending in (fast, *(ending for endings in ways.values() for ending in endings))} - {None}
    if len(digests) != 1:
        raise SystemExit(f"the digests differ: {', '.join(map(str, digests))}")
    note = (
        f"{steps:,} steps, {samples.slots:,} slots; the link of one of three shards ({PARITY}) drops from {megabits:g} to {megabits / DROP:g} Mbit/s "
        f"after step {quarter}."
    )
    table = way_table({"the link does not drop": [fast], **ways}, quarter, note)
    settings = {"rounds": len(ways[MOVE]), "runs beside training": len(next(iter(beside.values())))}
    claims = claims_of(ways, beside, quarter)
    save(Results("migration", TITLE, claims, [table], settings=settings, notes=[note]), given.out)


def main() -> None:
    """Measure, print, save."""
    given = arguments(__doc__, pairs=(3, 1))
    try:
        link = Link()
    except Unavailable as error:
        tell(f"skipped: {error}")
        note = f"not measured: {error}"
        claim = Claim("time in all that stores move saves", "nothing is done", ">= 0.36", None, least=0.36, note=note)
        save(Results("migration", TITLE, [claim], notes=[note]), given.out)
        return
    try:
        measure(given, link)
    finally:
        link.close()


if __name__ == "__main__":
    main()
