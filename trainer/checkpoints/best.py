"""Which checkpoint of a run had the best evaluation: kept beside the checkpoints, whatever else goes (`--keep-best`)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from foreload.pipelines.base.files import canonical
from foreload.trainer.checkpoints.contents import MANIFEST
from foreload.trainer.checkpoints.writable import folder_of
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.storage import AnyFolder, write_whole

BEST = "best.json"  # in the folder of checkpoints


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run so far: metric and value, after a training step. run_id: the run's."""

    run_id: str
    metric: str
    value: float
    step: int

    def write(self, folder: AnyFolder) -> None:
        """Note it in a folder of checkpoints, where there is one of its step, durably. Raises OSError and CheckpointUnreachable."""
        told = {"run": self.run_id, "metric": self.metric, "value": self.value, "step": self.step}
        write_whole(folder / BEST, canonical(told))


def best_in(folder: AnyFolder, run_id: str | None = None) -> Best | None:
    """What is noted in a folder of checkpoints, of a run if one is named; None where nothing is, or what it names is not there."""
    try:
        told = json.loads((folder / BEST).read_text(encoding="utf-8"))
        best = Best(str(told["run"]), str(told["metric"]), float(told["value"]), int(told["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return best if run_id in (None, best.run_id) and (folder / folder_of(best.step) / MANIFEST).is_file() else None


def best_checkpoint(folder: AnyFolder) -> AnyFolder:
    """The folder of the best checkpoint in a folder of checkpoints. Raises CheckpointError where none is noted."""
    best = best_in(folder)
    if best is None:
        raise CheckpointError(
            f"--best: no best checkpoint is noted in {folder}; train with --keep-best METRIC, on a schedule with evaluation"
        )
    return folder / folder_of(best.step)
