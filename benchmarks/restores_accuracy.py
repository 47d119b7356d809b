"""What restores from checkpoints of few bits do to log loss and AUC, against trainings without any, paired by seed.

    python benchmarks/restores_accuracy.py [--seeds N] [--restores N ...] [--last 0.95] [--out FILE.jsonl] [--check-only | --report-only]

Trained is the reference workload's small model on synthetic Criteo-shaped samples, in memory (memory_training.py), each seed on samples and with
initial values of its own; all are evaluated on the same samples, which none has trained on. R restores come at even distances, up to R / (R + 1) of
the training or where --last says. First it is shown that a restore in memory gives the digest of a real one: servers, `--checkpoint-bits`,
`train --from`.

A line of FILE is a training; those that are there are not done again, so a call that was ended goes on where it was. A seed's trainings share what
they have in common: each branches off the one without restores where its first one comes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foreload.trainer.compute import numerics

# Before torch is imported, as in every trainer.
numerics.set_environment()

import foreload  # noqa: E402
from comparison import tell  # noqa: E402
from foreload.pipelines import prepare  # noqa: E402
from foreload.pipelines.samples.features import CRITEO_CATEGORICAL, CRITEO_DENSE, KAGGLE_ROWS  # noqa: E402
from foreload.pipelines.schedule.reader import Schedule  # noqa: E402
from foreload.pipelines.sources.synthetic import Generator  # noqa: E402
from foreload.trainer.checkpoints.files import EXACT_BITS, WIDTHS, bits_for  # noqa: E402
from foreload.trainer.job.job import TrainJob  # noqa: E402
from memory_training import Kept, MemoryTraining, batches  # noqa: E402
from workload import BATCH, SEED, job  # noqa: E402

RESTORES = (1, 3, 20)
MOST_ROWS = 50_000
"""Of a table: 460,000 rows in all. Of Criteo's largest columns most values are so rare that users drop them."""

EVALUATION_SAMPLES = 1_000_000  # the first ones of the data; trainings take those behind them
MODEL = "small"
BAR = 0.01  # per cent of the log loss, that `--bits auto` is to stay below
CHECK_BATCH, CHECK_STEPS, CHECK_RESTORES = 256, 60, (19, 39)
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)  # by seeds - 2


@dataclass(frozen=True, slots=True)
class Restores:
    """How often, and at which part of the training for the last time; None: R / (R + 1)."""

    count: int
    last: float | None = None

    def __str__(self) -> str:
        return str(self.count) if self.last is None else f"{self.count}, the last at {self.last:.0%}"

    def steps(self, of: int) -> list[int]:
        """After which steps, numbered from 0, of a training of so many."""
        last = self.count / (self.count + 1) if self.last is None else self.last
        return [int(of * last * number / self.count + 1e-6) - 1 for number in range(1, self.count + 1)]


Key = tuple[int, int, Restores]
"""Seed, bits (32 without restores), restores."""

NONE = Restores(0)


@dataclass(frozen=True, slots=True)
class Trained:
    """A line of the file: a training and what its evaluation says. steps, batch: how many, and of how many samples each; seconds: that it took."""

    seed: int
    bits: int
    restores: int
    steps: int
    batch: int
    row_optimizer: str
    log_loss: float
    auc: float
    digest: str
    seconds: float
    last: float | None = None

    @property
    def key(self) -> Key:
        """Which one it is."""
        return self.seed, self.bits, Restores(self.restores, self.last)


