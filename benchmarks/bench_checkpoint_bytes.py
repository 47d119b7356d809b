"""Bytes of checkpoints: every policy and width, of one training of the reference workload, against float32 checkpoints with all rows.

python benchmarks/bench_checkpoint_bytes.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lgamma, log
from pathlib import Path

import numpy as np

from checkpoint_policies import KEPT, bases, kept, planned_to_keep_least, written
from comparison import Cell, Claim, Results, Series, Table, arguments, save, tell
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.checkpoints import writer
from foreload.trainer.checkpoints.changed_rows import increment_sizes
from foreload.trainer.checkpoints.contents import Checkpoint, Contents
from foreload.trainer.checkpoints.files import BITS
from foreload.trainer.checkpoints.row_files import CheckpointRows, write_rows
from foreload.trainer.checkpoints.saved_checkpoint import mapped_rows
from foreload.trainer.job.job_values import POLICIES
from foreload.trainer.run.directory import Run
from saved_runs import stopped_after
from workload import BATCH, DIM, prepare_first_steps

CHECKPOINTS = 8
FIRST_INCREMENT = 0.25  # of the model
STEPS = (400, 60)  # trained in all, in full and with --quick

Pair = tuple[int | None, int]
"""A checkpoint's base, by its place in the order of all, None for all rows; and its own."""


def choose_steps(schedule: Schedule) -> list[int]:
    """After which steps checkpoints are saved: at even intervals up to the last but one step, the first increment nearest to FIRST_INCREMENT."""
    last = schedule.header.end_step - 2
    tables = [1] * len(schedule.header.features.tables)

    def first_increment(interval: int) -> float:
        begin = last - (CHECKPOINTS - 1) * interval
        full, increments = increment_sizes(schedule, [begin, begin + interval], tables)
        return float(increments[0, 1] / full[1])

    low, high = 1, (last - 1) // CHECKPOINTS
    while low < high:  # the longer the interval, the more changes in it
        middle = (low + high) // 2
        low, high = (middle + 1, high) if first_increment(middle) < FIRST_INCREMENT else (low, middle)
    return [last - (CHECKPOINTS - 1 - number) * low for number in range(CHECKPOINTS)]


def train_and_save(schedule: Schedule, steps: Sequence[int], optimizer: str, folder: Path) -> list[Checkpoint]:
    """One training, stopped and resumed at each of the steps, with a checkpoint of all rows there."""
    made: list[Checkpoint] = []
    for saved in stopped_after(schedule.path, steps, folder / "run", row_optimizer=optimizer):
        made.append(writer.save(saved, folder / "saved", lambda rows, total: None))
        tell(
            f"{optimizer}: saved after step {made[-1].contents.step}, {made[-1].row_count:,} rows, {made[-1].own_bytes / 2**20:,.0f} MiB"
        )
    shutil.rmtree(Run(folder / "run").path)
    return made


@dataclass(slots=True)
class Sizes:
    """Bytes of checkpoints of one training, as they are written, and the least that they could take; each is measured when it is first asked for.

    seconds: of a core, of writing all rows of all of them, by width.
    """

    whole: Sequence[Checkpoint]
    folder: Path
    measured: dict[tuple[int, Pair], tuple[float, float]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=lambda: dict.fromkeys(BITS, 0.0))

    def of(self, bits: int, pair: Pair) -> tuple[float, float]:
        """The bytes of a checkpoint, manifest and dense part included, and their bound."""
        if (bits, pair) not in self.measured:
            self.measured[bits, pair] = self._measure(bits, pair)
        return self.measured[bits, pair]

    def _measure(self, bits: int, pair: Pair) -> tuple[float, float]:
        base, own = (None if pair[0] is None else self.whole[pair[0]]), self.whole[pair[1]]
        contents, files, bound = own.contents, [], float(own.contents.dense.bytes)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            for table, layout in enumerate(contents.tables):
                for file, rows in zip((one for one in contents.rows if one.table == table), mapped_rows(own, table), strict=True):
                    changed = np.arange(file.rows) if base is None else np.flatnonzero(rows.tag > base.contents.step + 1)
                    known = 0 if base is None else base.contents.ordinals[file.lane][table]
                    if not len(changed):
                        continue
                    some, ordinals = rows.part(changed), file.first + changed
                    begun = time.process_time()
                    files.append(write_rows(Path(name), file.lane, layout, ordinals, some, bits, known))
                    if base is None:
                        self.seconds[bits] += time.process_time() - begun
                    width = DIM * bits / 8 + 4 * layout.state_width
                    bound += len(changed) * width + _named(some, ordinals, file.rows, known, layout.rows)
            made = Contents.made(
                contents.run,
                contents.features,
                contents.encoding,
                contents.step,
                contents.totals,
                contents.tables,
                np.array(contents.ordinals),
                files,
                contents.dense,
                base,
            )
            made.write(Path(name))
            return contents.dense.bytes + sum(path.stat().st_size for path in Path(name).iterdir()), bound


