"""A small click log, its feature file and its schedule, as commands are given them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from command_line import done

FEATURES = """
label = "clicked"
[table.ad]
rows = 300
{ad_dimension}
[[dense]]
name = "price"
[[feature]]
name = "ad"
table = "ad"
encoding = "id"
[[feature]]
name = "user"
rows = 1000
[[feature]]
name = "site"
rows = 40
"""
COLUMNS = ("clicked", "price", "ad", "user", "site")
CLICKS_ROWS, CLICKS_HELD_OUT = 1200, 120
"""Rows of the log of `Clicks`, and how many of them, the last ones, are for evaluation."""


def write_features(path: Path, ad_dimension: int | None = None) -> Path:
    """The feature file of the logs that write_log writes. ad_dimension: that of the table `ad`, where it is not the job's."""
    path.write_text(FEATURES.format(ad_dimension="" if ad_dimension is None else f"dimension = {ad_dimension}"), encoding="utf-8")
    return path


def click_columns(rows: int) -> dict[str, list[Any]]:
    """Random clicks: columns by name."""
    random = np.random.default_rng(5)
    user = (random.zipf(1.2, rows) - 1) % 700
    return {
        "clicked": (random.random(rows) < 0.2 + 0.5 * (user % 3 == 0)).astype(int).tolist(),
        "price": [round(float(x), 3) for x in random.exponential(5, rows)],
        "ad": ((random.zipf(1.3, rows) - 1) % 300).tolist(),
        "user": [f"u{k}" for k in user],
        "site": [f"s{k}" for k in random.integers(0, 50, rows)],
    }


def write_log(
    path: Path, rows: int, changes: dict[tuple[int, str], str] | None = None, columns: tuple[str, ...] = COLUMNS
) -> Path:
    """Random clicks as CSV. changes: (row from 0, column) -> another text."""
    values = click_columns(rows)
    for (row, column), text in (changes or {}).items():
        values[column][row] = text
    lines = [",".join(columns), *(",".join(str(values[column][row]) for column in columns) for row in range(rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Clicks:
    """A log, its feature file, and its schedule: 2 epochs of 108 steps in 2 lanes, evaluation after each, in segments of some 10 steps."""

    log: Path
    features: Path
    schedule: Path

    @classmethod
    def prepare(cls, folder: Path, **further: object) -> Clicks:
        """Write the log, and prepare the schedule. further: see `options`."""
        clicks = cls(write_log(folder / "log.csv", CLICKS_ROWS), write_features(folder / "features.toml"), folder / "schedule")
        done("prepare", clicks.log, *clicks.options(clicks.schedule, **further))
        return clicks

    def options(self, out: Path, **further: object) -> list[object]:
        """What `foreload prepare` is given, the source aside; further: other values, by flag, None for a flag that is left out."""
        values: dict[str, object] = {
            "format": "csv", "features": self.features, "batch_size": 10, "lanes": 2, "slots": 40, "epochs": 2,
            "eval_fraction": CLICKS_HELD_OUT / CLICKS_ROWS, "segment_bytes": 3000, "out": out,
        }  # fmt: skip
        given = {name: value for name, value in (values | further).items() if value is not None}
        return [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), value)]

    def copy(self, to: Path) -> Path:
        """A copy of the schedule, to be damaged."""
        shutil.copytree(self.schedule, to)
        return to
