"""The exceptions of training. Each message is one line: field, rule, value, remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreload.base.errors import ROWS_LOST, ForeloadError


class TrainerError(ForeloadError):
    """The base class of errors that stop a training command for a reason that its user can act on."""

    code = "trainer"


class ModelError(TrainerError):
    """A model cannot be loaded, built or trained exactly, does not fit the schedule, or its code differs from the run's."""

    code = "model"
    permanent = True


class FingerprintError(TrainerError):
    """A trainer's arithmetic may give other bits than that of the run that it wants to join."""

    code = "fingerprint"


class LossNotFinite(TrainerError):
    """The loss of a training or evaluation step is NaN or infinite in a lane; the step is not applied."""

    code = "loss-not-finite"
    permanent = True

    def __init__(self, step: str, lane: int, loss: float) -> None:
        super().__init__(f"{step}: the loss must be finite in every lane; got {loss} in lane {lane}")


class DenseDiverged(TrainerError):
    """Trainers of a run have different values in the dense part of the model."""

    code = "dense-diverged"


class StoreTooSmall(TrainerError):
    """A server's maxmemory is too small for the rows of the schedule, as computed before training."""

    code = "store-too-small"


class RunError(TrainerError):
    """A run folder or a file in it is missing, damaged, or in another state than the command needs."""

    code = "run"


class RunRefused(RunError):
    """A run cannot go on as asked: it is damaged, was started with other settings, or its rows are of no known step."""

    code = "run-refused"
    permanent = True


class CheckpointError(TrainerError):
    """A checkpoint is missing, unfinished, damaged or of another version, or cannot be written or used as asked."""

    code = "checkpoint"


class CheckpointUnreachable(CheckpointError):
    """An object store with checkpoints does not do what it is asked, in spite of retries."""

    code = "checkpoint-unreachable"


class FolderBusy(CheckpointError):
    """Another checkpoint is being saved to, or deleted from, the same folder right now."""

    code = "checkpoint-folder-busy"


class ExportError(TrainerError):
    """An export is missing, damaged, of another model, not the next one, or cannot be written or applied."""

    code = "export"


class MessageError(TrainerError):
    """A message between processes of a job, or on the control socket, is invalid: do both run the same foreload?"""

    code = "message"


class HistoryError(TrainerError):
    """A history of profiles cannot be read or written, or has a later version; for `train` it is a warning."""

    code = "history"


class PlanError(TrainerError):
    """No plan can be made: nothing fits, or there is no measurement of how long a step takes."""

    code = "plan"


class PeerLost(TrainerError):
    """Another trainer of the job was lost, or was silent for longer than the timeout."""

    code = "peer-lost"


class ShardsLost(TrainerError):
    """More store shards are lost than parity covers, for some trainer, so rows are lost.

    The launcher makes this error from the RowsLost (cache/errors.py) with which trainers ended, each
    for its own lanes. RowsLost in the launcher itself is about rows that were missing when it looked,
    as before a resume. The end of local stores depends on that difference
    (`Launcher._end_stores`), and programs distinguish the two by their codes.

    Attributes:
        shards: the lost shards.
    """

    code = "shards-lost"
    exit_status = ROWS_LOST

    def __init__(self, message: str, shards: Sequence[int]) -> None:
        super().__init__(message)
        self.shards = tuple(shards)


class LanesLost(TrainerError):
    """More trainers are lost at once than replicas cover: a lane has neither its owner nor a complete replica.

    Attributes:
        lanes: the lanes without an owner and a complete replica.
        trainers: the lost trainers.
    """

    code = "lanes-lost"
    exit_status = ROWS_LOST

    def __init__(self, lanes: Sequence[int], trainers: Sequence[int], how: Mapping[int, str] | None = None) -> None:
        """Create the error.

        Args:
            how: how trainers were lost, as far as that is known.
        """
        known = how or {}
        named = ", ".join(f"{trainer} ({known[trainer]})" if trainer in known else str(trainer) for trainer in trainers)
        super().__init__(
            f"trainer {named}: lost, and with it the last steps of lane {', '.join(map(str, lanes))}, of which no other trainer has a complete copy; "
            "the store is left as it is; --resume goes on from the last clean stop if its rows are still there, or says what is missing; "
            "more --copies survive more losses"
        )
        self.lanes, self.trainers = tuple(lanes), tuple(trainers)


def after_step(step: int) -> str:
    """Describe a moment by the last training step before it.

    Args:
        step: the training step, or -1 if no step was trained.
    """
    return "before the first step" if step < 0 else f"after step {step}"
