"""The oracle alone: lookups per second and core.

Ids are in memory and the schedule's arrays are made in full; reading samples and writing files are left aside.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from comparison import Claim, Results, Table, alternate, arguments, ratio, save, spread, tell
from foreload.pipelines.compiler.lane_planner import LanePlanner
from foreload.pipelines.compiler.next_uses import AccessWriter, LaneAccesses
from foreload.pipelines.compiler.oracle import ARRIVALS
from foreload.pipelines.compiler.row_table import DIRECT_ROWS, RowTable
from foreload.pipelines.compiler.serial_pass import SerialPass
from foreload.pipelines.samples.features import KAGGLE_ROWS, Feature, FeatureSpec, Label
from foreload.pipelines.samples.features import Table as FeatureTable
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.format import FORMAT_VERSION, Header, mask_dtype
from foreload.pipelines.sources.synthetic import Generator

BATCH = 2048
SLOTS = 200_000
SEED = 0
SEGMENT_STEPS = 150  # about what a segment of prepare holds
PIECE = 65_536  # samples generated at once
MANY = 30  # tables of so many times Kaggle's rows have 10^9 ids


@dataclass(frozen=True, slots=True)
class Accesses:
    """ids int64 [steps, lookups], by sample and feature, of tables with `rows` ids."""

    ids: np.ndarray
    rows: tuple[int, ...]

    @property
    def spec(self) -> FeatureSpec:
        """Features that look the tables up by id."""
        tables = tuple(FeatureTable(f"C{k}", rows) for k, rows in enumerate(self.rows))
        return FeatureSpec(
            (Label("label", "label"),), (), tuple(Feature(t.name, k, t.name, "id") for k, t in enumerate(tables)), tables
        )


def accesses(steps: int, rows: tuple[int, ...]) -> Accesses:
    """Synthetic Criteo-shaped steps, on tables of so many rows each."""
    generator = Generator(SEED, rows)
    ids = np.empty((steps * BATCH, len(rows)), np.int64)
    for start in range(0, len(ids), PIECE):
        end = min(start + PIECE, len(ids))
        ids[start:end] = generator.rows(start, end)[2].T
    return Accesses(ids.reshape(steps, -1), rows)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of the oracle took, and the arrivals that it planned."""

    seconds: float
    arrivals: int


