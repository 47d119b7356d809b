"""The exceptions of training; each message is one line: field, rule, value, remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreload.base.errors import ROWS_LOST, ForeloadError


class TrainerError(ForeloadError):
    """Anything that stops a training command for a reason that its user can act on."""

    code = "trainer"


class ModelError(TrainerError):
    """A model that cannot be loaded or built, does not fit the schedule, cannot be trained exactly, or has other code than the run."""

    code = "model"
    permanent = True


class FingerprintError(TrainerError):
    """A trainer whose arithmetic may give other bits than that of the run which it wants to join."""

    code = "fingerprint"


class LossNotFinite(TrainerError):
    """A training or evaluation step whose loss is NaN or infinite in a lane; nothing of a training step is applied then."""

    code = "loss-not-finite"
    permanent = True

    def __init__(self, step: str, lane: int, loss: float) -> None:
        super().__init__(f"{step}: the loss must be finite in every lane; got {loss} in lane {lane}")


class DenseDiverged(TrainerError):
    """Trainers of a run that have different values in the dense part of the model, which must be the same on all of them."""

    code = "dense-diverged"


class StoreTooSmall(TrainerError):
    """A store shard's server has a maxmemory that the rows of the schedule will not fit, as is known before training begins."""

    code = "store-too-small"


class RunError(TrainerError):
    """A run directory, or what it holds, that is missing, damaged, or in another state than the command needs."""

    code = "run"


class RunRefused(RunError):
    """A run that cannot go on as it is asked to, or not at all: it is damaged, was started with something else, or its rows are of no known step."""

    code = "run-refused"
    permanent = True


class CheckpointError(TrainerError):
    """A checkpoint that is missing, unfinished, damaged or of another version, or that cannot be written or used as asked."""

    code = "checkpoint"


class CheckpointUnreachable(CheckpointError):
    """An object store that has checkpoints, or is to have them, and does not do what it was asked, however often."""

    code = "checkpoint-unreachable"


class FolderBusy(CheckpointError):
    """A folder of checkpoints in which another checkpoint is being saved, or deleted, right now."""

    code = "checkpoint-folder-busy"


class ExportError(TrainerError):
    """An export that is missing, damaged, of another model or not the next one, or that cannot be written or applied where it is to be."""

    code = "export"


class MessageError(TrainerError):
    """A message between processes of a job, or on the control socket of a run, that is not what it must be; do both run the same foreload?"""

    code = "message"


class HistoryError(TrainerError):
    """A history of profiles that cannot be read or written, or is of a later version; to a run that leaves its profile it is a warning."""

    code = "history"


class PlanError(TrainerError):
    """A plan that cannot be made: nothing fits what there is, or nothing tells how long a step takes."""

    code = "plan"


class PeerLost(TrainerError):
    """Another trainer of the job is gone, or was silent for longer than the timeout."""

    code = "peer-lost"


class ShardsLost(TrainerError):
    """More store shards are lost than parity covers, for some trainer: rows are gone. shards: the lost ones.

    The launcher makes it of the RowsLost (cache/errors.py) that trainers ended with, each for its own lanes. It is a class of its own since it says
    one thing more: trainers lost them. RowsLost in the launcher itself is of rows that were not there when it looked, as before a resume. By that the
    end of local stores differs (`Launcher._end_stores`), and programs tell the two apart by their codes.
    """

    code = "shards-lost"
    exit_status = ROWS_LOST

    def __init__(self, message: str, shards: Sequence[int]) -> None:
        super().__init__(message)
        self.shards = tuple(shards)


class LanesLost(TrainerError):
    """More trainers are lost at once than copies cover: a lane has neither its owner nor a complete copy. lanes: which; trainers: the lost ones."""

    code = "lanes-lost"
    exit_status = ROWS_LOST

    def __init__(self, lanes: Sequence[int], trainers: Sequence[int], how: Mapping[int, str] | None = None) -> None:
        """how: trainers were lost, as far as that is known."""
        known = how or {}
        named = ", ".join(f"{trainer} ({known[trainer]})" if trainer in known else str(trainer) for trainer in trainers)
        super().__init__(
            f"trainer {named}: lost, and with it the last steps of lane {', '.join(map(str, lanes))}, of which no other trainer has a complete copy; "
            "the store is left as it is; --resume goes on from the last clean stop if its rows are still there, or says what is missing; "
            "more --copies survive more losses"
        )
        self.lanes, self.trainers = tuple(lanes), tuple(trainers)


def after_step(step: int) -> str:
    """When something was, in words: behind a training step; -1: none was trained."""
    return "before the first step" if step < 0 else f"after step {step}"
