"""Peak memory of `foreload prepare` as the data grow, and of a trainer as the tables grow.

The row table's mapped pages stand apart: they are the page cache's, and the kernel takes them back when it needs them.

    python benchmarks/bench_memory.py [--quick] [--json FILE] [--only prepare|train]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.2


@dataclass(slots=True)
class Peak:
    """The most that a process and its descendants held at once, in bytes; the two are peaks of their own."""

    held: int = 0  # all but the row table's mapped pages
    row_table: int = 0


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for known in found:
        for task in Path(f"/proc/{known}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # it has ended since
    return found


def _sample(pid: int, peak: Peak, command: str) -> None:
    held = row_table = 0
    for process in _descendants(pid):
        try:
            if command not in Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace"):
                continue
            lines = Path(f"/proc/{process}/smaps").read_text().splitlines()
        except OSError:
            continue
        of_row_table = False
        for line in lines:
            if line.startswith("Rss:"):
                size = int(line.split()[1]) * 1024
                if of_row_table:
                    row_table += size
                else:
                    held += size
            elif line[0].isdigit() or line[0] in "abcdef":
                of_row_table = "/.work/" in line and any(f"/{name}-" in line for name in ("records", "keys", "index"))
    peak.held, peak.row_table = max(peak.held, held), max(peak.row_table, row_table)


def measure(arguments: Sequence[str], command: str) -> Peak:
    """Run a command to its end; the peak over those of its processes whose command line contains `command`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", *arguments], env=environment, stdout=subprocess.DEVNULL)
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            _sample(process.pid, peak, command)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    done.set()
    watcher.join()
    if status:
        raise SystemExit(f"{' '.join(arguments)}: exit status {status}")
    return peak


def prepare(folder: Path, rows: int, slots: str | None) -> Peak:
    """Peak of preparing synthetic rows; slots None: the default."""
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
    return measure(["pipelines.prepare", *given, *([] if slots is None else ["--slots", slots])], "pipelines.prepare")


def train(folder: Path, table_rows: int, rows: int) -> Peak:
    """Peak of one trainer on synthetic rows whose accesses do not depend on the size of the tables."""
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
    measure(["pipelines.prepare", *given], "pipelines.prepare")
    options = ["--run", str(folder / f"run-{table_rows}"), "--store", "local:1", "--overwrite", "--dim", "32"]
    return measure(["trainer.cli", "train", schedule, *options], "trainer.worker")


def _tell(what: str, peaks: dict[str, Peak]) -> None:
    parts = [f"{name}: {peak.held / 2**20:.0f} MiB (row table {peak.row_table / 2**20:.0f})" for name, peak in peaks.items()]
    small, large = peaks.values()
    print(f"{what}: {'; '.join(parts)}; {large.held / small.held:.3f} x", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("prepare", "train"))
    given = parser.parse_args()
    scale = 8 if given.quick else 1
    results: dict[str, object] = {"machine": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.only != "train":
            for slots in ("200000", None):
                peaks = {rows: prepare(folder, rows // scale, slots) for rows in (2_000_000, 8_000_000)}
                _tell(f"prepare, {slots or 'default'} slots", {f"{rows // scale:,} rows": peak for rows, peak in peaks.items()})
                results[f"prepare {slots or 'default'}"] = {rows: asdict(peak) for rows, peak in peaks.items()}
        if given.only != "prepare":
            peaks = {rows: train(folder, rows, 400_000 // scale) for rows in (10**5, 10**8)}
            _tell("trainer", {f"tables of {rows:,} rows": peak for rows, peak in peaks.items()})
            results["train"] = {rows: asdict(peak) for rows, peak in peaks.items()}
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
