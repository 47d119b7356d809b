"""Which checkpoint of a run had the best evaluation: kept beside the checkpoints, whatever else goes (`--keep-best`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foreload.base.codec import Count, FormError, finite, of_json, parse_json, to_stored
from foreload.base.files import canonical
from foreload.trainer.checkpoints.contents import MANIFEST
from foreload.trainer.checkpoints.writable import folder_of
from foreload.trainer.errors import CheckpointError
from foreload.trainer.storage import AnyFolder, write_whole

BEST = "best.json"  # in the folder of checkpoints


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run so far: metric and value, after a training step. run: the run's id."""

    run: str
    metric: str
    value: Annotated[float, finite]
    step: Count

    def write(self, folder: AnyFolder) -> None:
        """Note it in a folder of checkpoints, where there is one of its step, durably. Raises OSError and CheckpointUnreachable."""
        write_whole(folder / BEST, canonical(to_stored(self)))


def best_in(folder: AnyFolder, run_id: str | None = None) -> Best | None:
    """Return what is noted in a folder of checkpoints, of a run if one is named.

    Returns None if nothing is, if what it names is not there, or if the file is damaged: the next best evaluation then replaces it.
    """
    try:
        best = _read(folder)
    except (OSError, FormError):
        return None
    return best if run_id in (None, best.run) and (folder / folder_of(best.step) / MANIFEST).is_file() else None


def _read(folder: AnyFolder) -> Best:
    """Raises OSError and FormError."""
    return of_json(parse_json((folder / BEST).read_bytes()), Best)


def best_checkpoint(folder: AnyFolder) -> AnyFolder:
    """The folder of the best checkpoint in a folder of checkpoints. Raises CheckpointError where none is noted, or the note is damaged."""
    try:
        _read(folder)
    except OSError:
        pass
    except FormError as error:
        raise CheckpointError(
            f"--best: {folder / BEST} is damaged: {error}; name a checkpoint, or delete the file: training with --keep-best writes it anew"
        ) from error
    best = best_in(folder)
    if best is None:
        raise CheckpointError(
            f"--best: no best checkpoint is noted in {folder}; train with --keep-best METRIC, on a schedule with evaluation"
        )
    return folder / folder_of(best.step)
