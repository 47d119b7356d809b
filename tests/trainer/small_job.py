"""A small `foreload train`, what it leaves, and what its trainers tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreload.trainer.compute.reports import StepReport


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


def step_report(step: int, **changed: Any) -> StepReport:
    """What a trainer tells of a step."""
    report = StepReport(
        step=step, epoch=0, samples=100, loss=0.5, rows_used=40, rows_arrived=10, rows_fetched=5, rows_written_back=6,
        seconds=0.5, seconds_compute=0.25, seconds_exchange=0.125, seconds_waiting=0.125, bytes_sent=1000,
    )  # fmt: skip
    return replace(report, **changed)
