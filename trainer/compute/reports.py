"""The figures of a step, of all steps and of an evaluation pass, and metrics as text.

This imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from foreload.base.codec import LeftOut

if TYPE_CHECKING:
    import numpy as np


def _rows(count: Callable[[np.ndarray, np.ndarray, np.ndarray], int]) -> dict[str, Any]:
    """Return the metadata of a number of rows that the schedule determines.

    Args:
        count: counts the rows of a lane from the slots that a step uses, the tags of the rows that
            arrive, and the slots that become free before the step.
    """
    return {"rule": "sum", "count": count}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures that one trainer reports of a training step.

    Each has a rule by which the figures of all trainers become that of the step: their sum, the
    longest, or the figure of the slowest trainer. A figure without a rule is the same on every
    trainer.

    Attributes:
        samples: the samples of the whole step.
        loss: the mean loss over the samples of the whole step.
        rows_used: the rows of the trainer's own lanes that the step used, and likewise for the
            other counts of rows.
        seconds: wall time.
        seconds_waiting: the part of `seconds` spent waiting for rows of the store.
        bytes_sent: payload to other trainers.
        seconds_processor: processor time of the trainer's process in that time, including the
            traffic's.
        seconds_thread: the part of it spent in the thread that runs the step.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    rows_used: int = field(metadata=_rows(lambda slots, tags, ends: slots.size))
    rows_arrived: int = field(metadata=_rows(lambda slots, tags, ends: tags.size))
    rows_fetched: int = field(metadata=_rows(lambda slots, tags, ends: int((tags != 0).sum())))
    rows_written_back: int = field(metadata=_rows(lambda slots, tags, ends: ends.size))
    seconds: float = field(metadata={"rule": "slowest"})
    seconds_compute: float = field(metadata={"rule": "slowest"})
    seconds_exchange: float = field(metadata={"rule": "slowest"})
    seconds_waiting: float = field(metadata={"rule": "longest"})
    bytes_sent: int = field(metadata={"rule": "sum"})
    seconds_processor: float = field(default=0.0, metadata={"rule": "sum"})
    seconds_thread: float = field(default=0.0, metadata={"rule": "longest"})


@dataclass(frozen=True, slots=True)
class StepLine:
    """The figures of a training step in metrics.jsonl, in this order. Times are in milliseconds.

    Attributes:
        without: trainers that were lost before they reported the step. Their times and bytes are
            missing.
    """

    step: int
    epoch: int
    samples: int
    loss: float | None
    rows_used: int
    rows_arrived: int
    rows_fetched: int
    rows_written_back: int
    bytes_sent: int
    ms: float
    ms_compute: float
    ms_exchange: float
    ms_waiting: float
    ms_processor: float = 0.0
    ms_thread: float = 0.0
    without: tuple[int, ...] = ()
    kind: str = "step"


@dataclass(slots=True)
class Totals:
    """The sums of the figures of all steps so far.

    Attributes:
        rows_written_back: as the schedule says.
        rows_flushed: rows written back beyond the schedule, at clean stops.
        seconds: the time of the steps, over all calls of a run.
        steps_incomplete: steps whose times and bytes lack those of a trainer that was lost.
    """

    steps: int = 0
    samples: int = 0
    rows_used: int = 0
    rows_arrived: int = 0
    rows_fetched: int = 0
    rows_written_back: int = 0
    rows_flushed: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    seconds_compute: float = 0.0
    seconds_exchange: float = 0.0
    seconds_waiting: float = 0.0
    steps_incomplete: int = 0

    def add(self, report: StepReport) -> None:
        """Count a step that one trainer reports."""
        self.steps += 1
        self._add({figure.name: getattr(report, figure.name) for figure in SUMMED})

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Count a step by its line of metrics.jsonl."""
        self.steps += 1
        self.steps_incomplete += "without" in line
        self._add({figure.name: line[figure.column] / 1000 if figure.is_time else line[figure.column] for figure in SUMMED})

    def add_call(self, trainers: Sequence[Totals], first: Totals, rows: Mapping[str, int]) -> None:
        """Count a call by the totals of its trainers.

        Args:
            trainers: the totals of each trainer.
            first: the totals of the trainer whose times stand for all.
            rows: figures that are known from elsewhere, since those of a trainer are missing.
        """
        self.steps += first.steps
        own = {figure.name: trainers if figure.rule == "sum" else [first] for figure in SUMMED}
        self._add({**{name: sum(getattr(one, name) for one in counted) for name, counted in own.items()}, **rows})

    def _add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            setattr(self, name, getattr(self, name) + value)

    def shared(self) -> Totals:
        """Return the part of one trainer's totals that holds for all trainers.

        A trainer that joins begins with these.
        """
        return Totals(self.steps, **{figure.name: getattr(self, figure.name) for figure in SUMMED if figure.rule != "sum"})

    def counts(self) -> dict[str, int]:
        """Return rows, bytes and incomplete steps, as in summary.json."""
        others = {"steps", "samples", *(figure.name for figure in SUMMED if figure.is_time)}
        return {name: value for name, value in asdict(self).items() if name not in others}

    def means(self) -> dict[str, float]:
        """Return shares, and milliseconds per step, as in summary.json.

        They are nan before the first step.
        """
        times = {"ms_step" if figure.column == "ms" else figure.column: figure.name for figure in SUMMED if figure.is_time}
        return {
            "cache_hit_rate": 1 - self.rows_arrived / self.rows_used if self.rows_used else math.nan,
            "wait_fraction": self.seconds_waiting / self.seconds if self.seconds else math.nan,
            **{name: 1000 * getattr(self, of) / self.steps if self.steps else math.nan for name, of in times.items()},
        }

    @property
    def samples_per_second(self) -> float:
        """The samples per second of the steps' time, without start and evaluation.

        It is nan before the first step.
        """
        return self.samples / self.seconds if self.seconds else math.nan


