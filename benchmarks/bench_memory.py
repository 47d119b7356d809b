"""Peak memory of `foreload prepare` as the data grow, and of a trainer as the tables grow; and what it takes to know all of the future.

That is told beside the same with the future known as far as a window of WINDOW accesses, which took slots from the next uses within it alone.

The row table's pages stand apart: they follow the rows of the tables, and where it is a mapped file the kernel takes them back when it
needs them.

    python benchmarks/bench_memory.py [--quick] [--out DIR]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from comparison import Cell, Claim, Results, Table, alternate, arguments, ratio, save, spread, tell

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.2
MANY_SLOTS, WINDOW = "1000000", "4194304"  # the window is that of versions before all of the future was known
WINDOWED, EXACT = "itself with a window", "all of the future"


@dataclass(slots=True)
class Peak:
    """The most that a process and its descendants held at once, in bytes; the two are peaks of their own. seconds: from its start to its end."""

    held: int = 0  # all but the row table's mapped pages
    row_table: int = 0
    seconds: float = 0.0


def _descendants(pid: int) -> list[int]:
    pids = [pid]
    for known in pids:
        for task in Path(f"/proc/{known}/task").glob("*/children"):
            try:
                pids += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # it has ended since
    return pids


def _sample(pid: int, peak: Peak, command: str) -> None:
    held = row_table = 0
    for process in _descendants(pid):
        try:
            if command not in Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace"):
                continue
            lines = Path(f"/proc/{process}/smaps").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        size, of_row_table = 0, False
        for line in lines:
            if line.startswith("Rss:"):
                size = int(line.split()[1]) * 1024
            elif line.startswith("VmFlags:"):  # the last line of a mapping
                # Where it is memory of the process, the row table alone is left out of core dumps (pipelines/compiler/row_table.py).
                if of_row_table or "dd" in line.split():
                    row_table += size
                else:
                    held += size
            elif line[0].isdigit() or line[0] in "abcdef":
                of_row_table = "/.work/" in line and any(f"/{name}-" in line for name in ("records", "keys", "index"))
    peak.held, peak.row_table = max(peak.held, held), max(peak.row_table, row_table)


def measure(arguments: Sequence[str], command: str) -> Peak:
    """Run a command to its end; the peak over those of its processes whose command line contains `command`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    os.sync()  # so that nobody waits for what another has written
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *arguments], env=environment, stdout=subprocess.DEVNULL)
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            _sample(process.pid, peak, command)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    peak.seconds = time.monotonic() - begun
    done.set()
    watcher.join()
    if status:
        raise SystemExit(f"{' '.join(arguments)}: exit status {status}")
    return peak


def prepare(folder: Path, rows: int, slots: str | None, *more: str) -> Peak:
    """Peak of preparing so many synthetic samples. slots: as `--slots` takes it; None for the default."""
    given = [
        "--format",
        "synthetic",
        "--rows",
        str(rows),
        "--batch-size",
        "2048",
        "--out",
        str(folder / "schedule"),
        "--overwrite",
    ]
    return measure(
        ["foreload.pipelines.prepare", *given, *([] if slots is None else ["--slots", slots]), *more],
        "foreload.pipelines.prepare",
    )


def train(folder: Path, table_rows: int, rows: int) -> Peak:
    """Peak of one trainer on so many synthetic samples (rows), whose accesses do not depend on the size of the tables (table_rows)."""
    schedule = str(folder / f"tables-{table_rows}")
    given = [
        "--format",
        "synthetic",
        "--rows",
        str(rows),
        "--batch-size",
        "2048",
        "--slots",
        "50000",
        "--out",
        schedule,
        "--overwrite",
    ]
    given += ["--values", "100000", "--table-rows", str(table_rows)]
    measure(["foreload.pipelines.prepare", *given], "foreload.pipelines.prepare")
    options = ["--run", str(folder / f"run-{table_rows}"), "--store", "local:1", "--parity", "off", "--overwrite", "--dim", "32"]
    return measure(["foreload.trainer.cli", "train", schedule, *options], "foreload.trainer.cluster.member.worker")


