"""The best evaluation of a run: the record of it, its checkpoint, and whether a run stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from foreload.base.codec import Count, FormError, fault, finite, of_json, parse_json, to_stored
from foreload.base.files import canonical
from foreload.trainer.checkpoints.contents import MANIFEST
from foreload.trainer.checkpoints.draft import folder_of
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.directory import MANIFEST as RUN_MANIFEST
from foreload.trainer.run.directory import Run
from foreload.trainer.storage import AnyFolder, place, write_whole

BEST = "best.json"  # in the folder of checkpoints


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run so far, after a training step.

    Attributes:
        run: The run's id.
        step: The last step trained before the evaluation.
    """

    run: str
    metric: str
    value: Annotated[float, finite]
    step: Count

    def write(self, folder: AnyFolder) -> None:
        """Record it, durably, in a folder of checkpoints that has a checkpoint of its step.

        Raises OSError and CheckpointUnreachable.
        """
        write_whole(folder / BEST, canonical(to_stored(self)))


def best_in(folder: AnyFolder, run_id: str | None = None) -> Best | None:
    """Return the best evaluation that a folder of checkpoints records, of a run if one is named.

    Returns None if none is recorded, if the checkpoint that the record names does not exist, or if
    the file is damaged. The next best evaluation then replaces the record.
    """
    try:
        best = _read(folder)
    except (OSError, FormError):
        return None
    return best if run_id in (None, best.run) and (folder / folder_of(best.step) / MANIFEST).is_file() else None


def _read(folder: AnyFolder) -> Best:
    """Read the record of the best evaluation. Raises OSError and FormError."""
    return of_json(parse_json((folder / BEST).read_bytes()), Best)


def best_checkpoint(folder: AnyFolder) -> AnyFolder:
    """Return the folder of the best checkpoint in a folder of checkpoints.

    Raises CheckpointError if none is recorded, or the record is damaged.
    """
    try:
        _read(folder)
    except OSError:
        pass
    except FormError as error:
        raise CheckpointError(
            fault(
                f"--best: {folder / BEST}",
                error,
                "name a checkpoint, or delete the file: training with --keep-best writes it again",
            )
        ) from error
    best = best_in(folder)
    if best is None:
        raise CheckpointError(
            f"--best: no best checkpoint is recorded in {folder}; train with --keep-best METRIC, on a schedule with evaluation"
        )
    return folder / folder_of(best.step)


def best_model(path: str) -> AnyFolder:
    """Return the checkpoint with the best evaluation, of a run or in a folder of checkpoints.

    Raises:
        CheckpointError: no best checkpoint is recorded.
    """
    folder = place(path)
    run = run_at(folder)
    recorded = [] if run is None else _recorded(run)
    return recorded[0].checkpoint if recorded else best_checkpoint(folder if run is None else run.checkpoint_folders()[0])


class KeptBest(NamedTuple):
    """The best evaluation of a run, and its checkpoint."""

    best: Best
    checkpoint: AnyFolder


def kept_best(run: Run) -> KeptBest | None:
    """Return the best evaluation of a run that stands for it.

    A run does if it was trained with --stop-early and --keep-best, and is over. Otherwise it stands
    for the model of its end, and this returns None.
    """
    rule, status, watched = run.manifest.training_job.stop_early, run.status, run.manifest.watched
    if rule is None or status is None:
        return None
    over = status.state == "ended" or (status.state == "stopped" and watched is not None and watched.ends(rule))
    return next(iter(_recorded(run)), None) if over else None


def run_at(folder: AnyFolder) -> Run | None:
    """Return the run in a folder, or None if there is none."""
    return Run.open(folder) if isinstance(folder, Path) and (folder / RUN_MANIFEST).exists() else None


def _recorded(run: Run) -> list[KeptBest]:
    """Return the best evaluation of a run as each folder of its checkpoints records it, if it does."""
    bests = ((folder, best_in(folder, run.manifest.run_id)) for folder in run.checkpoint_folders())
    return [KeptBest(best, folder / folder_of(best.step)) for folder, best in bests if best is not None]
