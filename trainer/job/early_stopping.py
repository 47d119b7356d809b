"""Training that ends when evaluations get no better (`--stop-early`): the rule, and what it has seen so far."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from foreload.base.codec import Count, Step, finite
from foreload.base.errors import SettingError
from foreload.base.settings import number
from foreload.trainer.job.metric_choice import MetricValue, metric_name

_MOST_PATIENCE = 10**6


@dataclass(frozen=True, slots=True)
class StopEarly:
    """After so many evaluations in a row that were not better than the best by more than min_change, in a metric, training ends."""

    metric: str
    patience: int
    min_change: float = 0.0

    @classmethod
    def parse(cls, flag: str, value: Any) -> StopEarly | None:
        """METRIC:PATIENCE or METRIC:PATIENCE:MIN_CHANGE; off: None. Raises SettingError."""
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
    """What evaluations of a schedule have been so far, in a metric: best, the best value, after step best_step (None: no value was any number yet);
    worse, how many in a row since were not better; step: the training step before the last one.
    """

    metric: str
    step: Step
    best: Annotated[float, finite] | None = None
    best_step: Step | None = None
    worse: Count = 0

    def ends(self, rule: StopEarly | None) -> bool:
        """Whether training ends by a rule."""
        return rule is not None and rule.metric == self.metric and self.worse >= rule.patience

    def summary(self) -> dict[str, Any]:
        """For the summary of a run that was stopped early."""
        return {name: value for name, value in asdict(self).items() if name != "step"} | {"why": self.why()}

    def why(self) -> str:
        """In words, behind which it says of a run that it was stopped early."""
        if self.best is None:
            return f"{self.metric} was no number in {self.worse} evaluation(s)"
        return f"{self.metric} has not been better than {self.best:.6g}, after step {self.best_step}, in {self.worse} evaluation(s) since"


def after_evaluation(before: Watched | None, rule: StopEarly, step: int, measured: MetricValue) -> Watched:
    """What was seen, with one evaluation more, after training step `step`. One that is reported again, since training went back, is counted once."""
    before = Watched(rule.metric, -1) if before is None else before
    if step <= before.step:
        return before
    bar = before.best
    if bar is not None:
        bar += rule.min_change if measured.higher_is_better else -rule.min_change
    if measured.is_better_than(bar):
        return Watched(rule.metric, step, measured.value, step)
    return Watched(rule.metric, step, before.best, before.best_step, before.worse + 1)
