"""Small click logs, and a job of `prepare` on them with every stage of the pipeline, for any runner."""

from __future__ import annotations

import os
import random
from pathlib import Path

from foreload.pipelines.schedule.format import PROVENANCE

FEATURES = """
order_by = "time"
order_type = "integer"
weight = "price"
group = "right"
[[label]]
name = "clicked"
[[label]]
name = "late"
column = "time"
at_least = 30
[[label]]
name = "price"
kind = "number"
[[dense]]
name = "price"
transform = "standard"
[[feature]]
name = "left"
encoding = "vocabulary"
[[feature]]
name = "right"
encoding = "hash"
rows = 500
"""
OPTIONS = (
    "--batch-size=32",
    "--lanes=3",
    "--slots=60",
    "--epochs=2",
    "--shuffle-seed=5",
    "--eval-fraction=0.2",
    "--eval-every=4",
    "--max-rejects=9",
    "--segment-bytes=4000",
)
PIECE_ROWS = 100


def worker_environment() -> dict[str, str]:
    """The environment of processes that import the packages and this folder."""
    tests = Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests / "harness")])}


def click_logs(folder: Path, seed: int = 0) -> list[str]:
    """Write five files, with a few malformed records; the command line of `prepare` for them, without --out."""
    generator = random.Random(seed)
    for name in "abcde":
        lines = ["clicked,price,left,right,time"]
        for _ in range(generator.randrange(100, 200)):
            # A 2 is no label: one record in 31 of these files is malformed.
            clicked = generator.choice("01" * 15 + "2" if name in "bd" else "01")
            left, right, time = (generator.randrange(n) for n in (90, 2000, 60))
            lines.append(f"{clicked},{generator.random():.3f},w{left},{right},{time}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "features.toml").write_text(FEATURES)
    return [str(folder / "*.csv"), "--format=csv", f"--features={folder / 'features.toml'}", *OPTIONS]


def contents(schedule: Path) -> dict[str, bytes]:
    """Every file but the one that says how the schedule came to be."""
    files = [path for path in schedule.rglob("*") if path.is_file() and path.name != PROVENANCE]
    return {str(path.relative_to(schedule)): path.read_bytes() for path in files}