def run(what: Accesses, lanes: int, slots: int, direct_rows: int) -> Outcome:
    """Compile the accesses in one thread, all but the schedule's files: slots, ordinals, tags, early marks, masks, ends and every lane's index.

    slots: over all lanes; direct_rows: up to which size tables are numbered by direct address, not by hashing.
    """
    steps, lookups = what.ids.shape
    labels, dense = np.zeros((BATCH, 1), np.float32), np.zeros((BATCH, 0), np.float32)
    index = np.empty(lookups, np.int32)
    header = Header(
        version=FORMAT_VERSION, features=what.spec, batch_size=BATCH, lanes=lanes, slots=(slots // lanes,) * lanes, epochs=1, shuffle_seed=None,
        training_samples=steps * BATCH, evaluation_samples=0, first_step=0, first_number=0, parent=None, settings={}, placement="order",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        serial = SerialPass(what.spec, lanes, RowTable(what.spec, Path(folder), direct_rows))
        ordinals = serial.counts.copy()
        writers = [AccessWriter(Path(folder), lane, mask_dtype(lanes)) for lane in range(lanes)]
        for ids in what.ids:
            step = serial.train(Samples(labels, dense, ids))
            serial.local_index(step, index)
            for writer, of_lane in zip(writers, step.lanes, strict=True):
                writer.add(of_lane)
        arrivals = 0
        for lane, writer in enumerate(writers):
            writer.close()
            with closing(LaneAccesses(Path(folder), lane, mask_dtype(lanes), True, Path(folder))) as lane_accesses:
                lane_accesses.find_next_uses()
                planner = LanePlanner(Path(folder), header, lane, ordinals[lane], lane_accesses.rows)
                for first in range(0, steps, SEGMENT_STEPS):
                    for start, _, part, starts in lane_accesses.accesses(first, min(first + SEGMENT_STEPS, steps)):
                        arrivals += int(planner.plan(start, part, starts, (0, steps))[:, ARRIVALS].sum())
                    planner.buffer.take()
        seconds = time.perf_counter() - begun
    return Outcome(seconds, arrivals)


def deduplicate(what: Accesses) -> None:
    """What any oracle must do first, by NumPy: the distinct rows of each step and every lookup's place among them."""
    firsts = np.cumsum([0, *what.rows[:-1]])
    for ids in what.ids:
        np.unique(ids.reshape(-1, len(what.rows)) + firsts, return_inverse=True)


def _millions(what: Accesses, work: Callable[[], Outcome | None]) -> float:
    """Million lookups a second of some work; of its own seconds where it tells them."""
    begun = time.perf_counter()
    outcome = work()
    seconds = time.perf_counter() - begun if outcome is None else outcome.seconds
    return what.ids.size / seconds / 1e6


def _speed(near: Accesses, far: Accesses, pairs: int, until: float) -> tuple[list[Claim], Table]:
    """Claims and table. near: accesses to tables of Kaggle's sizes; far: to tables MANY times as large."""
    few = Accesses(near.ids[: len(near.ids) // 10], near.rows)
    contenders = {
        "1 lane": partial(_millions, near, partial(run, near, 1, SLOTS, DIRECT_ROWS)),
        "4 lanes": partial(_millions, near, partial(run, near, 4, SLOTS, DIRECT_ROWS)),
        "4 lanes, hashed": partial(_millions, near, partial(run, near, 4, SLOTS, 0)),
        "4 lanes, hashed, 10^9 ids": partial(_millions, far, partial(run, far, 4, SLOTS, 0)),
        "np.unique alone": partial(_millions, few, partial(deduplicate, few)),
    }
    for what, lanes, direct in ((near, 1, DIRECT_ROWS), (near, 4, DIRECT_ROWS), (far, 4, 0)):
        run(Accesses(what.ids[:8], what.rows), lanes, SLOTS, direct)  # compiles
    rates = alternate(contenders, pairs, until)
    rows: list[list[str | int | float | None]] = [
        [
            contender,
            *(f"{figure:.1f}" for figure in (spread(values).median, min(values), max(values))),
            f"{_milliseconds(near, values):.2f}",
        ]
        for contender, values in rates.items()
    ]
    table = Table(
        "The oracle alone, one core",
        ["", "million lookups/s, median", "least", "most", "ms a step"],
        rows,
        f"{len(rates['4 lanes'])} rounds. Steps of {near.ids.shape[1]:,} lookups, {SLOTS:,} slots in all; from an empty row table, its first "
        "pages included.",
    )
    alone = rates["np.unique alone"]
    claims = [
        Claim("lookups/s of the oracle, 4 lanes", "np.unique", ">= 1.5 x", ratio(rates["4 lanes"], alone), least=1.5),
        Claim(
            "lookups/s by hashing, 10^9 ids, 4 lanes",
            "np.unique",
            ">= 0.9 x",
            ratio(rates["4 lanes, hashed, 10^9 ids"], alone),
            least=0.9,
        ),
    ]
    return claims, table


def _milliseconds(what: Accesses, millions: Sequence[float]) -> float:
    return what.ids.shape[1] / spread(millions).median / 1e3


def main() -> None:
    """Measure, print, save."""
    given = arguments(__doc__, pairs=(8, 3))
    steps = 120 if given.quick else 1200
    tell("making ids")
    near = accesses(steps, tuple(KAGGLE_ROWS))
    far = accesses(steps, tuple(MANY * rows for rows in KAGGLE_ROWS))
    claims, speed = _speed(near, far, given.pairs, given.budget.until(0.95))
    del far
    notes = [
        "Ids of the reference workload lie in memory. Measured is all that compiling does with them in one thread: distinct rows, lanes, ordinals, "
        "next uses, slots, arrivals with table, ordinal, id, tag and the boundary to follow, ends, early marks, masks of using lanes now and "
        "next, and every lane's local index, scratch files included. Reading samples and writing the schedule are not in it (see `prepare`).",
        f"With {MANY} times the rows there are {MANY * sum(KAGGLE_ROWS):,} ids, all tables by hash index.",
    ]
    settings = {"steps": steps, "batch": BATCH, "slots": SLOTS}
    save(Results("oracle", "The oracle", claims, [speed], settings=settings, notes=notes), given.out)


if __name__ == "__main__":
    main()
