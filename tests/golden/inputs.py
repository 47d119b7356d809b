"""Small logs, the same on every machine: their values are drawn by integer arithmetic (`key`), not by a library's distributions."""

from __future__ import annotations

from pathlib import Path

from foreload.base.hashing import key

FEATURES = """
order_by = "time"
weight = "price"
group = "user"
[[label]]
name = "clicked"
[[label]]
name = "late"
column = "time"
at_least = 30
[[label]]
name = "price"
kind = "number"
[table.ad]
rows = 300
dimension = 6
[[dense]]
name = "price"
transform = "standard"
[[dense]]
name = "age"
column = "time"
transform = "none"
[[feature]]
name = "ad"
table = "ad"
encoding = "id"
[[feature]]
name = "seen"
table = "ad"
encoding = "id"
separator = " "
pooling = "mean"
[[feature]]
name = "user"
encoding = "vocabulary"
min_count = 2
[[feature]]
name = "site"
rows = 40
"""

RUN_SCHEDULE = "--format csv --features features.toml --batch-size 10 --lanes 2 --slots 40 --epochs 2 --eval-fraction 0.1 --segment-bytes 3000"
"""How the schedule of the runs is prepared, of the clicks of `write_clicks`."""


def numbers(row: int) -> list[int]:
    """What a row of a log is made of."""
    return [int(key(7, row, column)) & 0xFFFF for column in range(8)]


def write_all_kinds(folder: Path) -> list[str]:
    """A log with every kind of column, malformed records and missing values, and its feature file; returns the first words of `prepare`."""
    lines = ["time,clicked,price,ad,seen,user,site"]
    for row in range(600):
        time, clicked, price, ad, user, site, seen, size = numbers(row)
        several = " ".join(str((seen * k) % 290) for k in range(1, 1 + size % 4))
        lines.append(
            f"{time % 60},{clicked % 2},{price / 256},{ad % 300},{several},u{user % 90 if user % 9 else ''},s{site % 50}"
        )
    lines[300] = lines[300].replace(",", ",x", 2)
    (folder / "log.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "features.toml").write_text(FEATURES, encoding="utf-8")
    return ["log.csv", "--features", "features.toml", "--max-rejects", "1"]


def write_criteo(path: Path, rows: int, first: int) -> None:
    """Tab-separated records such as Criteo's, some of their values missing."""
    lines = []
    for row in range(first, first + rows):
        dense = [str(value % 500) if value % 5 else "" for value in map(int, (key(1, row, column) for column in range(13)))]
        words = [int(key(2, row, column)) for column in range(26)]
        lines.append("\t".join([str(words[0] >> 40 & 1), *dense, *(f"{word % 97:08x}" if word % 7 else "" for word in words)]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_clicks(path: Path, rows: int, first: int = 0) -> None:
    """Clicks with the columns of `clicks.FEATURES`, few users making most of them. first: number of the first row."""
    lines = ["clicked,price,ad,user,site"]
    for row in range(first, first + rows):
        clicked, price, ad, user, site, *_ = numbers(row)
        user = user % (1 + site % 300)
        lines.append(
            f"{int(clicked % 5 < 1 + 2 * (user % 3 == 0))},{price % 5000 / 8},{ad % (1 + user % 200)},u{user},s{site % 50}"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


MODEL = """
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self, spec, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(spec.dense_width + spec.width, int(width)), nn.ReLU(), nn.Linear(int(width), 1))

    def forward(self, dense, embeddings):
        return self.layers(torch.cat([dense, *embeddings.values()], 1)).squeeze(1)
"""
"""A small model of a user's own."""
