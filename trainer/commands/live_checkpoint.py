"""`foreload checkpoint save` of a run that is being trained: asked for over its control socket, and waited for."""

from __future__ import annotations

import time
from pathlib import Path

from foreload.trainer.checkpoints.format import Checkpoint
from foreload.trainer.cluster.control import AskCheckpoint, AskCheckpointed, CheckpointProgress, Refused, ask
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.storage import place

_PAUSE_SECONDS = 0.2  # between two looks how far it is


def save_while_training(run: Path, to: str | None) -> Checkpoint:
    """Have a checkpoint saved, in a folder of checkpoints or that of the run, and return it when it is there. Raises CheckpointError, RunError."""
    begun = ask(run, AskCheckpoint(None if to is None else str(place(to).absolute())))
    if isinstance(begun, Refused):
        raise CheckpointError(f"run {run}: {begun.error}")
    told: CheckpointProgress | Refused | None = None
    while begun is not None:
        told = ask(run, AskCheckpointed(begun.checkpoint))
        if not isinstance(told, CheckpointProgress) or told.done:
            break
        time.sleep(_PAUSE_SECONDS)
    if isinstance(told, Refused):
        raise CheckpointError(f"run {run}: {told.error}")
    if told is None:
        raise CheckpointError(f"run {run}: its training ended meanwhile; save a checkpoint of it now that it rests")
    if told.path is None:
        raise CheckpointError(f"run {run}: the checkpoint was not saved: {told.failed}")
    return Checkpoint.open(told.path)