def _named(rows: CheckpointRows, ordinals: np.ndarray, total: int, known: int, table_rows: int) -> float:
    """The information, in bytes, in which rows of `total` these are, the ids of the new ones, and all tags."""
    changed, new = len(ordinals), int(np.count_nonzero(ordinals >= known))
    _, counts = np.unique(rows.tag, return_counts=True)
    of_tags = -float((counts * np.log2(counts / changed)).sum())
    which = lgamma(total + 1) - lgamma(changed + 1) - lgamma(total - changed + 1)
    # New ids are any, each once, in the order of their first use.
    of_ids = lgamma(table_rows + 1) - lgamma(max(table_rows - new, 0) + 1)
    return (of_tags + (which + of_ids) / log(2)) / 8


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a policy and width: bytes written and most bytes kept, the least that they could be, and these as factors against float32 and all rows."""

    written: float
    kept: float
    less_written: float
    less_kept: float
    bound_written: float
    bound_kept: float


def figures(sizes: Sizes, made: Sequence[int | None], bits: int) -> Figures:
    """What checkpoints with these bases take."""
    count = len(made)
    raw: tuple[list[float], np.ndarray] = [], np.zeros((count, count))
    bounds: tuple[list[float], np.ndarray] = [], np.zeros((count, count))
    plain = [sizes.of(32, (None, number))[0] for number in range(count)]
    for number, base in enumerate(made):
        for place, (full, increments) in enumerate((raw, bounds)):
            full.append(sizes.of(bits, (None, number))[place])
            if base is not None:
                increments[base, number] = sizes.of(bits, (base, number))[place]
    none: list[int | None] = [None] * count
    all_written, all_kept = sum(plain), kept(plain, raw[1], none)
    own, least = (written(*raw, made), kept(*raw, made)), (written(*bounds, made), kept(*bounds, made))
    return Figures(*own, all_written / own[0], all_kept / own[1], all_written / least[0], all_kept / least[1])


def report(optimizer: str, sizes: Sizes, policies: dict[str, list[int | None]]) -> tuple[Table, dict[tuple[str, int], Figures]]:
    """Every policy and width of a training."""
    measured = {(policy, bits): figures(sizes, made, bits) for policy, made in policies.items() for bits in BITS}
    rows: list[list[Cell]] = [
        [
            policy, bits, one.written / 2**20, f"{one.less_written:.2f}", f"{one.bound_written:.2f}", one.kept / 2**20,
            f"{one.less_kept:.2f}", f"{one.bound_kept:.2f}",
        ]
        for (policy, bits), one in measured.items()
    ]  # fmt: skip
    columns = ["policy", "bits", "written (MiB)", "less written", "its bound", "kept (MiB)", "less kept", "its bound"]
    return Table(f"Bytes of {CHECKPOINTS} checkpoints, {optimizer}", columns, rows), measured


def claims(measured: dict[tuple[str, int], Figures], first: float) -> list[Claim]:
    """What is to be shown."""
    all_rows = "float32 checkpoints with all rows"
    made = [Claim("first increment, as a part of the model", "set so", "0.22 to 0.28", first, least=0.22, most=0.28)]
    for bits, least_written, least_kept in ((8, 6.0, 2.5), (2, 17.0, 8.0)):
        one = measured["intermittent", bits]
        for what, figure, bound, least in (
            ("written", one.less_written, one.bound_written, least_written), ("kept", one.less_kept, one.bound_kept, least_kept),
        ):  # fmt: skip
            bar = min(least, 0.95 * bound)
            text = f"at least {least:g} x, or 0.95 of its bound, {bound:.1f} x"
            made.append(Claim(f"bytes {what} with intermittent increments of {bits} bits", all_rows, text, figure, least=bar))
    worst = max(measured["planned", bits].written / measured["intermittent", bits].written for bits in BITS)
    made.append(Claim("bytes written with planned baselines", "intermittent ones", "at most 1 x", worst, most=1.0))
    worst = max(measured["planned, to keep least", bits].kept / measured["intermittent", bits].kept for bits in BITS)
    made.append(Claim("bytes kept with baselines planned for that", "intermittent ones", "at most 1 x", worst, most=1.0))
    return made


def measure(given: argparse.Namespace, folder: Path) -> Results:
    """Train once with each optimizer, and write what each policy and width would have written."""
    schedule = prepare_first_steps(folder / "schedule", STEPS[given.quick])
    steps = choose_steps(schedule)
    tables, plots, all_claims, notes = [], [], [], []
    for optimizer in ("rowwise_adagrad",) if given.quick else ("rowwise_adagrad", "adagrad"):
        whole = train_and_save(schedule, steps, optimizer, folder / optimizer)
        stops = [one.contents.step for one in whole]
        sizes = Sizes(whole, folder)
        full, increments = increment_sizes(schedule, stops, [layout.row_bytes for layout in whole[0].contents.tables])
        policies: dict[str, list[int | None]] = {policy: bases(policy, full, increments) for policy in POLICIES}
        policies["planned, to keep least"] = planned_to_keep_least(full, increments, KEPT)
        if optimizer == "adagrad":
            policies = {policy: policies[policy] for policy in ("full", "intermittent", "planned")}
        tell(f"{optimizer}: writing what each policy and width would have written")
        table, measured = report(optimizer, sizes, policies)
        tables.append(table)
        per_row = {bits: sizes.of(bits, (None, CHECKPOINTS - 1))[0] / whole[-1].row_count for bits in BITS}
        rows = sum(one.row_count for one in whole)
        notes.append(
            f"{optimizer}: a row with all of its id, tag and state takes "
            + ", ".join(f"{per_row[bits]:.1f} bytes at {bits} bits ({sizes.seconds[bits] / rows * 1e6:.2f} us of a core)" for bits in BITS) + "."
        )  # fmt: skip
        if optimizer == "rowwise_adagrad":
            fractions = [float(increments[0, number] / full[number]) for number in range(1, CHECKPOINTS)]
            all_claims = claims(measured, fractions[0])
            plots = [
                Series(f"Bytes of {CHECKPOINTS} checkpoints {what}", "bits of a weight", "times less than float32 with all rows", "bars", {
                    policy: [(str(bits), getattr(measured[policy, bits], f"less_{what}")) for bits in BITS] for policy in policies
                })
                for what in ("written", "kept")
            ]  # fmt: skip
            notes.insert(0, _about(whole, stops, fractions, policies))
    settings = {
        "steps": STEPS[given.quick],
        "checkpoints": CHECKPOINTS,
        "kept": KEPT,
        "interval": stops[1] - stops[0],
    }
    return Results("checkpoint_bytes", "Bytes of checkpoints", all_claims, tables, plots, settings, notes)


def _about(
    whole: Sequence[Checkpoint], stops: Sequence[int], fractions: Sequence[float], policies: dict[str, list[int | None]]
) -> str:
    made = "; ".join(
        f"{policy}: baselines {[n + 1 for n, base in enumerate(of) if base is None]}" for policy, of in policies.items()
    )
    return (
        f"26 synthetic tables of the Kaggle sizes, batch {BATCH:,}, dim {DIM}: one training, stopped and resumed after steps "
        f"{', '.join(map(str, stops))}, with {whole[0].row_count:,} to {whole[-1].row_count:,} rows. Increments of the first checkpoint are "
        f"{', '.join(f'{one:.2f}' for one in fractions)} of the model. {made}. Written: all checkpoints together; kept: the most that is there at "
        f"once, {KEPT} of them and what they need. The bound: codes and optimizer state as they are, ids, tags and which rows changed by their "
        "information, no scales; state compresses a little, so it can be passed."
    )


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(1, 1))
    with tempfile.TemporaryDirectory(dir=given.out, prefix="checkpoint-bytes-") as name:
        results = measure(given, Path(name).absolute())
    save(results, given.out)


if __name__ == "__main__":
    main()
