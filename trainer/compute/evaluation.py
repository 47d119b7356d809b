"""A pass over evaluation samples, as the trainer that leads sees it, and as `foreload evaluate` does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foreload.pipelines.samples.features import Label
from foreload.pipelines.schedule.format import LaneEvent
from foreload.trainer.compute.metrics import EvaluationSamples
from foreload.trainer.compute.reports import EvaluationReport
from foreload.trainer.compute.training_loss import TrainingLoss


class EvaluationPass:
    """Collects the slices of a pass until its report is asked for. labels: of the schedule; loss: what was trained."""

    def __init__(self, labels: Sequence[Label], loss: TrainingLoss) -> None:
        self._names, self._loss = [label.name for label in labels], loss
        self._samples = EvaluationSamples(loss.kinds)

    def add(self, moves: LaneEvent, outputs: Tensor) -> None:
        """A slice. outputs: float32 [b] or [b, labels], as forward gave them."""
        if len(moves.labels):
            losses = self._loss.of_evaluation(outputs, moves.labels, moves.weights)
            self._samples.add(outputs.cpu().numpy(), moves.labels, moves.groups, losses)

    def report(self, step: int, epoch: int) -> EvaluationReport:
        """The metrics of all slices added. step, epoch: those before the pass."""
        samples = self._samples
        of_labels = dict(zip(self._names, samples.metrics(), strict=True))
        return EvaluationReport.of(step, epoch, samples.samples, of_labels, samples.mean_loss())
