"""`foreload report`: a page to look at, of a run, of two runs beside each other, or of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreload.trainer.commands import status
from foreload.trainer.pages.report import report


def run(places: Sequence[str], out: str | None) -> Path:
    """Write the page; returns where it is. places, out, and what is raised: as `report` has them."""
    return report(list(places), out, lambda run_folder: status.run(run_folder).state)
