"""The figures of a step, of all steps and of an evaluation pass, and metrics in words. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from foreload.base.codec import LeftOut

if TYPE_CHECKING:
    import numpy as np


def _rows(count: Callable[[np.ndarray, np.ndarray, np.ndarray], int]) -> dict[str, Any]:
    """A number of rows that the schedule determines. count: from a lane's slots that a step uses, tags of rows that arrive, and slots that become
    free before it.
    """
    return {"rule": "sum", "count": count}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures that a trainer reports of a training step, each with the rule by which those of all trainers become that of the step: their sum,
    the longest, or that of the trainer whose step was the slowest. A figure without a rule is the same on every trainer.

    Rows are of its own lanes; samples and loss (mean over them) are of the whole step. seconds: wall time, of which waiting is that for rows of the
    store; bytes_sent: payload to other trainers. seconds_processor: processor time of the trainer's process in that time, the traffic's included;
    seconds_thread: of it, that of the thread which runs the step.
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
    """The figures of a training step in metrics.jsonl, in this order; times in milliseconds. without: trainers that were lost before they reported
    the step, whose times and bytes are missing.
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
    """What the figures of all steps so far add up to; seconds are those of the steps, over all calls of a run.

    rows_written_back: as the schedule says; rows_flushed: beyond it, at clean stops. steps_incomplete: steps whose times and bytes lack those of a
    trainer that was lost.
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
        """Count in a step as one trainer reports it."""
        self.steps += 1
        self._add({figure.name: getattr(report, figure.name) for figure in SUMMED})

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Count in a step by its line of metrics.jsonl."""
        self.steps += 1
        self.steps_incomplete += "without" in line
        self._add({figure.name: line[figure.column] / 1000 if figure.is_time else line[figure.column] for figure in SUMMED})

    def add_call(self, trainers: Sequence[Totals], first: Totals, rows: Mapping[str, int]) -> None:
        """Count in a call by what each of its trainers has counted. first: the trainer whose times stand for all; rows: figures that are known
        otherwise, since a trainer's are missing.
        """
        self.steps += first.steps
        own = {figure.name: trainers if figure.rule == "sum" else [first] for figure in SUMMED}
        self._add({**{name: sum(getattr(one, name) for one in counted) for name, counted in own.items()}, **rows})

    def _add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            setattr(self, name, getattr(self, name) + value)

    def shared(self) -> Totals:
        """Of one trainer's totals, what stands for all: a trainer that joins begins with these."""
        return Totals(self.steps, **{figure.name: getattr(self, figure.name) for figure in SUMMED if figure.rule != "sum"})

    def counts(self) -> dict[str, int]:
        """Rows, bytes and incomplete steps, as summary.json has them."""
        others = {"steps", "samples", *(figure.name for figure in SUMMED if figure.is_time)}
        return {name: value for name, value in asdict(self).items() if name not in others}

    def means(self) -> dict[str, float]:
        """Shares, and milliseconds a step, as summary.json has them; nan before the first step."""
        times = {"ms_step" if figure.column == "ms" else figure.column: figure.name for figure in SUMMED if figure.is_time}
        return {
            "cache_hit_rate": 1 - self.rows_arrived / self.rows_used if self.rows_used else math.nan,
            "wait_fraction": self.seconds_waiting / self.seconds if self.seconds else math.nan,
            **{name: 1000 * getattr(self, of) / self.steps if self.steps else math.nan for name, of in times.items()},
        }

    @property
    def samples_per_second(self) -> float:
        """Over the time of the steps, without start and evaluation; nan before the first step."""
        return self.samples / self.seconds if self.seconds else math.nan


@dataclass(frozen=True, slots=True)
class StepsSummary:
    """What summary.json says of all steps and of the last evaluation; the other metrics of that are elsewhere in it."""

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
    """A figure of a step. name: in StepReport and Totals, where times are in seconds; column: in StepLine, where they are in milliseconds.

    default: where a line of an earlier version lacks it; MISSING: no line does. rule: as StepReport has it; count: as `_rows` has it.
    """

    name: str
    column: str
    default: Any
    rule: Literal["same", "sum", "longest", "slowest"] = "same"
    count: Callable[[np.ndarray, np.ndarray, np.ndarray], int] | None = None

    @property
    def is_time(self) -> bool:
        """Whether it is in seconds or milliseconds."""
        return self.name != self.column

    def merged(self, reports: Sequence[StepReport]) -> Any:
        """That of the step, by the reports of all trainers, as a line has it."""
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
"""Those that `Totals` has."""
_KEPT = tuple(figure for figure in FIGURES if figure.name not in ("step", "epoch", "loss"))
COLUMNS = tuple(figure.column for figure in _KEPT)
"""What pages and the history keep of a step."""


def values_of(line: Mapping[str, Any]) -> list[Any]:
    """COLUMNS of a line of metrics.jsonl, or of a step's figures by their columns. Raises KeyError."""
    return [line[figure.column] if figure.default is MISSING else line.get(figure.column, figure.default) for figure in _KEPT]


def merged(reports: Sequence[StepReport]) -> dict[str, Any]:
    """A step's line of metrics.jsonl from the reports of all trainers."""
    return {"kind": "step", **{figure.column: figure.merged(reports) for figure in FIGURES}}


def moved_rows(lanes: Sequence[Sequence[np.ndarray]]) -> dict[str, int]:
    """The figures of a step's rows, of some lanes together. lanes: of each what `_rows` counts from."""
    return {figure.name: sum(figure.count(*lane) for lane in lanes) for figure in FIGURES if figure.count is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelMetrics:
    """The metrics of a label. None: it has no such metric; nan: it is not defined for these samples.

    Of clicks: log_loss: nats a sample; auc: the area under the ROC curve, ties counted half; normalized_entropy: log_loss over the entropy of the
    samples' click rate (He et al. 2014, Practical lessons from predicting clicks on ads at Facebook); calibration: as
    `training_loss.calibration` gives it; grouped_auc: where there is a group column, the mean of the groups' AUC, weighted by their
    samples (Zhou et al. 2018, Deep interest network).
    Of numbers: rmse, mae: root of the mean square, and mean absolute value, of the error.
    Of both: predicted_over_observed: the sum of what is predicted, of clicks their probabilities, over the sum of what was observed.
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
    """What metrics.jsonl reports of an evaluation but for the calibration, also of its labels: one number a metric."""
    plain = {name: value for name, value in metrics.items() if name != "calibration"}
    if "labels" in plain:
        plain["labels"] = {name: without_calibration(label) for name, label in plain["labels"].items()}
    return plain


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The metrics of an evaluation set in a pass after `epoch`, reported by the trainer that leads: of the first label, as `LabelMetrics` has them,
    and of all.

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
        """From the metrics of every label by name, in order. name: of the set."""
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
    """A line for each label, of several with its name, and of evaluation sets with theirs; and for the trained loss where
    that is not the log loss of one.

    metrics: as a line of metrics.jsonl or summary.json has it; between: what stands between two metrics.
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
