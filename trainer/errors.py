"""The exceptions of training; each message is one line: field, rule, value, remedy."""

from __future__ import annotations

from collections.abc import Sequence


class TrainerError(Exception):
    """Anything that stops a training command for a reason that its user can act on."""


class JobError(TrainerError):
    """A setting of the job (a flag or a line of the job file) that is unknown, malformed, or does not fit the others."""


class ModelError(TrainerError):
    """A model that cannot be loaded or built, does not fit the schedule, or cannot be trained exactly."""


class FingerprintError(TrainerError):
    """A trainer whose arithmetic may give other bits than that of the run which it wants to join."""


class LossNotFinite(TrainerError):
    """A training or evaluation step whose loss is NaN or infinite in a lane; nothing of a training step is applied then."""

    def __init__(self, step: str, lane: int, loss: float) -> None:
        super().__init__(f"{step}: the loss must be finite in every lane; got {loss} in lane {lane}")


class RunError(TrainerError):
    """A run directory, or what it holds, that is missing, damaged, or in another state than the command needs."""


class PeerLost(TrainerError):
    """Another trainer of the job is gone, or was silent for longer than the timeout."""


class ShardsLost(TrainerError):
    """More store shards are lost than parity covers: rows are gone. `foreload train` exits with 3. shards: the lost ones."""

    def __init__(self, message: str, shards: Sequence[int]) -> None:
        super().__init__(message)
        self.shards = tuple(shards)
