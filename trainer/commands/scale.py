"""`foreload scale`: another number of trainers for a run that trains, asked for on its control socket, and waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from foreload.trainer.cluster.messages.control import AskScale, AskScaled, Refused, ScaleProgress, ask
from foreload.trainer.errors import RunError

_PAUSE = timedelta(milliseconds=200)  # between two looks how far it is


def run(folder: str | Path, trainers: int, wait: bool, tell: Callable[[str], None]) -> None:
    """Have the run train with so many trainers. tell: gets a line when it begins, and whenever it is further. Raises RunError and MessageError."""
    begun = ask(Path(folder), AskScale(trainers))
    if begun is None:
        raise RunError(f"run {folder}: is not being trained; go on with it by `foreload train --resume --trainers {trainers}`")
    if isinstance(begun, Refused):
        raise RunError(f"run {folder}: {begun.error}")
    tell(f"{begun.before} -> {begun.after} trainers")
    text = ""
    while wait:
        progress = ask(Path(folder), AskScaled(begun.number))
        if progress is None:
            raise RunError(f"run {folder}: ended before it had {trainers} trainers; go on with it by --resume --trainers")
        if isinstance(progress, Refused):
            raise RunError(f"run {folder}: {progress.error}")
        if progress.failed is not None:
            raise RunError(
                f"run {folder}: trains with {progress.trainers} trainers: {progress.failed}; see what its launcher says"
            )
        if progress.done:
            tell(f"done: {progress.trainers} trainer{'s' if progress.trainers > 1 else ''}")
            return
        text, before = _text(progress), text
        if text and text != before:
            tell(text)
        time.sleep(_PAUSE.total_seconds())


def _text(progress: ScaleProgress) -> str:
    """What is under way, in words."""
    if progress.starting:
        return f"{progress.starting} starting"
    if progress.lanes_to_move:
        return f"{progress.lanes_to_move} lanes to be handed over, as soon as their copies are complete"
    return ""
