"""Whether `train --auto` begins with a good size: each job's first choice from the profiles of the others, beside every size that was tried.

    python benchmarks/bench_warm_start.py [--quick] [--out DIR]

Jobs of several models differ in their batches, slots and skew; each is trained with every size for the same number of samples, in two rounds, and
the better time counts: in a quarter of an hour in which the machine is slower, a choice would seem wrong. What was trained stays in DIR/work: called
again, it goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_auto import TRAIN, command
from comparison import Cell, Claim, Results, Table, arguments, save, tell
from foreload.trainer.cli import parser
from foreload.trainer.command_line.training import job_values
from foreload.trainer.commands.warm_start import started
from foreload.trainer.run import history

SIZES = ((1, 1), (1, 2), (2, 1), (2, 2))  # trainers, shards
LANES = 4
MODELS = (
    "--dim 8",
    "--dim 32",
    "--dim 16 --model-options bottom=512-256-16 top=512-256-1",
    "--model deepfm --dim 16",
    "--model dcn --dim 16",
)
BATCHES, VALUES = (512, 1024, 4096), (2_000, 100_000)  # samples, and distinct values of a column
SAMPLES, QUICK_SAMPLES = 240_000, 40_000
ROUNDS = 2
MEDIAN, WORST = 0.9, 0.75


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the history. model: words of `train`; batch, values: of its schedule."""

    model: str
    batch: int
    values: int

    @property
    def schedule(self) -> str:
        """The name of its schedule's folder."""
        return f"clicks-{self.batch}-{self.values}"


class Trained:
    """All jobs with all sizes. folder: where schedules, histories and times are."""

    def __init__(self, folder: Path, samples: int, rounds: int, jobs: Sequence[Job]) -> None:
        self._folder, self._samples, self.jobs = folder, samples, jobs
        self._times = folder / f"times-{samples}.jsonl"
        self._seconds: dict[tuple[int, tuple[int, int]], list[float]] = {
            of: [] for of in itertools.product(range(len(jobs)), SIZES)
        }
        for one in map(json.loads, self._times.read_text().splitlines() if self._times.exists() else ()):
            self._seconds[one["job"], tuple(one["size"])].append(one["seconds"])
        for of_round in range(rounds):
            for (number, size), seconds in self._seconds.items():
                if len(seconds) == of_round:
                    self._train(number, size)

    def seconds(self, number: int, size: tuple[int, int]) -> float:
        """The best time of a job with a size."""
        return min(self._seconds[number, size])

    def history(self, number: int) -> Path:
        """The history of one job."""
        return self._folder / f"history-{self._samples}-{number}.sqlite"

    def _prepared(self, job: Job) -> Path:
        schedule = self._folder / f"{job.schedule}-{self._samples}"
        if not schedule.exists():
            words = f"prepare --format synthetic --rows {self._samples} --values {job.values} --batch-size {job.batch} --lanes {LANES} --slots 20000"
            command(*words.split(), "--out", str(schedule))
        return schedule

    def _train(self, number: int, size: tuple[int, int]) -> None:
        job, run = self.jobs[number], self._folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        words = ["train", str(self._prepared(job)), "--run", str(run), "--no-report", "--parity", "off", *job.model.split()]
        words += ["--trainers", str(size[0]), "--store", f"local:{size[1]}", "--history", str(self.history(number))]
        done = subprocess.run([*TRAIN, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr.strip()[-2000:])
        summary = json.loads((run / "summary.json").read_text())
        seconds = summary["samples"] / summary["samples_per_second"]
        self._seconds[number, size].append(seconds)
        with self._times.open("a", encoding="utf-8") as times:
            times.write(json.dumps({"job": number, "size": size, "seconds": seconds}) + "\n")
        tell(f"{job}: {size[0]} trainers, {size[1]} shards: {seconds:.2f} s")

    def chosen(self, number: int) -> tuple[int, int]:
        """The size with which --auto would begin a job, given the profiles of all others."""
        job, others = self.jobs[number], self._folder / "others.sqlite"
        others.unlink(missing_ok=True)
        for other in range(len(self.jobs)):
            if other != number:
                for profile in history.read(self.history(other)):
                    history.add(others, profile)
        words = [
            "train",
            str(self._prepared(job)),
            "--run",
            str(self._folder / "chosen"),
            "--history",
            str(others),
            *job.model.split(),
        ]
        words += ["--auto", "--pool", f"cores={SIZES[-1][0]},stores={SIZES[-1][1]}"]
        with contextlib.redirect_stderr(io.StringIO()):
            begins = started(job_values(parser().parse_args(words)))
        return int(begins.get("trainers", 1)), int(str(begins["store"]).removeprefix("local:"))


def jobs(quick: bool) -> Iterator[Job]:
    """The jobs; a few with --quick."""
    models, batches = (MODELS[:1], BATCHES) if quick else (MODELS, BATCHES)
    for model, batch, values in itertools.product(models, batches, VALUES[:1] if quick else VALUES):
        yield Job(model, batch, values)


def measure(given: argparse.Namespace) -> None:
    """Train all, choose for each, and compare."""
    work = given.out / "work" / "warm-start"
    work.mkdir(parents=True, exist_ok=True)
    rounds = 1 if given.quick else ROUNDS
    trained = Trained(work, QUICK_SAMPLES if given.quick else SAMPLES, rounds, list(jobs(given.quick)))
    shares, rows = list[float](), list[list[Cell]]()
    smallest = list[float]()
    for number, job in enumerate(trained.jobs):
        of = {size: trained.seconds(number, size) for size in SIZES}
        best, size = min(of, key=lambda one: of[one]), trained.chosen(number)
        shares.append(of[best] / of[size])
        smallest.append(of[best] / of[SIZES[0]])
        rows.append([f"{job.model}, batch {job.batch}, {job.values} values", *of.values(), f"{size[0]}, {size[1]}", shares[-1]])
    against = "the fastest size tried"
    claims = [
        Claim("speed of the first choice, median", against, f">= {MEDIAN}", statistics.median(shares), least=MEDIAN),
        Claim("speed of the first choice, worst", against, f">= {WORST}", min(shares), least=WORST),
        Claim("speed of one trainer and one shard, median", against, "-", statistics.median(smallest)),
        Claim("speed of one trainer and one shard, worst", against, "-", min(smallest)),
    ]
    head = ["job", *(f"{trainers} trainers, {shards} shards, s" for trainers, shards in SIZES), "chosen", "speed"]
    note = (
        f"{len(trained.jobs)} jobs of {trained._samples:,} samples, {LANES} lanes, the best of {rounds} times; each is left out of the history that "
        "its size is chosen from."
    )
    save(
        Results("warm_start", "The size that a job begins with", claims, [Table("Seconds", head, rows)], notes=[note]), given.out
    )


if __name__ == "__main__":
    measure(arguments(__doc__, pairs=(1, 1)))
