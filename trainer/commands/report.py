"""`foreload report`: write a page about a run, two runs side by side, or a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreload.trainer.commands import status
from foreload.trainer.pages.report import report


def run(places: Sequence[str], out: str | None) -> Path:
    """Write the page, and return its path.

    The arguments and the errors are those of `trainer.pages.report.report`.
    """
    return report(list(places), out, lambda run_folder: status.run(run_folder).state)
