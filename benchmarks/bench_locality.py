"""Rows exchanged between lanes: samples placed by locality beside slices in order, and what the placement costs `prepare`.

    FORELOAD_DATA=DIR python benchmarks/bench_locality.py [--quick] [--out DIR]

Every schedule is a real one, from `foreload prepare`; the rows are counted from its masks of users: each once for each lane other than its own
that uses it in a step. FORELOAD_DATA names the folder with criteo/ and talkingdata/, as the tests take it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from comparison import Claim, Ratio, Results, Table, alternate, arguments, ratio, save, spread, tell
from foreload.pipelines import prepare
from foreload.pipelines.compiler.locality import assign_samples
from foreload.pipelines.compiler.row_table import RowTable
from foreload.pipelines.compiler.serial_pass import SerialPass
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources.synthetic import Generator

ROOT = Path(__file__).resolve().parent.parent
LANES = (2, 4)
EPOCHS = 2
KINDS = ("order", "locality")
SYNTHETIC_BATCH = 2048
BAR = "<= 0.6 x"


@dataclass(frozen=True, slots=True)
class Data:
    """A data set. given: what `prepare` is told of it; missing: why it cannot be had here, or nothing."""

    name: str
    given: tuple[str, ...]
    batch: int
    claimed: bool
    missing: str = ""


def data_sets(synthetic_rows: int) -> list[Data]:
    """TalkingData and Criteo where they are, and the synthetic data."""
    root = Path(os.environ.get("FORELOAD_DATA", ""))
    sets = []
    for name, file, given in (
        ("TalkingData", "talkingdata/train_sample.csv", ("--format=csv", f"--features={ROOT / 'docs' / 'talkingdata.toml'}")),
        ("Criteo", "criteo/train.tsv", ("--format=criteo",)),
    ):
        there = bool(os.environ.get("FORELOAD_DATA")) and (root / file).exists()
        sets.append(
            Data(name, (str(root / file), *given), 256, True, "" if there else f"FORELOAD_DATA names no folder with {file}")
        )
    return [*sets, Data("synthetic", ("--format=synthetic", f"--rows={synthetic_rows}"), SYNTHETIC_BATCH, False)]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a schedule exchanges. sent: rows sent per epoch; steps: per epoch; used: distinct rows of all steps of an epoch, summed.

    table: rows of the fullest lane over the mean; step: rows that a step uses of the fullest lane over the mean, on average.
    """

    sent: tuple[int, ...]
    steps: int
    used: int
    table: float
    step: float


