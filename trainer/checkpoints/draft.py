"""A checkpoint that is being written: there is nothing of it until it is published, and then it is there whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from foreload.pipelines.base.files import is_full, put_in_place, remove_path, remove_unfinished
from foreload.trainer.checkpoints.format import Checkpoint, Contents
from foreload.trainer.checkpoints.lineage import holding
from foreload.trainer.errors import CheckpointError


def folder_of(step: int | Literal["*"]) -> str:
    """What the folder of a checkpoint is called, or the pattern of these names. step: the last one trained."""
    return f"step-{step}"


def check_absent(folder: Path, step: int) -> None:
    """Raise CheckpointError where a checkpoint of this step cannot be saved in a folder of checkpoints, since there is one."""
    if os.path.exists(folder / folder_of(step)):
        raise CheckpointError(
            f"checkpoint {folder / folder_of(step)}: exists already; delete it with `foreload checkpoint delete`, or choose another folder"
        )


class Draft:
    """Beside the checkpoints in a folder, which is made if it is not there. One is written there at a time: a lock is held until it is over.

    field: what named the folder, in messages. path: of the folder in which its files are put, by several processes if need be. Raises
    CheckpointError where it cannot be written.
    """

    def __init__(self, folder: Path, field: str) -> None:
        self.folder, self._field, self._held = folder, field, contextlib.ExitStack()
        self.path = folder / f".{folder_of('*').replace('*', 'draft')}.{os.urandom(8).hex()}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(holding(folder, field))
            # Of whoever was killed.
            remove_unfinished(folder, folder_of("*"))
            self.path.mkdir()
        except OSError as error:
            self.discard()
            raise self.failure(error) from error

    def failure(self, error: OSError) -> CheckpointError:
        """What to tell of an error met while it was written."""
        if is_full(error):
            why = "the disk is full, and nothing of the checkpoint is left there; free space, or choose another folder"
        else:
            why = f"{error.strerror or error}; make it writable, or choose another folder"
        return CheckpointError(f"{self._field}: cannot write to {self.folder}: {why}")

    def publish(self, contents: Contents, on_manifest: Callable[[], object] = lambda: None) -> Checkpoint:
        """Put the manifest beside the other files, which are all there, and give it its name, on the disk. on_manifest: called between the two.

        Raises CheckpointError, after which there is nothing of it.
        """
        place = self.folder / folder_of(contents.step)
        try:
            check_absent(self.folder, contents.step)
            contents.write(self.path)
            on_manifest()
            put_in_place(self.path, place, durable=True)
        except OSError as error:
            raise self.failure(error) from error
        finally:
            self.discard()
        return Checkpoint.open(place)

    def discard(self) -> None:
        """Leave nothing of what is not published. Whoever still writes there fails."""
        remove_path(self.path)
        self._held.close()


def published(folder: Path, field: str, step: int, write: Callable[[Path], Contents]) -> Checkpoint:
    """A checkpoint of a step in a folder of checkpoints, which is made if it is not there: whole, on the disk, or not at all.

    field: as for a Draft. write: puts all files but the manifest into the folder that it is given, and returns what the manifest is to say. Raises
    CheckpointError, and what `write` raises but OSError.
    """
    draft = Draft(folder, field)
    try:
        check_absent(folder, step)
        return draft.publish(write(draft.path))
    except OSError as error:
        raise draft.failure(error) from error
    finally:
        draft.discard()
