"""Which checkpoint of a run had the best evaluation: kept beside the checkpoints, whatever else goes (`--keep-best`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypedDict

from foreload.pipelines.base.codec import Count, FormError, finite, of_json, parse_json
from foreload.pipelines.base.files import canonical
from foreload.trainer.checkpoints.contents import MANIFEST
from foreload.trainer.checkpoints.writable import folder_of
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.storage import AnyFolder, write_whole

BEST = "best.json"  # in the folder of checkpoints


class _Noted(TypedDict):
    """The content of the file."""

    run: str
    metric: str
    value: Annotated[float, finite]
    step: Count


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run so far: metric and value, after a training step. run_id: the run's."""

    run_id: str
    metric: str
    value: float
    step: int

    def write(self, folder: AnyFolder) -> None:
        """Note it in a folder of checkpoints, where there is one of its step, durably. Raises OSError and CheckpointUnreachable."""
        noted = _Noted(run=self.run_id, metric=self.metric, value=self.value, step=self.step)
        write_whole(folder / BEST, canonical(noted))


def best_in(folder: AnyFolder, run_id: str | None = None) -> Best | None:
    """Return what is noted in a folder of checkpoints, of a run if one is named.

    Returns None if nothing is, if what it names is not there, or if the file is damaged: the next best evaluation then replaces it.
    """
    try:
        best = _read(folder)
    except (OSError, FormError):
        return None
    return best if run_id in (None, best.run_id) and (folder / folder_of(best.step) / MANIFEST).is_file() else None


def _read(folder: AnyFolder) -> Best:
    """Raises OSError and FormError."""
    noted = of_json(parse_json((folder / BEST).read_bytes()), _Noted)
    return Best(noted["run"], noted["metric"], noted["value"], noted["step"])


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
