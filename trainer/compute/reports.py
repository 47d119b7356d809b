"""What a trainer tells of a step and of an evaluation pass; apart from the step itself, so that it can be read without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelMetrics:
    """The metrics of a label. None: it has no such metric; nan: it is not defined for these samples.

    Of clicks: log_loss: nats a sample; auc: the area under the ROC curve, ties counted half; normalized_entropy: log_loss over the entropy of the
    samples' click rate (He et al. 2014, Practical lessons from predicting clicks on ads at Facebook); calibration: as `metrics.calibration` gives it;
    grouped_auc: where there is a group column, the mean of the groups' AUC, weighted by their samples (Zhou et al. 2018, Deep interest network).
    Of numbers: rmse, mae: root of the mean square, and mean absolute value, of the error.
    Of both: predicted_over_observed: the sum of what is predicted, of clicks their probabilities, over the sum of what was observed.
    """

    log_loss: float | None = None
    auc: float | None = None
    normalized_entropy: float | None = None
    predicted_over_observed: float | None = None
    grouped_auc: float | None = None
    rmse: float | None = None
    mae: float | None = None
    calibration: tuple[tuple[float, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What a label has, as JSON."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}


def without_calibration(told: Mapping[str, Any]) -> dict[str, Any]:
    """What `EvaluationReport.to_dict` tells but for the calibration, also of its labels: one number a metric."""
    plain = {name: value for name, value in told.items() if name != "calibration"}
    if "labels" in plain:
        plain["labels"] = {name: without_calibration(label) for name, label in plain["labels"].items()}
    return plain


_ALWAYS_TOLD = ("log_loss", "auc", "normalized_entropy")  # null where the label has none


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The metrics of an evaluation set in a pass after `epoch`, told by the trainer that leads: of the first label, as `LabelMetrics` has them, and
    of all.

    step: the last training step of the run before it, in whatever call that was; -1 before any. loss: the mean of the trained loss over the
    samples, None where that is the log loss. labels: where there are several, all of them by name. set: its name, "" of the one without.
    """

    step: int
    epoch: int
    samples: int
    log_loss: float | None
    auc: float | None
    normalized_entropy: float | None
    calibration: tuple[tuple[float, ...], ...] = ()
    predicted_over_observed: float | None = None
    grouped_auc: float | None = None
    rmse: float | None = None
    mae: float | None = None
    loss: float | None = None
    labels: dict[str, LabelMetrics] = field(default_factory=dict)
    set: str = ""

    @classmethod
    def of(
        cls, step: int, epoch: int, samples: int, labels: Mapping[str, LabelMetrics], loss: float | None = None, name: str = ""
    ) -> EvaluationReport:
        """From the metrics of every label by name, in order. name: of the set."""
        first = {item.name: getattr(next(iter(labels.values())), item.name) for item in fields(LabelMetrics)}
        of_labels = dict(labels) if len(labels) > 1 else {}
        return cls(step=step, epoch=epoch, samples=samples, loss=loss, labels=of_labels, set=name, **first)

    def to_dict(self) -> dict[str, Any]:
        """As metrics.jsonl has it, without what there is not."""
        told = {name: value for name, value in asdict(self).items() if value is not None or name in _ALWAYS_TOLD}
        told["labels"] = {name: label.to_dict() for name, label in self.labels.items()}
        for name in [name for name in ("labels", "set") if not told[name]]:
            del told[name]
        return told


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process has used so far: peak_bytes: the most memory that it had at once; processor_seconds: of all its threads."""

    peak_bytes: int = 0
    processor_seconds: float = 0.0

    @classmethod
    def now(cls) -> ProcessUse:
        """Of this process."""
        return cls(peak_bytes(), time.process_time())