def write_features(path: Path) -> list[int]:
    """The feature file: ids and dense values as they are made, each column with a table of its own. Returns the tables' rows."""
    sizes = [min(rows, MOST_ROWS) for rows in KAGGLE_ROWS]
    lines = ['label = "label"', *(f'[[dense]]\nname = "{name}"\ntransform = "none"' for name in CRITEO_DENSE)]
    for name, rows in zip(CRITEO_CATEGORICAL, sizes, strict=True):
        lines.append(f'[[feature]]\nname = "{name}"\nencoding = "id"\nrows = {rows}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sizes


def prepared(folder: Path) -> tuple[Schedule, Generator]:
    """A small schedule of the check's samples, the first ones, whose header says what the columns and tables are; and the data."""
    sizes = write_features(folder / "features.toml")
    given = f"--format synthetic --rows {CHECK_STEPS * CHECK_BATCH} --seed {SEED} --batch-size {CHECK_BATCH} --slots 20000"
    prepare.run([*given.split(), "--features", str(folder / "features.toml"), "--out", str(folder / "schedule")])
    return Schedule(folder / "schedule"), Generator(SEED, tuple(sizes))


def digest_in_memory(schedule: Schedule, generator: Generator, bits: int, row_optimizer: str) -> str:
    """Of the check's training, restored twice in memory."""
    training = MemoryTraining(TrainJob.of(job(schedule.path, MODEL, row_optimizer=row_optimizer)), schedule)
    for batch in batches(generator, training.bases, 0, CHECK_STEPS * CHECK_BATCH, CHECK_BATCH):
        training.train(batch)
        if training.step in CHECK_RESTORES:
            # What else is tried on the way leaves no trace.
            kept = training.keep()
            training.restore(2)
            training.train(batch)
            training.go_back(kept)
            training.restore(bits)
    return training.digest()


def digest_of_runs(schedule: Schedule, folder: Path, bits: int, row_optimizer: str) -> str:
    """Of the check's training with a store of three shards: two runs whose checkpoints the next one is made of, and that one."""
    checkpoint: Path | None = None
    for number, step in enumerate(CHECK_RESTORES):
        run = folder / f"{row_optimizer}-{bits}-{number}"
        settings = _settings(schedule, row_optimizer, run, checkpoint)
        foreload.train(**settings, checkpoint_every=step + 1, checkpoint_bits=bits, keep=9)
        checkpoint = run / "checkpoints" / f"step-{step}"
    run = folder / f"{row_optimizer}-{bits}-last"
    return str(foreload.train(**_settings(schedule, row_optimizer, run, checkpoint), digest=True).summary.digest)


def _settings(schedule: Schedule, row_optimizer: str, run: Path, checkpoint: Path | None) -> dict[str, Any]:
    settings = job(schedule.path, MODEL, row_optimizer=row_optimizer, store="local:3", run=str(run), namespace=run.name)
    return settings | ({} if checkpoint is None else {"from_checkpoint": str(checkpoint)})


def check(schedule: Schedule, generator: Generator, folder: Path, widths: Sequence[int], row_optimizer: str) -> None:
    """Show that restores in memory give the digest of real ones. Raises SystemExit where they do not."""
    for bits in widths:
        real, made = (
            digest_of_runs(schedule, folder, bits, row_optimizer),
            digest_in_memory(schedule, generator, bits, row_optimizer),
        )
        tell(f"restored twice from {bits} bits, {row_optimizer}: digest {real[:16]} with a store, {made[:16]} in memory")
        if real != made:
            raise SystemExit("restores in memory do not give the digest of real ones")


class Seed:
    """The trainings of a seed: on samples of its own, with initial values of its own."""

    def __init__(self, seed: int, steps: int, row_optimizer: str, schedule: Schedule, generator: Generator) -> None:
        self._seed, self._steps, self._row_optimizer, self._generator = seed, steps, row_optimizer, generator
        self._training = MemoryTraining(TrainJob.of(job(schedule.path, MODEL, seed=seed, row_optimizer=row_optimizer)), schedule)

    def _train(self, last: int) -> None:
        """From where it is up to a step."""
        begin = EVALUATION_SAMPLES + self._seed * self._steps * BATCH
        first, end = begin + (self._training.step + 1) * BATCH, begin + (last + 1) * BATCH
        for batch in batches(self._generator, self._training.bases, first, end, BATCH):
            self._training.train(batch)

    def _evaluated(self, bits: int, restores: Restores, begun: float) -> Trained:
        samples = batches(self._generator, self._training.bases, 0, EVALUATION_SAMPLES, BATCH)
        log_loss, auc = self._training.evaluate(samples)
        return Trained(
            self._seed, bits, restores.count, self._steps, BATCH, self._row_optimizer, log_loss, auc,
            self._training.digest(), time.monotonic() - begun, restores.last,
        )  # fmt: skip

    def trainings(self, wanted: Collection[Key]) -> Iterator[Trained]:
        """Those that are wanted, the one without restores first."""
        last, begun = self._steps - 1, time.monotonic()
        kept: dict[Restores, Kept] = {}
        for restores in sorted({one for *_, one in wanted if one != NONE}, key=lambda one: one.steps(self._steps)[0]):
            self._train(restores.steps(self._steps)[0])
            kept[restores] = self._training.keep()
        if any(one == NONE for *_, one in wanted):
            self._train(last)
            yield self._evaluated(EXACT_BITS, NONE, begun)
        for _, bits, restores in wanted:
            if restores == NONE:
                continue
            begun = time.monotonic()
            self._training.go_back(kept[restores])
            for step in restores.steps(self._steps):
                self._train(step)
                self._training.restore(bits)
            self._train(last)
            yield self._evaluated(bits, restores, begun)


def read(path: Path, steps: int, row_optimizer: str) -> dict[Key, Trained]:
    """The trainings of these settings that are in the file. A line that was not written whole is left out."""
    trained: dict[Key, Trained] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            one = Trained(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if (one.steps, one.batch, one.row_optimizer) == (steps, BATCH, row_optimizer):
            trained[one.key] = one
    return trained


def measure(given: argparse.Namespace, schedule: Schedule, generator: Generator) -> None:
    """Do what is not done yet, seed by seed."""
    for seed in range(given.seeds):
        done = read(given.out, given.steps, given.row_optimizer)
        keys = [(seed, bits, Restores(count, given.last)) for count in given.restores for bits in given.bits]
        wanted = [key for key in [(seed, EXACT_BITS, NONE), *keys] if key not in done]
        if not wanted:
            continue
        for one in Seed(seed, given.steps, given.row_optimizer, schedule, generator).trainings(wanted):
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(one)) + "\n")
            tell(
                f"seed {seed}, {one.bits} bits, restores {one.key[2]}: log loss {one.log_loss:.6f}, AUC {one.auc:.6f} ({one.seconds:.0f} s)"
            )