@dataclass(frozen=True, slots=True)
class StepsSummary:
    """What summary.json says about all steps and the last evaluation.

    The other metrics of that evaluation are elsewhere in summary.json.
    """

    state: str
    steps: int
    samples: int
    last_step: int
    samples_per_second: float | None
    log_loss: float | None
    auc: float | None
    normalized_entropy: float | None
    rows_used: int
    rows_arrived: int
    rows_fetched: int
    rows_written_back: int
    rows_flushed: int
    bytes_sent: int
    cache_hit_rate: float | None
    wait_fraction: float | None
    ms_step: float | None
    ms_compute: float | None
    ms_exchange: float | None
    ms_waiting: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a step.

    Attributes:
        name: its name in StepReport and Totals, where times are in seconds.
        column: its name in StepLine, where times are in milliseconds.
        default: the value for lines of earlier versions that lack it. If MISSING, no line lacks it.
        rule: as in StepReport.
        count: as in `_rows`.
    """

    name: str
    column: str
    default: Any
    rule: Literal["same", "sum", "longest", "slowest"] = "same"
    count: Callable[[np.ndarray, np.ndarray, np.ndarray], int] | None = None

    @property
    def is_time(self) -> bool:
        """Whether the figure is in seconds or milliseconds."""
        return self.name != self.column

    def merged(self, reports: Sequence[StepReport]) -> Any:
        """Return the step's figure, as in its line, from the reports of all trainers."""
        values = [getattr(report, self.name) for report in reports]
        if self.rule == "slowest":
            seconds = [report.seconds for report in reports]
            value = values[seconds.index(max(seconds))]
        else:
            value = sum(values) if self.rule == "sum" else max(values) if self.rule == "longest" else values[0]
        return 1000 * value if self.is_time else value


def _figures() -> tuple[Figure, ...]:
    reported = {item.name.replace("seconds", "ms"): item for item in fields(StepReport)}
    lines = [item for item in fields(StepLine) if item.name in reported]
    return tuple(Figure(reported[item.name].name, item.name, item.default, **reported[item.name].metadata) for item in lines)


FIGURES = _figures()
SUMMED = tuple(figure for figure in FIGURES if hasattr(Totals, figure.name))
"""The figures that `Totals` has."""
_KEPT = tuple(figure for figure in FIGURES if figure.name not in ("step", "epoch", "loss"))
COLUMNS = tuple(figure.column for figure in _KEPT)
"""What pages and the history keep of a step."""


def values_of(line: Mapping[str, Any]) -> list[Any]:
    """Return the COLUMNS of a step.

    Args:
        line: a line of metrics.jsonl, or a step's figures by their columns.

    Raises:
        KeyError: a figure that every line has is missing.
    """
    return [line[figure.column] if figure.default is MISSING else line.get(figure.column, figure.default) for figure in _KEPT]


def merged(reports: Sequence[StepReport]) -> dict[str, Any]:
    """Return a step's line of metrics.jsonl from the reports of all trainers."""
    return {"kind": "step", **{figure.column: figure.merged(reports) for figure in FIGURES}}


