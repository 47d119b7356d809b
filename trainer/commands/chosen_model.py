"""Which model of a run a command uses: that of its end, or that of its best evaluation."""

from __future__ import annotations

import sys

from foreload.base.errors import SettingError
from foreload.trainer.checkpoints.best import best_model, kept_best, run_at
from foreload.trainer.errors import after_step
from foreload.trainer.storage import place


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
        return str(best_model(path))
    run = None if last else run_at(place(path))
    kept = None if run is None else kept_best(run)
    if kept is None:
        return path
    sys.stderr.write(
        f"foreload: note: run {path}: has --stop-early and --keep-best, so its best evaluation is used, {kept.best.metric} "
        f"{kept.best.value:.6g} {after_step(kept.best.step)} (checkpoint {kept.checkpoint}); --last uses the model of its end\n"
    )
    return str(kept.checkpoint)
