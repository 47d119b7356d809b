"""A small `foreload train`, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path


def arguments(schedule: Path, run: Path, *further: str) -> list[str]:
    """The command line, without the program's name, that trains a small model."""
    return [
        "train",
        str(schedule),
        "--run",
        str(run),
        "--dim",
        "4",
        "--lr",
        "0.02",
        "--model-options",
        "top=8-1",
        "bottom=8-4",
        *further,
    ]


def summary(run: Path) -> dict[str, object]:
    """What the run's summary.json says."""
    found: dict[str, object] = json.loads((run / "summary.json").read_text())
    return found
