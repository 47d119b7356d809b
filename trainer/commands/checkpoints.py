"""`foreload checkpoint list`, `verify` and `delete`: the checkpoints that there are (docs/checkpoints.md)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from foreload.trainer.checkpoints.format import Checkpoint, checkpoints_in
from foreload.trainer.checkpoints.lineage import (
    check_there,
    delete,
)
from foreload.trainer.checkpoints.policies import EXACT_BITS
from foreload.trainer.errors import CheckpointError, after_step
from foreload.trainer.run.directory import MANIFEST, Run
from foreload.trainer.run.manifest import inexact_text
from foreload.trainer.run.progress_bar import progress_bar
from foreload.trainer.storage import AnyFolder, place


def listed(path: str) -> dict[str, Any]:
    """The checkpoints in a folder, or of a run: {"checkpoints": what `told` tells of each, or {"checkpoint", "why"} of one that cannot be used}.

    Raises CheckpointError where there is no such folder.
    """
    named = place(path)
    folders = [named]
    if isinstance(named, Path) and (named / MANIFEST).exists():
        folders = [folder for folder in Run.open(path).checkpoint_folders() if not isinstance(folder, Path) or folder.exists()]
    try:
        paths = [checkpoint for folder in folders for checkpoint in checkpoints_in(folder)]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; give a run, or a folder of checkpoints") from error
    opened: dict[str, Checkpoint] = {}
    return {"checkpoints": [_about(one, opened) for one in paths]}


def _about(path: AnyFolder, opened: dict[str, Checkpoint]) -> dict[str, Any]:
    try:
        checkpoint = Checkpoint.open(path, opened)
        opened[checkpoint.sha256] = checkpoint
        return told(checkpoint)
    except CheckpointError as error:
        return {"checkpoint": str(path), "why": str(error)}


def told(checkpoint: Checkpoint) -> dict[str, Any]:
    """rows: of the model; rows_here, files, bytes: its own; total_bytes: with what it needs; base: its name; bits: the fewest of a weight."""
    contents = checkpoint.contents
    return {
        "checkpoint": str(checkpoint.place),
        "step": contents.step,
        "state": contents.state,
        "run": contents.run.run_id,
        "schedule": contents.run.stages[-1].path,
        "rows": checkpoint.row_count,
        "rows_here": checkpoint.rows_here,
        "files": len(checkpoint.files),
        "bytes": checkpoint.own_bytes,
        "total_bytes": checkpoint.total_bytes,
        "base": None if contents.base is None else contents.base.name,
        "bits": checkpoint.bits,
        "inexact": None if contents.inexact is None else asdict(contents.inexact),
    }


def verified(path: str) -> dict[str, Any]:
    """Compare every file of a checkpoint, and of those that it needs, with its manifest; returns what `told` tells of it.

    Raises CheckpointError that names what is damaged.
    """
    checkpoint = Checkpoint.open(path)
    with progress_bar(checkpoint.total_bytes, "B") as bar:
        checkpoint.verify(bar.update)
    return told(checkpoint)


def deleted(path: str, with_increments: bool = False) -> dict[str, Any]:
    """Delete a checkpoint, also a damaged one, and, where that is asked for, those that need it; returns {"checkpoint", "deleted": paths of all}.

    Raises CheckpointError where there is none, it cannot be deleted, or others need it.
    """
    checkpoint = place(path)
    check_there(checkpoint)
    return {"checkpoint": path, "deleted": [str(one) for one in delete(checkpoint, with_increments)]}


def told_text(about: dict[str, Any]) -> str:
    """What `told` gives, as a line."""
    if "why" in about:
        return f"{about['checkpoint']}: cannot be used: {about['why']}"
    rows = f"{about['rows']:,} rows"
    if about["base"] is not None:
        rows += f", the {about['rows_here']:,} changed since {about['base']} here"
    size = f"{about['files']:,} files, {about['bytes'] / 2**20:,.1f} MiB"
    bits = "" if about["bits"] == EXACT_BITS else f", weights of {about['bits']} bits"
    inexact = f"; {inexact_text(about['inexact'])}" if about["inexact"] else ""
    return (
        f"{about['checkpoint']}: {after_step(about['step'])} of {about['schedule']}, {about['state']}; {rows}, {size}{bits}, "
        f"of run {about['run']}{inexact}"
    )
