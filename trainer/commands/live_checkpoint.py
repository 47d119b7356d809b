"""`foreload checkpoint save` of a run that is being trained: asked for over its control socket, and waited for."""

from __future__ import annotations

import time
from pathlib import Path

from foreload.trainer.checkpoints.format import Checkpoint
from foreload.trainer.checkpoints.lineage import of_run
from foreload.trainer.cluster.messages.control import (
    AskCheckpoint,
    AskCheckpointed,
    CheckpointBegun,
    CheckpointProgress,
    Refused,
    ask,
)
from foreload.trainer.errors import CheckpointError, RunError
from foreload.trainer.run.directory import Run
from foreload.trainer.storage import AnyFolder, place

_PAUSE_SECONDS = 0.2  # between two looks how far it is


def save_while_training(run: Run, to: str | None, folder: AnyFolder) -> Checkpoint:
    """Have a checkpoint saved, in a folder of checkpoints or that of the run, and return it when it is there.

    folder: where that is. Raises CheckpointError and RunError.
    """
    before = {checkpoint.sha256 for checkpoint in of_run(folder, run.manifest)}
    try:
        answer = _asked_for(run.path, to)
    except RunError as error:
        # It has the request, and does what it asks for when it goes on.
        raise CheckpointError(
            f"{error} If it goes on, it still saves the checkpoint: `foreload checkpoint list {folder}` shows it then"
        ) from error
    if isinstance(answer, Refused):
        raise CheckpointError(f"run {run.path}: {answer.error}")
    if answer is None:
        saved = [checkpoint for checkpoint in of_run(folder, run.manifest) if checkpoint.sha256 not in before]
        if saved:
            return saved[-1]
        raise CheckpointError(f"run {run.path}: its training ended meanwhile; save a checkpoint of it now that it rests")
    if answer.path is None:
        raise CheckpointError(f"run {run.path}: the checkpoint was not saved: {answer.failed}")
    return Checkpoint.open(answer.path)


def _asked_for(run: Path, to: str | None) -> CheckpointProgress | Refused | None:
    """What the run says in the end of a checkpoint that it is asked for; None if its training ended meanwhile. Raises RunError if it is silent."""
    begun = ask(run, AskCheckpoint(None if to is None else str(place(to).absolute())))
    while isinstance(begun, CheckpointBegun):
        answer = ask(run, AskCheckpointed(begun.checkpoint))
        if not isinstance(answer, CheckpointProgress) or answer.done:
            return answer
        time.sleep(_PAUSE_SECONDS)
    return begun
