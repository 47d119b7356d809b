"""A checkpoint that is being written: there is nothing of it until it is published, and then it is there whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from foreload.pipelines.base.files import is_full, put_in_place, remove_path, remove_unfinished
from foreload.trainer.checkpoints.format import Checkpoint, Contents
from foreload.trainer.checkpoints.lineage import holding
from foreload.trainer.checkpoints.writer import check_absent, folder_of
from foreload.trainer.errors import CheckpointError


class Draft:
    """Beside the checkpoints in a folder, which is made if it is not there. One is written there at a time: a lock is held until it is over.

    path: of the folder in which its files are put, by several processes if need be. Raises CheckpointError where it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._held = folder, contextlib.ExitStack()
        self.path = folder / f".{folder_of('*').replace('*', 'draft')}.{os.urandom(8).hex()}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(holding(folder, "--checkpoint-every"))
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
        return CheckpointError(f"checkpoints in {self.folder}: cannot write there: {why}")

    def write_manifest(self, contents: Contents) -> None:
        """Put the manifest beside the other files, which are all there. Raises CheckpointError."""
        try:
            check_absent(self.folder, contents.step)
            contents.write(self.path)
        except OSError as error:
            raise self.failure(error) from error

    def publish(self, step: int) -> Checkpoint:
        """Give it its name, on the disk. Raises CheckpointError."""
        place = self.folder / folder_of(step)
        try:
            put_in_place(self.path, place, durable=True)
        except OSError as error:
            raise self.failure(error) from error
        self._held.close()
        return Checkpoint.open(place)

    def discard(self) -> None:
        """Leave nothing of it. Whoever still writes there fails."""
        remove_path(self.path)
        self._held.close()
