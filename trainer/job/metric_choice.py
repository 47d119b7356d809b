"""A metric of the evaluations that a run goes by (`--keep-best`): its name, whether the schedule has it, and its value in reports."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from foreload.base.errors import SettingError
from foreload.base.settings import text
from foreload.pipelines.schedule.format import SET_NAME, Header
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
    """One of METRICS, which is then that of the first label, or LABEL.METRIC; of the first evaluation set, or behind SET/. Raises SettingError."""
    name = text(flag, value)
    if not re.fullmatch(rf"({SET_NAME}/)?(.+\.)?({'|'.join(METRICS)})", name, re.DOTALL):
        raise SettingError(
            f"{flag}: must be one of {', '.join(METRICS)}, or LABEL.METRIC of a label, and SET/METRIC or SET/LABEL.METRIC of an evaluation set; "
            f"got {value!r}"
        )
    return name


def chosen_set(name: str, sets: Sequence[str]) -> tuple[str, str]:
    """Of which evaluation set a metric is, and its name without that. name: as `metric_name` gave it; sets: the schedule's names, in order. What
    stands before the first / is a set where there is one of that name; else it is part of a label's name, of the first set.
    """
    before, _, rest = name.partition("/")
    return (before, rest) if before and rest and before in sets else (sets[0], name)


def check_metric(flag: str, name: str, header: Header) -> None:
    """Raise SettingError where the evaluations of a schedule have no such metric. name: as `metric_name` gave it."""
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
    """A metric of an evaluation, reported set by set, that `check_metric` accepts of its schedule."""
    of_set, name = chosen_set(name, [report.set for report in reports])
    report = next(report for report in reports if report.set == of_set)
    label, _, metric = name.rpartition(".")
    # With one label, what is reported is its own.
    of = report.labels.get(label, report)
    value = getattr(of, metric)
    if metric == "loss" and value is None:
        value = report.log_loss  # which is what is trained then
    return MetricValue(math.nan if value is None else value, metric in _HIGHER_IS_BETTER)
