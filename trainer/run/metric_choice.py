"""A metric of the evaluations that a run goes by (`--keep-best`): its name, whether the schedule's labels have it, and its value in a report."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from foreload.pipelines.base.settings import text
from foreload.pipelines.errors import SettingError
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.compute.reports import EvaluationReport

OF_CLICKS = ("log_loss", "auc", "normalized_entropy", "grouped_auc")
OF_NUMBERS = ("rmse", "mae")
METRICS = (*OF_CLICKS, *OF_NUMBERS, "loss")
_HIGHER_IS_BETTER = ("auc", "grouped_auc")


class MetricValue(NamedTuple):
    """The value of a metric in an evaluation; NaN where it is not defined for its samples."""

    value: float
    higher_is_better: bool

    def is_better_than(self, before: float | None) -> bool:
        """Whether it is better than a value before, if there was one; NaN is never."""
        if math.isnan(self.value):
            return False
        return before is None or (self.value > before if self.higher_is_better else self.value < before)


def metric_name(flag: str, value: Any) -> str:
    """One of METRICS, which is then that of the first label, or LABEL.METRIC. Raises SettingError."""
    name = text(flag, value)
    label, dot, metric = name.rpartition(".")
    if metric not in METRICS or (dot and not label):
        raise SettingError(f"{flag}: must be one of {', '.join(METRICS)}, or LABEL.METRIC of a label; got {value!r}")
    return name


def check_metric(flag: str, name: str, features: FeatureSpec) -> None:
    """Raise SettingError where the evaluations of a schedule of these features have no such metric. name: as `metric_name` gave it."""
    of, dot, metric = name.rpartition(".")
    if not dot and metric == "loss":
        return
    names = [label.name for label in features.labels]
    if dot and of not in names:
        raise SettingError(
            f"{flag}: {name}: must be of a label of the schedule; there {'are' if names[1:] else 'is'} {', '.join(names)}"
        )
    label = features.labels[names.index(of) if dot else 0]
    has = OF_NUMBERS if label.kind == "number" else tuple(one for one in OF_CLICKS if one != "grouped_auc" or features.group)
    if metric not in has:
        why = " (it needs a group column in the feature file)" if metric == "grouped_auc" and label.kind == "click" else ""
        raise SettingError(
            f"{flag}: must be a metric of label {label.name}, which is a {label.kind}, {', '.join(has)}, or loss; got {metric}{why}"
        )


def metric_of(report: EvaluationReport, name: str) -> MetricValue:
    """A metric of an evaluation, that `check_metric` accepts of its schedule."""
    label, _, metric = name.rpartition(".")
    # With one label, what is told is its own.
    of = report.labels.get(label, report)
    value = getattr(of, metric)
    if metric == "loss" and value is None:
        value = report.log_loss  # which is what is trained then
    return MetricValue(math.nan if value is None else value, metric in _HIGHER_IS_BETTER)