@dataclass(frozen=True, slots=True)
class Change:
    """By how much a metric differs from that without restores, in per cent of it: the mean over seeds, and half of its 95 % interval (t)."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"

    @classmethod
    def of(cls, trained: Mapping[Key, Trained], metric: str, bits: int, restores: Restores) -> Change | None:
        """Over all seeds that have both; None where these are fewer than two."""
        seeds = [seed for seed, *rest in trained if rest == [bits, restores] and (seed, EXACT_BITS, NONE) in trained]
        pairs = [
            (getattr(trained[seed, bits, restores], metric), getattr(trained[seed, EXACT_BITS, NONE], metric)) for seed in seeds
        ]
        changes = [100 * (restored / plain - 1) for restored, plain in pairs]
        if len(changes) < 2:
            return None
        quantile = _T_95[min(len(changes) - 2, len(_T_95) - 1)]
        return cls(statistics.mean(changes), quantile * statistics.stdev(changes) / math.sqrt(len(changes)))


def report(trained: Mapping[Key, Trained], plot: Path | None) -> None:
    """Print what was found as Markdown, and draw it."""
    plain = [one for one in trained.values() if not one.restores]
    losses, areas = [one.log_loss for one in plain], [one.auc for one in plain]
    print(
        f"{len(plain)} seeds without restores: log loss {min(losses):.4f} to {max(losses):.4f}, AUC {min(areas):.4f} to {max(areas):.4f}\n"
    )
    families = sorted({restores for *_, restores in trained if restores != NONE}, key=lambda one: (one.last or 0, one.count))
    print("| restores | " + " | ".join(f"{bits} bits" for bits in WIDTHS) + " |\n" + "| --- " * (len(WIDTHS) + 1) + "|")
    for metric, name in (("log_loss", "log loss"), ("auc", "AUC")):
        for restores in families:
            changes = [Change.of(trained, metric, bits, restores) for bits in WIDTHS]
            marks = ["**" if bits == bits_for(restores.count) else "" for bits in WIDTHS]
            cells = [f"{mark}{change or '-'}{mark}" for change, mark in zip(changes, marks, strict=True)]
            print(f"| {name}, {restores} | " + " | ".join(cells) + " |")
    if plot is not None:
        draw(trained, plot)


def draw(trained: Mapping[Key, Trained], path: Path) -> None:
    """The relative change of the log loss by restores, a line a width, with its interval; both axes are logarithmic around zero."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for place, bits in enumerate(WIDTHS):
        changes = [Change.of(trained, "log_loss", bits, Restores(count)) for count in RESTORES]
        points = [(number, one) for number, one in enumerate(changes) if one is not None]
        axes.errorbar(
            [number + 0.06 * (place - 1.5) for number, _ in points], [one.mean for _, one in points],
            [one.half for _, one in points], marker="o", capsize=3, label=f"{bits} bits",
        )  # fmt: skip
    axes.axhline(BAR, color="grey", linestyle="--", label=f"{BAR} %")
    axes.set_yscale("symlog", linthresh=BAR)
    axes.set_xticks(range(len(RESTORES)), [str(count) for count in RESTORES])
    axes.set_xlabel("restores")
    axes.set_ylabel("change of the log loss, %")
    axes.set_title("Log loss after restores, against none")
    axes.legend(loc="lower right", ncols=2)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Check, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="of a training")
    parser.add_argument("--row-optimizer", choices=("rowwise_adagrad", "adagrad"), default="rowwise_adagrad")
    parser.add_argument("--out", type=Path, default=Path("build/restores.jsonl"), metavar="FILE.jsonl")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--bits", type=int, nargs="+", choices=WIDTHS, default=list(WIDTHS), help="widths")
    parser.add_argument("--restores", type=int, nargs="+", default=list(RESTORES), metavar="N")
    parser.add_argument("--last", type=float, metavar="PART", help="at which part of the training the last restore comes")
    parser.add_argument("--no-check", action="store_true", help="where it was checked before")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--report-only", action="store_true", help="of what is in FILE")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if not given.report_only:
        numerics.set_up(1)
        with tempfile.TemporaryDirectory(prefix="restores-") as name:
            schedule, generator = prepared(Path(name))
            if not given.no_check:
                check(schedule, generator, Path(name), given.bits, given.row_optimizer)
            if given.check_only:
                return
            measure(given, schedule, generator)
    report(read(given.out, given.steps, given.row_optimizer), given.plot)


if __name__ == "__main__":
    main()
