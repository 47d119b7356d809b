"""What a trainer tells of a step and of an evaluation pass; apart from the step itself, so that it can be read without torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from foreload.pipelines.base.memory import peak_bytes


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a trainer tells of a training step.

    Rows are of its own lanes; samples and loss (mean over them) are of the whole step, the same on every trainer. seconds: wall time, of which
    waiting is that for rows of the store; bytes_sent: payload to other trainers. seconds_processor: processor time of the trainer's process in
    that time, the traffic's included; seconds_thread: of it, that of the thread which runs the step.
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
    seconds_processor: float = 0.0
    seconds_thread: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The metrics of an evaluation pass after `epoch`, told by the trainer that leads.

    step: the last training step of the run before it, in whatever call that was; -1 before any. calibration: as `metrics.calibration` gives it.
    """

    step: int
    epoch: int
    samples: int
    log_loss: float
    auc: float
    normalized_entropy: float
    calibration: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process has used so far: peak_bytes: the most memory that it had at once; processor_seconds: of all its threads."""

    peak_bytes: int = 0
    processor_seconds: float = 0.0

    @classmethod
    def now(cls) -> ProcessUse:
        """Of this process."""
        return cls(peak_bytes(), time.process_time())
