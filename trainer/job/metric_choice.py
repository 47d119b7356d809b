"""The metric that decides about a run: its name and value, and the rule for stopping early.

`--keep-best` saves the best checkpoint by a metric. `--stop-early` ends training when a metric
stops improving.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from foreload.base.codec import Count, Step, finite
from foreload.base.errors import SettingError
from foreload.base.settings import number, text
from foreload.pipelines.schedule.format import SET_NAME, Header
from foreload.trainer.compute.reports import EvaluationReport

OF_CLICKS = ("log_loss", "auc", "normalized_entropy", "grouped_auc")
OF_NUMBERS = ("rmse", "mae")
METRICS = (*OF_CLICKS, *OF_NUMBERS, "loss")
_HIGHER_IS_BETTER = ("auc", "grouped_auc")


class MetricValue(NamedTuple):
    """The value of a metric in an evaluation.

    Attributes:
        value: NaN if the metric is not defined for the samples.
    """

    value: float
    higher_is_better: bool

    def is_better_than(self, before: float | None) -> bool:
        """Return whether this value is better than an earlier one.

        If `before` is None, every number is better. NaN is never better.
        """
        if math.isnan(self.value):
            return False
        return before is None or (self.value > before if self.higher_is_better else self.value < before)


def metric_name(flag: str, value: Any) -> str:
    """Parse the name of a metric.

    The name is one of METRICS, for the first label, or LABEL.METRIC. It refers to the first
    evaluation set unless it follows SET/.

    Raises:
        SettingError: the name has another form.
    """
    name = text(flag, value)
    if not re.fullmatch(rf"({SET_NAME}/)?(.+\.)?({'|'.join(METRICS)})", name, re.DOTALL):
        raise SettingError(
            f"{flag}: must be one of {', '.join(METRICS)}, or LABEL.METRIC of a label, and SET/METRIC or SET/LABEL.METRIC of an evaluation set; "
            f"got {value!r}"
        )
    return name


def chosen_set(name: str, sets: Sequence[str]) -> tuple[str, str]:
    """Return the evaluation set of a metric, and the metric's name within the set.

    The text before the first / names a set if a set of that name exists. Otherwise the text is part
    of a label's name, and the metric is that of the first set.

    Args:
        name: as `metric_name` returned it.
        sets: the names of the schedule's sets, in order.
    """
    before, _, rest = name.partition("/")
    return (before, rest) if before and rest and before in sets else (sets[0], name)


def check_metric(flag: str, name: str, header: Header) -> None:
    """Raise SettingError if the evaluations of a schedule have no such metric.

    Args:
        flag: the setting's name in the message.
        name: as `metric_name` returned it.
        header: the schedule's header.
    """
    whole, names = name, [label.name for label in header.features.labels]
    of, dot, metric = chosen_set(name, header.set_names)[1].rpartition(".")
    if "/" in (of or metric) and of not in names:
        there = f"there are {', '.join(header.set_names)}" if header.evaluation_sets else "its one has no name"
        raise SettingError(f"{flag}: {whole}: {whole.partition('/')[0]} must be an evaluation set of the schedule; {there}")
    if not dot and metric == "loss":
        return
    if dot and of not in names:
        raise SettingError(
            f"{flag}: {whole}: must be of a label of the schedule; there {'are' if names[1:] else 'is'} {', '.join(names)}"
        )
    label = header.features.labels[names.index(of) if dot else 0]
    of_clicks = tuple(one for one in OF_CLICKS if one != "grouped_auc" or header.features.group)
    has = OF_NUMBERS if label.kind == "number" else of_clicks
    if metric not in has:
        why = " (it needs a group column in the feature file)" if metric == "grouped_auc" and label.kind == "click" else ""
        raise SettingError(
            f"{flag}: must be a metric of label {label.name}, which is a {label.kind}, {', '.join(has)}, or loss; got {metric}{why}"
        )


def metric_of(reports: Sequence[EvaluationReport], name: str) -> MetricValue:
    """Return a metric of an evaluation.

    Args:
        reports: the evaluation's reports, one for each set.
        name: a name that `check_metric` accepted for the schedule.
    """
    of_set, name = chosen_set(name, [report.set for report in reports])
    report = next(report for report in reports if report.set == of_set)
    label, _, metric = name.rpartition(".")
    # With a single label, the report itself has its metrics.
    of = report.labels.get(label, report)
    value = getattr(of, metric)
    if metric == "loss" and value is None:
        # ^If a report has no loss, the trained loss is the log loss.
        value = report.log_loss
    return MetricValue(math.nan if value is None else value, metric in _HIGHER_IS_BETTER)


_MOST_PATIENCE = 10**6


@dataclass(frozen=True, slots=True)
class StopEarly:
    """The rule that ends training after `patience` evaluations in a row without improvement.

    An evaluation is an improvement if `metric` is better than the best value so far by more than
    `min_change`.
    """

    metric: str
    patience: int
    min_change: float = 0.0

    @classmethod
    def parse(cls, flag: str, value: Any) -> StopEarly | None:
        """Parse METRIC:PATIENCE or METRIC:PATIENCE:MIN_CHANGE; off gives None.

        Raises SettingError.
        """
        if isinstance(value, StopEarly) or value == "off":
            return None if value == "off" else value
        match = re.fullmatch(r"([^:]+):(\d{1,7})(?::([^:]+))?", str(value))
        if match is None or not 1 <= int(match[2]) <= _MOST_PATIENCE:
            raise SettingError(
                f"{flag}: must be off, METRIC:PATIENCE or METRIC:PATIENCE:MIN_CHANGE, such as auc:3 or log_loss:5:0.0001, with a patience from 1 to "
                f"{_MOST_PATIENCE}; got {value!r}"
            )
        return cls(metric_name(flag, match[1]), int(match[2]), 0.0 if match[3] is None else number(0)(flag, match[3]))

    def __str__(self) -> str:
        return f"{self.metric}:{self.patience}" + (f":{self.min_change!r}" if self.min_change else "")


@dataclass(frozen=True, slots=True)
class Watched:
    """The results of a schedule's evaluations so far, in one metric.

    Attributes:
        step: the training step before the last evaluation.
        best: the best value, or None if no value was a number yet.
        best_step: the training step before the evaluation with the best value.
        worse: the number of evaluations in a row since then without improvement.
    """

    metric: str
    step: Step
    best: Annotated[float, finite] | None = None
    best_step: Step | None = None
    worse: Count = 0

    def ends(self, rule: StopEarly | None) -> bool:
        """Return whether training ends by a rule."""
        return rule is not None and rule.metric == self.metric and self.worse >= rule.patience

    def summary(self) -> dict[str, Any]:
        """Return the entries for the summary of a run that was stopped early."""
        return {name: value for name, value in asdict(self).items() if name != "step"} | {"why": self.why()}

    def why(self) -> str:
        """Return the reason, as the end of a sentence that says that a run was stopped early."""
        if self.best is None:
            return f"{self.metric} was no number in {self.worse} evaluation(s)"
        return f"{self.metric} has not been better than {self.best:.6g}, after step {self.best_step}, in {self.worse} evaluation(s) since"


def after_evaluation(before: Watched | None, rule: StopEarly, step: int, measured: MetricValue) -> Watched:
    """Return the results so far after one further evaluation.

    If training went back, an evaluation may be reported again; it is counted once.

    Args:
        before: the results until then, or None.
        step: the training step before the evaluation.
        measured: the value of the rule's metric.
    """
    before = Watched(rule.metric, -1) if before is None else before
    if step <= before.step:
        return before
    bar = before.best
    if bar is not None:
        bar += rule.min_change if measured.higher_is_better else -rule.min_change
    if measured.is_better_than(bar):
        return Watched(rule.metric, step, measured.value, step)
    return Watched(rule.metric, step, before.best, before.best_step, before.worse + 1)
