"""The compile stage of `foreload prepare`: what a row of 26 lookups takes, what of that is serial, and lanes planned at once.

python benchmarks/bench_compile.py [--quick] [--out DIR] [--pairs N]

Synthetic Criteo-shaped rows lie encoded in pieces, as `prepare` leaves them to its last stages; reading and encoding logs is left aside.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from comparison import Cell, Claim, Results, Table, alternate, arguments, ratio, save, spread, tell
from foreload.pipelines.compiler.compile import Compilation, CompileSettings
from foreload.pipelines.compiler.exact import Program
from foreload.pipelines.compiler.locality import assign_samples
from foreload.pipelines.compiler.next_uses import AccessWriter
from foreload.pipelines.compiler.row_table import RowTable, direct_rows
from foreload.pipelines.compiler.serial_pass import SerialPass
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import PieceOrder, PieceSource, batches, write_piece
from foreload.pipelines.schedule.format import mask_dtype
from foreload.pipelines.sources import Source, plan_splits, read_records

ROWS, QUICK_ROWS = 4_000_000, 200_000
BATCH, SLOTS = 2048, 200_000
SPEC = FeatureSpec.criteo()
MICROSECONDS = 1e6


def pieces(folder: Path, rows: int) -> PieceSource:
    """So many samples, encoded."""
    folder.mkdir()
    encoder = Encoder(SPEC)
    names: list[tuple[str, int]] = []
    for split in plan_splits(Source("synthetic", (), rows), SPEC):
        for records in read_records(split, SPEC):
            samples = encoder.encode(records)
            names.append((f"{len(names):08d}", len(samples)))
            write_piece(folder / names[-1][0], samples, None, {})
    return PieceSource(folder, PieceOrder.whole(names), PieceOrder.whole([]))


class Compiling:
    """The ways to compile a source in a folder, each in microseconds a row."""

    def __init__(self, source: PieceSource, folder: Path) -> None:
        self._source, self._folder = source, folder

    def whole(self, lanes: int) -> float:
        """All of it, on one core."""
        with tempfile.TemporaryDirectory(dir=self._folder) as work:
            out = Path(work) / "out"
            out.mkdir()
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(cores)})
            try:
                return self._timed(lambda: Compilation(_settings(lanes), out).compile(self._source, Path(work)))
            finally:
                os.sched_setaffinity(0, cores)

    def serial(self, lanes: int) -> float:
        """What does not grow with lanes, alone: reading pieces, distinct rows, lanes and ordinals, and the lanes' lists; no sample files."""
        with tempfile.TemporaryDirectory(dir=self._folder) as work:
            table = RowTable(SPEC, Path(work), direct_rows(self._source.training_samples))
            serial = SerialPass(SPEC, lanes, table, assign_samples)
            writers = [AccessWriter(Path(work), lane, mask_dtype(lanes)) for lane in range(lanes)]

            def read() -> None:
                for samples, _ in batches(self._source.training(0), BATCH):
                    for writer, of_lane in zip(writers, serial.train(samples).lanes, strict=True):
                        writer.add(of_lane)
                for writer in writers:
                    writer.close()

            return self._timed(read)

    def read(self, lanes: int) -> tuple[Program, Path]:
        """What planning begins with, in a folder that stays."""
        out = self._folder / f"{lanes}-lanes"
        out.mkdir()
        return Compilation(_settings(lanes), out).read(self._source, out), out

    def plan(self, program: Program, out: Path, threads: int) -> float:
        """The lanes' oracles, and their files."""
        lanes = program.header.lanes
        with tempfile.TemporaryDirectory(dir=self._folder) as work:
            compilation = Compilation(_settings(lanes), out)
            return self._timed(lambda: compilation.plan_all(program, range(lanes), out, Path(work), threads, lambda steps: None))

    def _timed(self, work: Callable[[], object]) -> float:
        os.sync()  # so that nobody waits for what another has written
        begun = time.perf_counter()
        work()
        return (time.perf_counter() - begun) / self._source.training_samples * MICROSECONDS


def _settings(lanes: int) -> CompileSettings:
    return CompileSettings(SPEC, BATCH, lanes, SLOTS // lanes)


def main() -> None:
    """Measure, print, save."""
    given = arguments(__doc__, pairs=(5, 3))
    base = given.out / "work"
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compile-", dir=base)).absolute()
    try:
        rows = QUICK_ROWS if given.quick else ROWS
        tell(f"making {rows:,} samples")
        source = pieces(folder / "pieces", rows)
        compiling = Compiling(source, folder)
        two, out = compiling.read(2)
        contenders: dict[str, Callable[[], float]] = {
            "compile, 1 lane, one core": partial(compiling.whole, 1),
            "compile, 2 lanes, one core": partial(compiling.whole, 2),
            "serial, 1 lane": partial(compiling.serial, 1),
            "serial, 2 lanes": partial(compiling.serial, 2),
            "2 lanes planned one after the other": partial(compiling.plan, two, out, 1),
            "2 lanes planned at once": partial(compiling.plan, two, out, 2),
        }
        for contender in contenders.values():
            contender()  # compiles the kernels, and takes memory for the first time
        taken = alternate(contenders, given.pairs, given.budget.until(1.0))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines: list[list[Cell]] = [
        [name, *(f"{figure:.2f}" for figure in (spread(values).median, min(values), max(values)))]
        for name, values in taken.items()
    ]
    columns = ["", "us a row, median", "least", "most"]
    table = Table("Compiling, microseconds a row of 26 lookups", columns, lines, f"{rows:,} rows, {SLOTS:,} slots in all.")
    claims = [
        Claim("us a row, compile, one core", "absolute", "<= 2.0", spread(taken["compile, 1 lane, one core"]), most=2.0),
        Claim("us a row, what is serial, alone", "absolute", "<= 0.7", spread(taken["serial, 2 lanes"]), most=0.7),
        Claim(
            "lanes' oracles and their files, at once", "one after the other", ">= 1.7 x",
            ratio(taken["2 lanes planned one after the other"], taken["2 lanes planned at once"]), least=1.7,
        ),
    ]  # fmt: skip
    settings = {"rows": rows, "batch": BATCH, "slots": SLOTS, "pairs": len(taken["serial, 1 lane"])}
    save(Results("compile", "The compile stage", claims, [table], settings=settings), given.out)


if __name__ == "__main__":
    main()
