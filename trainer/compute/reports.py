"""What a trainer tells of a step and of an evaluation pass; apart from the step itself, so that it can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a trainer tells of a training step. Rows are of its own lanes; loss is of the whole step, the same on every trainer."""

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
    """An evaluation pass, on the trainer that leads: the metrics after `epoch`, whose last training step was `step`."""

    step: int
    epoch: int
    samples: int
    log_loss: float
    auc: float
    normalized_entropy: float
