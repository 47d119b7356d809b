"""What a trainer tells of a step and of an evaluation pass; apart from the step itself, so that it can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a trainer tells of a training step.

    Rows are of its own lanes; samples and loss (mean over them) are of the whole step, the same on every trainer. seconds: wall time, of which
    waiting is that for rows of the store; bytes_sent: payload to other trainers.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    rows_used: int
    rows_arrived: int
    rows_fetched: int
    rows_written_back: int
    seconds: float
    seconds_compute: float
    seconds_exchange: float
    seconds_waiting: float
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The metrics of an evaluation pass after `epoch`, told by the trainer that leads.

    step: the last training step of the run before it, in whatever call that was; -1 before any.
    """

    step: int
    epoch: int
    samples: int
    log_loss: float
    auc: float
    normalized_entropy: float
