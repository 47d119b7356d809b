"""A pass over evaluation samples, set by set, as the trainer that leads sees it, and as `foreload evaluate` does."""

from __future__ import annotations

from torch import Tensor

from foreload.pipelines.schedule.format import Header, LaneEvent
from foreload.trainer.compute.metrics import EvaluationSamples
from foreload.trainer.compute.reports import EvaluationReport
from foreload.trainer.compute.training_loss import TrainingLoss


class EvaluationPass:
    """Collects the slices of a pass until its reports are asked for. header: of the schedule; loss: what was trained."""

    def __init__(self, header: Header, loss: TrainingLoss) -> None:
        self._header, self._loss = header, loss
        self._sets = {name: EvaluationSamples(loss.kinds) for name in header.set_names}

    def add(self, step: int, moves: LaneEvent, outputs: Tensor) -> None:
        """A slice of an evaluation step, by its number. outputs: float32 [b] or [b, labels], as forward gave them."""
        if len(moves.labels):
            losses = self._loss.of_evaluation(outputs, moves.labels, moves.weights)
            self._sets[self._header.set_of(step)].add(outputs.cpu().numpy(), moves.labels, moves.groups, losses)

    def reports(self, step: int, epoch: int) -> list[EvaluationReport]:
        """The metrics of all slices added, of each set in order. step, epoch: those before the pass."""
        labels, reports = [label.name for label in self._header.features.labels], []
        for name, samples in self._sets.items():
            of_labels = dict(zip(labels, samples.metrics(), strict=True))
            reports.append(EvaluationReport.of(step, epoch, samples.samples, of_labels, samples.mean_loss(), name))
        return reports
