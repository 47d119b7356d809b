"""Which model of a run a command uses: that of its end, or that of its best evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

from foreload.base.errors import SettingError
from foreload.trainer.checkpoints.lineage import best_checkpoint, best_in
from foreload.trainer.errors import after_step
from foreload.trainer.run.directory import MANIFEST, Run
from foreload.trainer.storage import AnyFolder, place


def chosen_model(path: str, best: bool = False, last: bool = False) -> str:
    """Return the path of the model that a command is to use.

    A run that ended with --stop-early and --keep-best stands for its best checkpoint. A line on
    stderr says so.

    Args:
        path: of a run, a checkpoint or, with `best`, a folder of checkpoints.
        best: whether to use the checkpoint of the best evaluation.
        last: whether to use the model of a run's end in any case.

    Raises:
        SettingError: both are asked for.
        CheckpointError: the best checkpoint is asked for, and none is recorded.
    """
    if best and last:
        raise SettingError("--best and --last: only one of them can be given")
    if best:
        return best_model(path)
    run = None if last else _run_at(place(path))
    if run is None or not _stands_for_its_best(run) or not (folders := _recording(run)):
        return path
    checkpoint, kept = str(best_checkpoint(folders[0])), best_in(folders[0])
    assert kept is not None
    sys.stderr.write(
        f"foreload: note: run {path}: has --stop-early and --keep-best, so its best evaluation is used, {kept.metric} {kept.value:.6g} "
        f"{after_step(kept.step)} (checkpoint {checkpoint}); --last uses the model of its end\n"
    )
    return checkpoint


def best_model(path: str) -> str:
    """Return the checkpoint with the best evaluation, of a run or in a folder of checkpoints.

    Raises:
        CheckpointError: no best checkpoint is recorded.
    """
    folder = place(path)
    run = _run_at(folder)
    return str(best_checkpoint(folder if run is None else (_recording(run) or run.checkpoint_folders())[0]))


def _run_at(folder: AnyFolder) -> Run | None:
    return Run.open(folder) if isinstance(folder, Path) and (folder / MANIFEST).exists() else None


def _recording(run: Run) -> list[AnyFolder]:
    """Return the folders of a run's checkpoints that record its best evaluation."""
    return [folder for folder in run.checkpoint_folders() if best_in(folder, run.manifest.run_id) is not None]


def _stands_for_its_best(run: Run) -> bool:
    """Whether a run was trained with --stop-early, and is over. Only --keep-best records a best."""
    rule, status, watched = run.manifest.training_job.stop_early, run.status, run.manifest.watched
    if rule is None or status is None:
        return False
    return status.state == "ended" or (status.state == "stopped" and watched is not None and watched.ends(rule))
