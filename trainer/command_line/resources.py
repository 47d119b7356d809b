"""`foreload history` and `foreload plan`: what runs took, and what the next one will."""

from __future__ import annotations

import argparse
from typing import Any

from foreload.trainer.command_line.shared import add_json, add_plain, tell


def add_to(commands: Any) -> None:
    """Declare the commands."""
    listed = add_plain(
        commands, "history", _history, "what runs took: steps, times, memory",
        "Lists the profiles that runs left at their end, the oldest first: model, schedule, trainers and store, milliseconds a step, memory. "
        "`foreload plan` predicts from them.",
    )  # fmt: skip
    add_history(listed)
    add_json(listed, "profiles")


def add_history(command: argparse.ArgumentParser) -> None:
    """The flag --history of a command that reads it."""
    command.add_argument("--history", metavar="FILE", help="the file of the profiles; by default that in the user's data folder")


def _history(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import history

    told = history.run(parsed.history)
    return tell(parsed, told, history.text(told))
