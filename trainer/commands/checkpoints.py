"""`foreload checkpoint list`, `verify` and `delete` (docs/checkpoints.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from foreload.base.codec import LeftOut, to_stored
from foreload.base.progress import progress_bar
from foreload.trainer.checkpoints.contents import Checkpoint, checkpoints_in
from foreload.trainer.checkpoints.files import EXACT_BITS
from foreload.trainer.checkpoints.lineage import (
    check_there,
    delete,
)
from foreload.trainer.errors import CheckpointError, after_step
from foreload.trainer.run.directory import MANIFEST, Run
from foreload.trainer.run.manifest import Inexact, inexact_text
from foreload.trainer.storage import AnyFolder, place


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that can be used.

    Attributes:
        state: the state of the run at the checkpoint.
        run: the id of the run.
        rows: the rows of the model.
        rows_here: the rows that the checkpoint's own files hold.
        files: the number of the checkpoint's own files, without the manifest.
        bytes: the size of these files.
        total_bytes: the size of all files that the checkpoint needs, with those of its bases.
        base: the name of its base. If None, the checkpoint has all rows.
        bits: the fewest bits of any weight, in this checkpoint or its bases.
        deleted: the names of the checkpoints that were deleted when this one was saved.
    """

    checkpoint: str
    step: int
    state: str
    run: str
    schedule: str
    rows: int
    rows_here: int
    files: int
    bytes: int
    total_bytes: int
    base: str | None
    bits: int
    inexact: Inexact | None
    deleted: LeftOut[tuple[str, ...] | None] = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Return the facts in a checkpoint's manifest."""
        contents = checkpoint.contents
        return cls(
            str(checkpoint.place), contents.step, contents.state, contents.run.run_id, contents.run.stages[-1].path, checkpoint.row_count,
            checkpoint.rows_here, len(checkpoint.files), checkpoint.own_bytes, checkpoint.total_bytes,
            None if contents.base is None else contents.base.name, checkpoint.bits, contents.inexact,
        )  # fmt: skip

    def text(self) -> str:
        """Return one line, and another if checkpoints were deleted."""
        rows = f"{self.rows:,} rows"
        if self.base is not None:
            rows += f", {self.rows_here:,} of them here, changed since {self.base}"
        size = f"{self.files:,} files, {self.bytes / 2**20:,.1f} MiB"
        bits = "" if self.bits == EXACT_BITS else f", weights of {self.bits} bits"
        inexact = f"; {inexact_text(to_stored(self.inexact))}" if self.inexact else ""
        deleted = f"\ndeleted  {', '.join(self.deleted)}" if self.deleted else ""
        after = f"{after_step(self.step)} of {self.schedule}, {self.state}"
        return f"{self.checkpoint}: {after}; {rows}, {size}{bits}, of run {self.run}{inexact}{deleted}"


@dataclass(frozen=True, slots=True)
class Unusable:
    """A checkpoint that cannot be used, and why."""

    checkpoint: str
    why: str

    def text(self) -> str:
        """Return the reason as one line."""
        return f"{self.checkpoint}: cannot be used: {self.why}"


@dataclass(frozen=True, slots=True)
class Listed:
    """The checkpoints in a folder, or of a run.

    Attributes:
        checkpoints: a Saved or an Unusable for each.
    """

    # The element type is left open: for a union, the codec would write the kind of each element.
    checkpoints: list

    def text(self) -> str:
        """Return a line for each checkpoint."""
        return "\n".join(one.text() for one in self.checkpoints)


@dataclass(frozen=True, slots=True)
class Deleted:
    """Checkpoints that were deleted.

    Attributes:
        checkpoint: the path that the user gave.
        deleted: the paths of all checkpoints that were deleted.
    """

    checkpoint: str
    deleted: list[str]

    def text(self) -> str:
        """Return a line for each deleted checkpoint."""
        return "\n".join(f"deleted  {path}" for path in self.deleted)


def listed(path: str) -> Listed:
    """List the checkpoints in a folder, or in all checkpoint folders of a run.

    Raises:
        CheckpointError: the folder does not exist, or cannot be read.
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
    return Listed([_about(one, opened) for one in paths])


def _about(path: AnyFolder, opened: dict[str, Checkpoint]) -> Saved | Unusable:
    try:
        checkpoint = Checkpoint.open(path, opened)
        opened[checkpoint.sha256] = checkpoint
        return Saved.of(checkpoint)
    except CheckpointError as error:
        return Unusable(str(path), str(error))


def verified(path: str) -> Saved:
    """Compare every file of a checkpoint, and of its bases, with its manifest.

    Raises:
        CheckpointError: a file is damaged or missing; the message names the file.
    """
    checkpoint = Checkpoint.open(path)
    with progress_bar(checkpoint.total_bytes, "B") as bar:
        checkpoint.verify(bar.update)
    return Saved.of(checkpoint)


def deleted(path: str, with_increments: bool = False) -> Deleted:
    """Delete a checkpoint, which may be damaged.

    Args:
        with_increments: also delete the checkpoints that need this one.

    Raises:
        CheckpointError: there is no checkpoint at `path`, it cannot be deleted, or others need it.
    """
    checkpoint = place(path)
    check_there(checkpoint)
    return Deleted(path, [str(one) for one in delete(checkpoint, with_increments)])
