"""`foreload checkpoint`: saves all of a run that rests, lists and verifies what was saved, and deletes it (docs/checkpoints.md)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from foreload.trainer.checkpoints.format import MANIFEST as CHECKPOINT
from foreload.trainer.checkpoints.format import Checkpoint, checkpoints_in
from foreload.trainer.checkpoints.writer import check_absent, save
from foreload.trainer.cluster.control import training_status
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.directory import CHECKPOINTS, MANIFEST, Run
from foreload.trainer.run.progress_bar import progress_bar
from foreload.trainer.run.saved_run import open_saved


def saved(path: str, store: str | None, to: str | None) -> dict[str, Any]:
    """Save a checkpoint of a run into a folder of checkpoints, that of the run by default; returns what `_told` tells of it.

    Raises CheckpointError, RunError and CacheError.
    """
    run = Run.open(path)
    folder = run.path / CHECKPOINTS if to is None else Path(to)
    if training_status(run.path) is not None:
        raise CheckpointError(f"run {path}: is being trained, and a checkpoint is of a run that rests; stop it with Ctrl-C first")
    check_absent(folder, run.saved_status().step)
    with open_saved(path, store) as opened, progress_bar(0, "row") as bar:

        def show(rows: int, total: int) -> None:
            bar.total = total
            bar.update(rows)

        return _told(save(opened, folder, show))


def listed(path: str) -> dict[str, Any]:
    """The checkpoints in a folder, or of a run: {"checkpoints": what `_told` tells of each, or {"checkpoint", "why"} of one that cannot be used}.

    Raises CheckpointError where there is no such folder.
    """
    folder = Path(path)
    if (folder / MANIFEST).exists():
        folder = folder / CHECKPOINTS
        if not folder.exists():
            return {"checkpoints": []}
    try:
        paths = list(checkpoints_in(folder))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; give a run, or a folder of checkpoints") from error
    return {"checkpoints": [_told_or_why(one) for one in paths]}


def _told_or_why(path: Path) -> dict[str, Any]:
    try:
        return _told(Checkpoint.open(path))
    except CheckpointError as error:
        return {"checkpoint": str(path), "why": str(error)}


def _told(checkpoint: Checkpoint) -> dict[str, Any]:
    contents = checkpoint.contents
    return {
        "checkpoint": str(checkpoint.path),
        "step": contents.step,
        "state": contents.state,
        "run": contents.run.run_id,
        "schedule": contents.run.stages[-1].path,
        "rows": checkpoint.row_count,
        "files": len(checkpoint.files),
        "bytes": checkpoint.total_bytes,
    }


def verified(path: str) -> dict[str, Any]:
    """Compare every file of a checkpoint with its manifest; returns what `_told` tells of it. Raises CheckpointError that names what is damaged."""
    checkpoint = Checkpoint.open(path)
    with progress_bar(checkpoint.total_bytes, "B") as bar:
        checkpoint.verify(bar.update)
    return _told(checkpoint)


def deleted(path: str) -> dict[str, Any]:
    """Delete a checkpoint, also a damaged one; returns {"checkpoint"}. Raises CheckpointError where there is none, or it cannot be deleted."""
    folder = Path(path).resolve()
    if not (folder / CHECKPOINT).is_file():
        Checkpoint.open(path)  # says that it is none
    # Out of sight at once: whoever is killed leaves none half deleted, but what the next one that is saved there clears away.
    going = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.tmp")
    try:
        folder.rename(going)
        shutil.rmtree(going)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be deleted: {error.strerror}; make its folder writable") from error
    return {"checkpoint": path}


def told_text(told: dict[str, Any]) -> str:
    """What is told of a checkpoint, as a line."""
    if "why" in told:
        return f"{told['checkpoint']}: cannot be used: {told['why']}"
    return (
        f"{told['checkpoint']}: after step {told['step']} of {told['schedule']}, {told['state']}; {told['rows']:,} rows, "
        f"{told['files']:,} files, {told['bytes'] / 2**20:,.1f} MiB, of run {told['run']}"
    )