def compare(what: str, unit: str, peaks: dict[int, Peak], most: float) -> tuple[Claim, list[Cell]]:
    """The claim that the larger of two peaks is hardly above the smaller, and a row that shows them."""
    (few, small), (many, large) = peaks.items()
    growth = large.held / small.held
    tell(f"{what}: {small.held / 2**20:.0f} and {large.held / 2**20:.0f} MiB")
    claim = Claim(f"peak memory, {what}, {many:,} {unit}", f"itself, {few:,} {unit}", f"<= {most:g}", growth, most=most)
    cells: list[Cell] = [what, f"{few:,} and {many:,} {unit}"]
    cells += [f"{peak.held / 2**20:.0f}" for peak in (small, large)]
    return claim, [*cells, f"{growth:.3f}", f"{large.row_table / 2**20:.0f}"]


def exact(folder: Path, count: int, rounds: int, until: float) -> tuple[list[Claim], list[list[Cell]]]:
    """What knowing all of the future takes, beside a window, with so many slots that the window is far from enough."""
    peaks: dict[str, list[Peak]] = {WINDOWED: [], EXACT: []}

    def run(name: str, *more: str) -> float:
        peaks[name].append(prepare(folder, count, MANY_SLOTS, *more))
        return peaks[name][-1].seconds

    seconds = alternate({WINDOWED: partial(run, WINDOWED, "--window", WINDOW), EXACT: partial(run, EXACT)}, rounds, until, 1)
    held = {name: [peak.held / 2**20 for peak in of] for name, of in peaks.items()}
    what = f"`prepare`, {int(MANY_SLOTS):,} slots, {count:,} samples"
    claims = [
        Claim(f"peak memory, {what}", WINDOWED, "<= 1.15", ratio(held[EXACT], held[WINDOWED]), most=1.15),
        Claim(f"seconds, {what}", WINDOWED, "<= 1.15", ratio(seconds[EXACT], seconds[WINDOWED]), most=1.15),
    ]
    rows: list[list[Cell]] = [
        [name, f"{count:,}", f"{spread(held[name]).median:.0f}", str(spread(seconds[name])), len(of)]
        for name, of in peaks.items()
    ]
    return claims, rows


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(3, 1))
    scale = 40 if given.quick else 1
    counts = (2_000_000 // scale, 8_000_000 // scale)
    claims, rows = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for slots in ["200000"] if given.quick else ["200000", None]:
            peaks = {count: prepare(folder, count, slots) for count in counts}
            slots_in_words = "default slots" if slots is None else f"{int(slots):,} slots"
            claim, row = compare(f"`prepare`, {slots_in_words}", "samples", peaks, 1.15)
            claims.append(claim)
            rows.append(row)
        peaks = {count: train(folder, count, 400_000 // scale) for count in (10**5, 10**8)}
        claim, row = compare("a trainer", "rows a table", peaks, 1.05)
        further = [exact(folder, count, given.pairs, given.budget.until(0.9)) for count in counts]
    columns = ["what", "from and to", "MiB", "MiB", "ratio", "the row table's mapped pages at the larger, MiB"]
    note = "Peaks of what is held; the row table's mapped pages, which the kernel takes back when it needs them, stand apart."
    table = Table("Peak memory", columns, [*rows, row], note)
    title = f"All of the future, beside a window; {int(MANY_SLOTS):,} slots"
    beside = Table(title, ["", "samples", "MiB", "seconds", "runs"], [line for _, lines in further for line in lines])
    claims += [claim, *(own for of_count, _ in further for own in of_count)]
    settings: dict[str, str | int | float | bool] = {
        "batch": 2048,
        "trainer's samples": 400_000 // scale,
        "trainer's slots": 50_000,
        "window": WINDOW,
    }
    save(Results("memory", "Memory", claims, [table, beside], settings=settings), given.out)


if __name__ == "__main__":
    main()