def moved_rows(lanes: Sequence[Sequence[np.ndarray]]) -> dict[str, int]:
    """Return the figures of a step's rows, summed over some lanes.

    Args:
        lanes: for each lane, the arguments of `count` in `_rows`.
    """
    return {figure.name: sum(figure.count(*lane) for lane in lanes) for figure in FIGURES if figure.count is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelMetrics:
    """The metrics of a label.

    A metric is None if the label does not have it, and nan if it is not defined for these samples.

    Attributes:
        log_loss: of clicks, in nats per sample.
        auc: of clicks, the area under the ROC curve, with ties counted half.
        normalized_entropy: of clicks, log_loss over the entropy of the samples' click rate (He et
            al. 2014, Practical lessons from predicting clicks on ads at Facebook).
        predicted_over_observed: of both kinds, the sum of the predictions (of clicks, their
            probabilities) over the sum of the observed values.
        grouped_auc: of clicks, if there is a group column, the mean of the groups' AUC, weighted by
            their samples (Zhou et al. 2018, Deep interest network).
        rmse: of numbers, the root of the mean square of the error.
        mae: of numbers, the mean absolute value of the error.
        calibration: of clicks, the result of `training_loss.calibration`.
    """

    log_loss: LeftOut[float | None] = None
    auc: LeftOut[float | None] = None
    normalized_entropy: LeftOut[float | None] = None
    predicted_over_observed: LeftOut[float | None] = None
    grouped_auc: LeftOut[float | None] = None
    rmse: LeftOut[float | None] = None
    mae: LeftOut[float | None] = None
    calibration: LeftOut[tuple[tuple[float, ...], ...]] = ()


def without_calibration(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation's metrics without calibration, also for its labels.

    Each metric then is one number, as metrics.jsonl reports it.
    """
    plain = {name: value for name, value in metrics.items() if name != "calibration"}
    if "labels" in plain:
        plain["labels"] = {name: without_calibration(label) for name, label in plain["labels"].items()}
    return plain


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The metrics of an evaluation set in a pass after `epoch`, as the leader reports them.

    The metrics beside `labels` are those of the first label, as in `LabelMetrics`.

    Attributes:
        step: the last training step of the run before the pass, in any call. -1 before any step.
        loss: the mean of the trained loss over the samples. None if that is the log loss.
        labels: the metrics of all labels by name, if there are several.
        set: the name of the set, "" for the set without one.
    """

    step: int
    epoch: int
    samples: int
    log_loss: float | None
    auc: float | None
    normalized_entropy: float | None
    calibration: tuple[tuple[float, ...], ...] = ()
    predicted_over_observed: LeftOut[float | None] = None
    grouped_auc: LeftOut[float | None] = None
    rmse: LeftOut[float | None] = None
    mae: LeftOut[float | None] = None
    loss: LeftOut[float | None] = None
    labels: LeftOut[dict[str, LabelMetrics]] = field(default_factory=dict)
    set: LeftOut[str] = ""

    @classmethod
    def of(
        cls, step: int, epoch: int, samples: int, labels: Mapping[str, LabelMetrics], loss: float | None = None, name: str = ""
    ) -> EvaluationReport:
        """Return the report of an evaluation set.

        Args:
            labels: the metrics of every label by name, in order.
            name: the name of the set.
        """
        first = {item.name: getattr(next(iter(labels.values())), item.name) for item in fields(LabelMetrics)}
        of_labels = dict(labels) if len(labels) > 1 else {}
        return cls(step=step, epoch=epoch, samples=samples, loss=loss, labels=of_labels, set=name, **first)


_OF_CLICKS = ("log_loss", "auc", "normalized_entropy")
_WORDS = {
    "log_loss": ("log loss", ".5f"),
    "auc": ("AUC", ".4f"),
    "normalized_entropy": ("normalised entropy", ".4f"),
    "grouped_auc": ("grouped AUC", ".4f"),
    "rmse": ("RMSE", ".5f"),
    "mae": ("MAE", ".5f"),
    "loss": ("loss", ".5f"),
}


def metric_lines(metrics: Mapping[str, Any], between: str) -> list[str]:
    """Return the metrics as lines of text.

    There is one line for each label, with its name if there are several, and with the name of the
    evaluation set if sets have names. The trained loss is added unless it is the log loss of one
    label.

    Args:
        metrics: as in a line of metrics.jsonl or in summary.json.
        between: the text between two metrics.
    """
    if sets := metrics.get("sets"):
        return [f"{name}: {line}" for name, of_set in sets.items() for line in metric_lines(of_set, between)]
    loss = [_word(metrics, "loss")] if metrics.get("loss") is not None else []
    if labels := metrics.get("labels"):
        return [*(f"{name}: {between.join(_of_label(of_label))}" for name, of_label in labels.items()), *loss]
    return [between.join([*_of_label(metrics), *loss])]


def _of_label(metrics: Mapping[str, Any]) -> list[str]:
    of_clicks = [*_OF_CLICKS, *(["grouped_auc"] if "grouped_auc" in metrics else [])]
    return [_word(metrics, name) for name in (("rmse", "mae") if "rmse" in metrics else of_clicks)]


def _word(metrics: Mapping[str, Any], name: str) -> str:
    word, form = _WORDS[name]
    value = metrics.get(name)
    return f"{word} {'-' if value is None else format(value, form)}"
