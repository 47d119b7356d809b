"""`train --auto` beside every fixed number of trainers and store shards, with servers behind slow links.

    python benchmarks/bench_auto.py [--quick] [--out DIR]

Needs root: every server has a network namespace, and a link that tc's token bucket filter holds to 50 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench_links import Unavailable
from comparison import Cell, Claim, Results, Table, arguments, save, tell
from foreload.pipelines.schedule.reader import Schedule
from store_links import StoreLinks

MEGABITS = 50.0
TRAINERS, SHARDS = 2, 4
BATCH, LANES, SLOTS = 2048, 4, 20_000
ROWS, QUICK_ROWS = 5_000_000, 500_000
TRAIN = (sys.executable, "-m", "foreload")
BEST = "the best fixed size"


@dataclass(frozen=True, slots=True)
class Ran:
    """A run.

    Attributes:
        seconds: from the first step to the last.
        later: the same from the first quarter's end on.
        longest: the longest step in that time.
        adjusted: the changes that --auto made.
    """

    seconds: float
    later: float
    longest: float
    digest: str
    adjusted: int


def prepared(folder: Path, rows: int) -> Path:
    """The schedule that all runs train; it is kept for the next call."""
    schedule = folder / f"schedule-{rows}"
    if not schedule.exists():
        words = ["prepare", "--format", "synthetic", "--rows", str(rows), "--batch-size", str(BATCH), "--lanes", str(LANES)]
        command(*words, "--slots", str(SLOTS), "--out", str(schedule), "--overwrite")
    return schedule


def command(*words: str) -> str:
    """Run a command of foreload, and return what it prints."""
    done = subprocess.run([sys.executable, "-m", "foreload", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"foreload {' '.join(words)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


class Runs:
    """Runs of one schedule, each of which starts with empty servers."""

    def __init__(self, links: StoreLinks, schedule: Path, folder: Path) -> None:
        self.links, self.schedule, self.folder = links, schedule, folder
        self.steps = int(Schedule(schedule).manifest["counts"]["training_steps"])

    def run(
        self,
        name: str,
        trainers: int,
        shards: int,
        *further: str,
        parity: str = "off",
        at_step: tuple[int, Callable[[], None]] | None = None,
    ) -> Ran:
        """Train from the beginning to the end.

        Args:
            at_step: a step, and what is done once after it.
        """
        self.links.empty()
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        words = [*TRAIN, "train", str(self.schedule), "--run", str(run), "--no-report", "--digest"]
        words += [
            "--store",
            ",".join(self.links.urls[:shards]),
            "--parity",
            parity,
            "--trainers",
            str(trainers),
            "--history",
            "off",
            *further,
        ]
        with (self.folder / f"{name}.log").open("wb") as said:
            process = subprocess.Popen(words, stdout=said, stderr=said)
            times = self._times(process, run / "metrics.jsonl", at_step)
        if process.wait():
            raise SystemExit((self.folder / f"{name}.log").read_text()[-2000:])
        summary = json.loads((run / "summary.json").read_text())
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        longest = max(of["ms"] for of in steps if of["kind"] == "step" and of["step"] >= self.steps // 4) / 1000
        adjusted = sum(event["kind"] == "adjusted" for event in events)
        return Ran(times[-1] - times[0], times[-1] - times[1], longest, summary["digest"], adjusted)

    def _times(
        self, process: subprocess.Popen[bytes], metrics: Path, at_step: tuple[int, Callable[[], None]] | None
    ) -> tuple[float, float, float]:
        """When the first step, the first quarter's last step, and the last step had ended."""
        marks = {1: 0.0, self.steps // 4: 0.0, self.steps: 0.0}
        done = 0
        while process.poll() is None and done < self.steps:
            time.sleep(0.02)
            done = metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else 0
            for step, at in marks.items():
                if done >= step and not at:
                    marks[step] = time.monotonic()
            if at_step is not None and done >= at_step[0]:
                at_step[1]()
                at_step = None
        first, quarter, last = marks.values()
        return first, quarter, last or time.monotonic()


def auto(links: StoreLinks, shards: int) -> Sequence[str]:
    """The settings of --auto, with the servers that are left as spares."""
    spares = ("--spare", ",".join(links.urls[shards:])) if shards < SHARDS else ()
    return (*spares, "--auto", "--pool", f"cores={TRAINERS},stores={SHARDS}")


def measure(given: argparse.Namespace, links: StoreLinks) -> None:
    """All fixed sizes, --auto from the smallest and from the best, and the same where links slow down at half time."""
    work = given.out / "work"
    runs = Runs(links, prepared(work, QUICK_ROWS if given.quick else ROWS), work)
    sizes = [(trainers, shards) for trainers in range(1, TRAINERS + 1) for shards in range(1, SHARDS + 1)]
    ran: dict[str, Ran] = {}

    def all_links(megabits: float) -> None:
        for server in range(SHARDS):
            links.limit(server, megabits)

    def run(name: str, size: tuple[int, int], *further: str, slows: bool = False) -> Ran:
        all_links(MEGABITS)
        halves = (runs.steps // 2, lambda: all_links(MEGABITS / 2))
        ran[name] = runs.run(f"run-{len(ran)}", *size, *further, at_step=halves if slows else None)
        tell(f"{name}: {ran[name]}")
        return ran[name]

    def beside_best(begun: tuple[int, int], slows: bool = False) -> tuple[Ran, Ran]:
        """The best fixed size and then --auto, one right after the other, since the machine's own speed varies."""
        links_do = ", links slow down" if slows else ""
        auto_name = f"--auto from {begun[0]} trainers, {begun[1]} shards{links_do}"
        fixed_one = run(f"{best[0]} trainers, {best[1]} shards, before {auto_name}", best, slows=slows)
        return fixed_one, run(auto_name, begun, *auto(links, begun[1]), slows=slows)

    fixed = {size: run(f"{size[0]} trainers, {size[1]} shards", size) for size in sizes}
    best = min(fixed, key=lambda size: fixed[size].seconds)
    of_small, small = beside_best((1, 1))
    of_good, good = beside_best(best)
    of_slower, slower = beside_best((1, 1), slows=True)
    claims = [
        Claim("speed after the first quarter, from 1 trainer, 1 shard", BEST, ">= 0.9", of_small.later / small.later, least=0.9),
        Claim("speed over the whole run, from 1 trainer, 1 shard", BEST, ">= 0.8", of_small.seconds / small.seconds, least=0.8),
        Claim("speed from the best fixed size", BEST, ">= 0.97", of_good.seconds / good.seconds, least=0.97),
        Claim("changes from the best fixed size", "-", "0", float(good.adjusted), most=0.0),
        Claim("speed after the first quarter, links slow down", BEST, ">= 0.9", of_slower.later / slower.later, least=0.9),
        Claim("digests", "-", "1", float(len({of.digest for of in ran.values()})), most=1.0),
    ]
    rows: list[list[Cell]] = [[name, of.seconds, of.later, of.adjusted] for name, of in ran.items()]
    table = Table("Seconds", ["run", "from the first step", "after the first quarter", "changes"], rows)
    note = (
        f"{runs.steps:,} steps of {BATCH:,} synthetic samples, {LANES} lanes of {SLOTS:,} slots, parity off; every server is behind a link of "
        f"{MEGABITS:g} Mbit/s in each direction; links that slow down have half of it from half of the steps on."
    )
    save(Results("auto", "Resources that adjust themselves", claims, [table], notes=[note]), given.out)


def measure_behind_links(
    doc: str | None, servers: int, megabits: float, measure: Callable[[argparse.Namespace, StoreLinks], None]
) -> None:
    """Call a script's `measure` with its arguments and so many servers, each behind a link; or say why that is not possible here.

    Args:
        doc: what the script says of itself.
        megabits: of each link and direction, a second.
    """
    given = arguments(doc, pairs=(1, 1))
    (given.out / "work").mkdir(parents=True, exist_ok=True)
    try:
        links = StoreLinks(servers, given.out / "work", megabits)
    except Unavailable as error:
        tell(f"skipped: {error}")
        return
    with closing(links):
        measure(given, links)


if __name__ == "__main__":
    measure_behind_links(__doc__, SHARDS, MEGABITS, measure)