def counted(schedule: Schedule) -> Counted:
    """Count through a schedule."""
    lanes = schedule.header.lanes
    sent, used, uneven = [0] * EPOCHS, 0, []
    for event in schedule.events():
        owned = []
        for lane in range(lanes):
            users = schedule.lane(event, lane).users
            sent[event.epoch] += int(np.bitwise_count(users & ~users.dtype.type(1 << lane)).sum())
            owned.append(len(users))
        used += sum(owned)
        uneven.append(max(owned) * lanes / sum(owned))
    rows = np.zeros(lanes, np.int64)
    for batch in schedule.rows():
        rows += np.bincount(batch["lane"], minlength=lanes)
    return Counted(tuple(sent), len(uneven) // EPOCHS, used // EPOCHS, float(rows.max() / rows.mean()), float(np.mean(uneven)))


def prepared(folder: Path, data: Data, lanes: int, placement: str, more: Sequence[str] = ()) -> Path:
    """The schedule of a data set, prepared anew."""
    out = folder / "schedule"
    flags = [f"--batch-size={data.batch}", f"--lanes={lanes}", f"--placement={placement}", f"--out={out}", "--overwrite", *more]
    with contextlib.redirect_stdout(io.StringIO()):
        prepare.run([*data.given, *flags])
    return out


def exchanged(folder: Path, sets: Sequence[Data], shuffles: Sequence[bool]) -> tuple[list[Claim], list[Table]]:
    """Rows exchanged, the data sets as they are ordered and shuffled; claims are of the first epoch as ordered."""
    claims: list[Claim] = []
    rows: list[list[str | float]] = []
    for data in sets:
        for lanes in LANES:
            claim = partial(Claim, f"rows exchanged, {data.name}, {lanes} lanes", "slices in order", BAR, most=0.6)
            if data.missing:
                claims.append(claim(None, note=f"skipped: {data.missing}"))
                continue
            for shuffle in shuffles:
                more = [f"--epochs={EPOCHS}", *(["--shuffle-seed=0"] if shuffle else [])]
                counts = {kind: counted(Schedule(prepared(folder, data, lanes, kind, more))) for kind in KINDS}
                order, locality = counts["order"], counts["locality"]
                ratios = [b / a for a, b in zip(order.sent, locality.sent, strict=True)]
                words = f"{data.name}{', shuffled' if shuffle else ''}"
                tell(f"{words}, {lanes} lanes: {', '.join(f'{r:.3f}' for r in ratios)}")
                per_step = [sum(contender.sent) / (EPOCHS * order.steps) for contender in (order, locality)]
                shown = [f"{r:.3f}" for r in (*ratios, order.table, locality.table, order.step, locality.step)]
                rows.append([words, str(lanes), *per_step, locality.used / order.steps, *shown])
                if data.claimed and not shuffle:
                    claims.append(claim(ratios[0]))
    columns = ["data", "lanes", "sent a step, order", "locality", "rows used", "epoch 1: ratio", "epoch 2"]
    columns += ["rows of the fullest lane / mean, order", "locality", "the same of a step's rows, order", "locality"]
    return claims, [Table("Rows exchanged between lanes", columns, rows)]


def serial_pass(folder: Path, batches: Sequence[Samples], lanes: int, placement: str) -> SerialPass:
    """A serial pass that has gone through the batches once, so that their rows have lanes."""
    spec = FeatureSpec.synthetic(None)
    serial = SerialPass(
        spec,
        lanes,
        RowTable(spec, folder / f"rows-{lanes}-{placement}"),
        assign_samples if placement == "locality" else None,
    )
    for samples in batches:
        serial.train(samples)
    return serial


def step_ms(serial: SerialPass, batches: Sequence[Samples]) -> float:
    """Milliseconds a step of the serial pass, local numbering included."""
    index = np.empty(max(len(samples.ids) for samples in batches), np.int32)
    begun = time.perf_counter()
    for samples in batches:
        serial.local_index(serial.train(samples), index[: len(samples.ids)])
    return (time.perf_counter() - begun) / len(batches) * 1e3


def prepare_seconds(folder: Path, data: Data, placement: str) -> float:
    """Seconds of a whole `prepare`, with 4 lanes."""
    begun = time.perf_counter()
    prepared(folder, data, 4, placement)
    return time.perf_counter() - begun


def cost(folder: Path, steps: int, rows: int, given: argparse.Namespace) -> Table:
    """What the placement costs, on the synthetic data."""
    generator = Generator(0, FeatureSpec.synthetic(None).table_rows)
    batches = []
    for first in range(0, steps * SYNTHETIC_BATCH, SYNTHETIC_BATCH):
        labels, dense, ids = generator.rows(first, first + SYNTHETIC_BATCH)
        batches.append(Samples(labels.reshape(-1, 1), dense.T.astype(np.float32), np.ascontiguousarray(ids.T).reshape(-1)))
    lines: list[list[str]] = []

    def add(what: str, measured: dict[str, list[float]]) -> None:
        contenders = [_shown(spread(measured[kind])) for kind in KINDS]
        lines.append([what, *contenders, _shown(ratio(measured["locality"], measured["order"]))])

    for lanes in LANES:
        passes = {kind: serial_pass(folder, batches, lanes, kind) for kind in KINDS}
        measured = alternate(
            {kind: partial(step_ms, passes[kind], batches) for kind in KINDS}, 2 * given.pairs, given.budget.until(0.7)
        )
        add(f"serial pass, ms a step, {lanes} lanes", measured)
    data = Data("synthetic", ("--format=synthetic", f"--rows={rows}"), SYNTHETIC_BATCH, False)
    prepare_seconds(folder, data, "locality")  # compiles the kernels
    measured = alternate(
        {kind: partial(prepare_seconds, folder, data, kind) for kind in KINDS}, given.pairs, given.budget.until(1.0)
    )
    add(f"prepare, s, {rows:,} rows, 4 lanes", measured)
    return Table("What the placement costs `prepare`", ["", "order", "locality", "ratio"], lines)


def _shown(ratio: Ratio) -> str:
    return f"{ratio.median:.3g} ({ratio.low:.3g} to {ratio.high:.3g})"


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="locality-") as name:
        folder = Path(name)
        sets = data_sets(61_440 if given.quick else 122_880)
        claims, tables = exchanged(folder, sets, (False,) if given.quick else (False, True))
        tables.append(cost(folder, 10 if given.quick else 30, 61_440 if given.quick else 409_600, given))
    notes = [
        "A row is sent once a step to each lane other than its own that uses it, and one gradient part comes back for each. The synthetic data's "
        "columns are drawn independently of each other, so that a sample's rows seldom belong together: there is less to be had.",
        "As ordered, the second epoch has the slices of the first; shuffled, each epoch has its own, and in the second one every row has a lane.",
    ]
    settings = {"epochs": EPOCHS, "pairs": given.pairs, "batch, real data": 256, "batch, synthetic": SYNTHETIC_BATCH}
    save(Results("locality", "Placement by locality", claims, tables, (), settings, notes), given.out)


if __name__ == "__main__":
    main()
