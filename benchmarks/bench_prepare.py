"""`foreload prepare` end to end: beside a script written by hand, with two workers, and from text beside PyArrow's own parser."""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from click_logs import write_criteo, write_features, write_parquet
from comparison import Cell, Claim, Results, Table, alternate, arguments, ratio, save, spread, tell
from foreload.pipelines.compiler.compile import Compilation, CompileSettings
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.feature_file import load_features
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import PieceOrder, PieceSource, write_piece
from foreload.pipelines.schedule.format import PROVENANCE
from foreload.pipelines.sources import (
    Format,
    Source,
    plan_splits,
    read_records,
)

FOLDER = Path(__file__).resolve().parent
BATCH, SLOTS = 2048, 200_000
TWO_WORKERS = ["--direct_num_workers=2", "--direct_running_mode=multi_threading"]


def seconds(command: list[str], schedule: Path | None) -> float:
    """Seconds that a Python process takes from its start to its end. command: its arguments; schedule: the folder that it writes, removed before."""
    if schedule is not None:
        shutil.rmtree(schedule, ignore_errors=True)
    os.sync()  # so that no contender waits for what another has written
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    begun = time.monotonic()
    subprocess.run([sys.executable, *command], env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


def check_equal(one: Path, other: Path) -> int:
    """How many bytes a schedule has. Raises AssertionError unless the other one has the same files with the same bytes."""
    names = sorted(path.name for path in other.iterdir())
    assert sorted(path.name for path in one.iterdir() if path.name != PROVENANCE) == names, "the schedules have other files"
    _, different, failed = filecmp.cmpfiles(one, other, names, shallow=False)
    assert not different + failed, f"the schedules differ: {different + failed}"
    return sum((other / name).stat().st_size for name in names)


class Contenders:
    """The commands that are timed, on files in a folder."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.features = work / "features.toml"
        self.prepared, self.written_by_hand, self.of_text = work / "by-prepare", work / "by-hand", work / "from-text"

    def prepare(self, source: Path, *flags: str) -> float:
        """`foreload prepare` from Parquet."""
        command = [
            "-m",
            "foreload.trainer.cli",
            "prepare",
            str(source),
            "--format",
            "parquet",
            *self._settings(),
            "--out",
            str(self.prepared),
        ]
        return seconds([*command, *flags], self.prepared)

    def by_hand(self, source: Path) -> float:
        """The script written by hand."""
        command = [str(FOLDER / "prepare_by_hand.py"), str(source), *self._settings(), "--out", str(self.written_by_hand)]
        return seconds(command, self.written_by_hand)

    def prepare_text(self, source: Path, *flags: str) -> float:
        """`foreload prepare` from a Criteo file."""
        settings = ["--slots", str(SLOTS), "--batch-size", str(BATCH), "--out", str(self.of_text)]
        return seconds(
            ["-m", "foreload.trainer.cli", "prepare", str(source), "--format", "criteo", *settings, *flags], self.of_text
        )

    def parse(self, source: Path, threads: int) -> float:
        """PyArrow parsing a Criteo file, its strings hashed."""
        return seconds([str(FOLDER / "parse_and_hash.py"), str(source), "--threads", str(threads)], None)

    def _settings(self) -> list[str]:
        return ["--features", str(self.features), "--slots", str(SLOTS), "--batch-size", str(BATCH)]


def stages(kind: Format, source: Path, spec: FeatureSpec, work: Path) -> dict[str, float]:
    """Seconds of each stage of `prepare` by itself, one thread, in this process."""
    spent = dict.fromkeys(("read", "encode", "write pieces", "compile"), 0.0)
    encoder = Encoder(spec)
    pieces: list[tuple[str, int]] = []
    folders = [work / name for name in ("pieces", "schedule", "scratch")]
    for folder in folders:
        folder.mkdir()
    for split in plan_splits(Source(kind, (str(source),)), spec):
        reader = read_records(split, spec)
        while True:
            begun = time.monotonic()
            records = next(reader, None)
            read = time.monotonic()
            spent["read"] += read - begun
            if records is None:
                break
            samples = encoder.encode(records)
            encoded = time.monotonic()
            name = f"{len(pieces):08d}"
            write_piece(folders[0] / name, samples, None, {})
            spent["encode"] += encoded - read
            spent["write pieces"] += time.monotonic() - encoded
            pieces.append((name, len(samples)))
    order = PieceSource(folders[0], PieceOrder.whole(pieces), PieceOrder.whole([]))
    begun = time.monotonic()
    Compilation(CompileSettings(spec, BATCH, 1, SLOTS), folders[1]).compile(order, folders[2])
    spent["compile"] = time.monotonic() - begun
    return spent


def stage_table(files: dict[str, tuple[Format, Path, FeatureSpec]], rows: int, work: Path) -> Table:
    """The stages for each file, in microseconds a row, after a run that is not counted (it compiles the kernels and fills caches)."""
    seconds_of = {}
    for name, (kind, path, spec) in files.items():
        for _ in range(2):
            with tempfile.TemporaryDirectory(dir=work) as folder:
                seconds_of[name] = stages(kind, path, spec, Path(folder))
    names = list(files)
    table: list[list[Cell]] = [
        [stage, *(seconds_of[name][stage] / rows * 1e6 for name in names)] for stage in seconds_of[names[0]]
    ]
    return Table(
        "Stages of prepare, microseconds a row",
        ["stage", *names],
        table,
        f"{rows:,} rows, one thread, no Beam, after a warm run.",
    )


def main() -> None:
    """Make the files, run the contenders, save."""
    given = arguments(__doc__, pairs=(5, 1))  # a round of three contenders takes more than a minute
    rows, text_rows, stage_rows = (200_000, 100_000, 50_000) if given.quick else (8_000_000, 2_000_000, 500_000)
    base = given.out / "work"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prepare-", dir=base) as folder:
        results = measure(Path(folder).absolute(), rows, text_rows, stage_rows, given)
    save(results, given.out)


def _table(start: Mapping[str, float], measured: Sequence[tuple[str, int, Sequence[float]]]) -> Table:
    """Every contender's speed. start: seconds that the process takes on one batch; measured: name, rows and seconds of each run."""
    lines: list[list[Cell]] = []
    for name, count, taken in measured:
        whole = spread([float(value) for value in taken])
        first = start[name.removesuffix(", 2 workers").removesuffix(", 2 threads")]
        lines.append([name, count, whole.median, first, count / whole.median, count / (whole.median - first)])
    columns = ["contender", "rows", "seconds", "of them process start", "rows/s", "rows/s without the start"]
    return Table("prepare beside others", columns, lines, "Process start: the same command on one batch.")


def _claims(measured: Mapping[str, list[float]], text: Mapping[str, list[float]]) -> list[Claim]:
    """The claims on seconds from Parquet, and from text."""
    return [
        Claim(
            "prepare from Parquet, rows/s",
            "a script by hand: PyArrow, NumPy, the same kernels, no Beam",
            ">= 0.85",
            ratio(measured["by hand"], measured["prepare"]),
            least=0.85,
        ),
        Claim(
            "prepare with two workers, rows/s",
            "one worker",
            ">= 1.6",
            ratio(measured["prepare"], measured["prepare, 2 workers"]),
            least=1.6,
        ),
        Claim(
            "prepare from Criteo TSV, rows/s",
            "PyArrow parsing and hashing the same file, one thread each",
            ">= 0.6",
            ratio(text["PyArrow, text"], text["prepare, text"]),
            least=0.6,
        ),
        Claim(
            "prepare from Criteo TSV, two workers, rows/s",
            "the same, two threads each",
            ">= 0.5",
            ratio(text["PyArrow, text, 2 threads"], text["prepare, text, 2 workers"]),
            least=0.5,
        ),
    ]


def _make_files(files: Mapping[str, Path], texts: Mapping[str, Path], rows: int, text_rows: int, stage_rows: int) -> None:
    """Write Parquet files and texts: with all rows, those of one stage, and one batch."""
    begun = time.monotonic()
    for name, size, text_size in (("all", rows, text_rows), ("part", stage_rows, stage_rows), ("one", BATCH, BATCH)):
        write_parquet(files[name], size)
        write_criteo(texts[name], text_size)
    tell(f"made {rows:,} rows of Parquet and {text_rows:,} of text in {time.monotonic() - begun:.0f} s")


def measure(work: Path, rows: int, text_rows: int, stage_rows: int, given: argparse.Namespace) -> Results:
    """All figures."""
    contenders = Contenders(work)
    write_features(contenders.features)
    files = {name: work / f"{name}.parquet" for name in ("all", "part", "one")}
    texts = {name: work / f"{name}.tsv" for name in ("all", "part", "one")}
    _make_files(files, texts, rows, text_rows, stage_rows)
    specs = load_features(contenders.features), FeatureSpec.criteo()
    by_stage = stage_table(
        {"Parquet": ("parquet", files["part"], specs[0]), "Criteo": ("criteo", texts["part"], specs[1])}, stage_rows, work
    )
    starts: dict[str, Callable[[], float]] = {
        "by hand": lambda: contenders.by_hand(files["one"]),
        "prepare": lambda: contenders.prepare(files["one"]),
        "PyArrow, text": lambda: contenders.parse(texts["one"], 1),
        "prepare, text": lambda: contenders.prepare_text(texts["one"]),
    }
    start = {name: spread(taken).median for name, taken in alternate(starts, 1 if given.quick else 2).items()}
    measured = alternate(
        {
            "by hand": lambda: contenders.by_hand(files["all"]),
            "prepare": lambda: contenders.prepare(files["all"]),
            "prepare, 2 workers": lambda: contenders.prepare(files["all"], *TWO_WORKERS),
        },
        given.pairs,
        given.budget.until(0.7),
    )
    size = check_equal(contenders.prepared, contenders.written_by_hand)
    for folder in (contenders.prepared, contenders.written_by_hand):
        shutil.rmtree(folder)
    text = alternate(
        {
            "PyArrow, text": lambda: contenders.parse(texts["all"], 1),
            "prepare, text": lambda: contenders.prepare_text(texts["all"]),
            "PyArrow, text, 2 threads": lambda: contenders.parse(texts["all"], 2),
            "prepare, text, 2 workers": lambda: contenders.prepare_text(texts["all"], *TWO_WORKERS),
        },
        given.pairs,
        given.budget.until(1.0),
    )
    table = _table(start, [(n, rows, t) for n, t in measured.items()] + [(n, text_rows, t) for n, t in text.items()])
    return Results(
        script="prepare",
        title="prepare end to end",
        claims=_claims(measured, text),
        tables=[table, by_stage],
        settings={
            "rows": rows,
            "text_rows": text_rows,
            "batch_size": BATCH,
            "slots": SLOTS,
            "lanes": 1,
            "pairs": len(measured["prepare"]),
        },
        notes=[
            "Processes as a user starts them, from start to end; files are made before and lie in the page cache. The script by hand streams "
            f"the Parquet file into the compiler; its schedule and prepare's ({size / 1e6:,.0f} MB) are the same, byte for byte, which is "
            "checked. PyArrow's contender parses and hashes and then drops everything; prepare's writes the schedule."
        ],
    )


if __name__ == "__main__":
    main()
