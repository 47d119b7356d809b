"""A small `foreload train`, and what it leaves."""

from __future__ import annotations

import json
import socket
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


def free_port() -> str:
    """A TCP port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
