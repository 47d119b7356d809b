"""How all trainers of a call decide alike that training ends, where evaluations get no better (`job.early_stopping`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreload.trainer.compute.reports import EvaluationReport
from foreload.trainer.job.early_stopping import StopEarly, Watched, after_evaluation
from foreload.trainer.job.metric_choice import MetricValue, metric_of
from foreload.trainer.step.term_session import TermSession


class EarlyStopping:
    """A trainer's side. Every trainer of a call has one, and all have seen the same: the leader sends the others the value of each evaluation.

    rule: None: training does not end so; so_far: what was seen before.
    """

    def __init__(self, rule: StopEarly | None, so_far: Watched | None) -> None:
        self._rule, self.so_far = rule, so_far

    def ends_after(self, session: TermSession, step: int, reports: Sequence[EvaluationReport]) -> bool:
        """Whether training ends, after an evaluation behind step `step`; reports: of its sets, where this trainer leads. Raises PeerLost."""
        if self._rule is None:
            return False
        measured = metric_of(reports, self._rule.metric) if reports else MetricValue(0.0, False)
        encoded = torch.tensor(
            [measured.value, float(measured.higher_is_better)], dtype=torch.float64, device=session.transport.device
        )
        value, higher = session.exchange.agree(encoded).tolist()
        self.so_far = after_evaluation(self.so_far, self._rule, step, MetricValue(value, bool(higher)))
        return step == self.so_far.step and self.so_far.ends(self._rule)
