"""`foreload scale`: change the number of trainers of a run while it trains, or replace one.

The command sends its request to the run's control socket, and waits until the change is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from foreload.trainer.cluster.messages.control import AskScale, AskScaled, Refused, ScaleProgress, ask
from foreload.trainer.errors import RunError

_PAUSE = timedelta(milliseconds=50)  # between two polls of the progress


def run(folder: str | Path, change: AskScale, wait: bool, log: Callable[[str], None]) -> None:
    """Change the trainers of a run that trains.

    Args:
        folder: the folder of the run.
        change: what to change.
        wait: whether to wait until the change is done.
        log: called with a line when the change begins, and at each progress.

    Raises:
        RunError: the run does not train, refuses, ends before the change is done, or the change
            fails.
        MessageError: the run's answer is malformed.
    """
    begun = ask(Path(folder), change)
    if begun is None:
        way = "" if change.trainers is None else f"; continue it with `foreload train --resume --trainers {change.trainers}`"
        raise RunError(f"run {folder}: is not being trained{way}")
    if isinstance(begun, Refused):
        raise RunError(f"run {folder}: {begun.error}")
    replaced = change.replaces is not None
    log(f"another trainer for {change.replaces}" if replaced else f"{begun.before} -> {begun.after} trainers")
    text = ""
    while wait:
        progress = ask(Path(folder), AskScaled(begun.number))
        if progress is None:
            if replaced:
                raise RunError(f"run {folder}: ended before trainer {change.replaces} was replaced")
            raise RunError(f"run {folder}: ended before it had {begun.after} trainers; continue it with --resume --trainers")
        if isinstance(progress, Refused):
            raise RunError(f"run {folder}: {progress.error}")
        if progress.failed is not None:
            raise RunError(
                f"run {folder}: trains with {progress.trainers} trainers: {progress.failed}; see the messages of its launcher"
            )
        if progress.done:
            log(f"done: {progress.trainers} trainer{'s' if progress.trainers > 1 else ''}")
            return
        text, before = _text(progress), text
        if text and text != before:
            log(text)
        time.sleep(_PAUSE.total_seconds())


def _text(progress: ScaleProgress) -> str:
    """Describe the progress; "" if there is nothing to report."""
    if progress.starting:
        return f"{progress.starting} starting"
    if progress.lanes_to_move:
        return f"{progress.lanes_to_move} lanes will be handed over as soon as their copies are complete"
    return ""
