"""The loss that is trained, and the metrics of predictions: cross-entropy of clicks, squared error of numbers, or a user's own loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foreload.trainer.compute.reports import LabelMetrics
from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import raised_at

CALIBRATION_BINS = 20
"""Into so many bins, of as many samples each, an evaluation's samples are cut by what is predicted of them."""


def log_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Binary cross-entropy of each sample, in nats, float64 [n]. logits: [n]; labels: 0 or 1, [n]."""
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    return np.asarray(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x))))


def squared_errors(predicted: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The square of each sample's error, float64 [n]. predicted, numbers: [n]."""
    return np.asarray((predicted.astype(np.float64) - numbers.astype(np.float64)) ** 2)


def exact_sum(values: np.ndarray) -> float:
    """The sum of float64 [n], rounded once, so that the order of samples, and with it the number of trainers, shows in no digit; nan where one is
    not finite.
    """
    return math.fsum(values.tolist()) if np.isfinite(values).all() else math.nan


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """The share of pairs (a clicked sample, one that is not) which the logits order rightly, ties counted half; nan without pairs."""
    clicked = labels > 0.5
    positives = int(clicked.sum())
    negatives = len(labels) - positives
    if not positives or not negatives or np.isnan(logits).any():
        return math.nan
    # The Mann-Whitney U of the ranks: twice the mean rank of each tie is an integer, so their sum is exact.
    _, tie, count = np.unique(logits, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    twice_rank_sum = int((2 * last - count + 1)[tie[clicked]].sum())
    return (twice_rank_sum - positives * (positives + 1)) / (2 * positives * negatives)


def grouped_auc(logits: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    """The mean of the groups' `auc`, weighted by their samples, of the groups with both kinds of labels; nan without any.

    Zhou et al. 2018, Deep interest network for click-through rate prediction, section 5.2. groups: int64 [n], which group each sample is in.
    """
    if not len(logits) or np.isnan(logits).any():
        return math.nan
    order = np.lexsort((logits, groups))
    ordered, clicked, group = logits[order], labels[order] > 0.5, groups[order]
    begins = np.append(True, group[1:] != group[:-1])
    begins_tie = begins | np.append(True, ordered[1:] != ordered[:-1])
    first, first_of_tie = np.flatnonzero(begins), np.flatnonzero(begins_tie)
    samples = np.diff(first, append=len(group))
    last_of_tie = np.append(first_of_tie[1:], len(group))
    # As in `auc`, ranks being those within the group.
    twice_rank = (first_of_tie + last_of_tie + 1)[np.cumsum(begins_tie) - 1] - 2 * np.repeat(first, samples)
    twice_rank_sum = np.add.reduceat(np.where(clicked, twice_rank, 0), first)
    positives = np.add.reduceat(clicked.astype(np.int64), first)
    both = (positives > 0) & (positives < samples)
    if not both.any():
        return math.nan
    samples, positives = samples[both], positives[both]
    of_group = (twice_rank_sum[both] - positives * (positives + 1)) / (2 * positives * (samples - positives))
    return exact_sum(samples * of_group) / int(samples.sum())


def calibration(logits: np.ndarray, labels: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Samples, mean of the predicted probability, and share of clicks, of up to CALIBRATION_BINS bins, from the lowest logits to the highest.

    Samples of one logit are in one bin. Empty without samples, and where a logit is not finite.
    """
    if not len(logits) or not np.isfinite(logits).all():
        return ()
    order = np.argsort(logits)
    ordered = logits[order].astype(np.float64)
    starts = np.unique(np.searchsorted(ordered, ordered[np.arange(CALIBRATION_BINS) * len(ordered) // CALIBRATION_BINS]))
    samples = np.diff(starts, append=len(ordered))
    predicted = np.add.reduceat(np.exp(-np.logaddexp(0, -ordered)), starts) / samples
    clicked = np.add.reduceat((labels[order] > 0.5).astype(np.int64), starts) / samples
    return tuple(zip(map(float, samples), predicted.tolist(), clicked.tolist(), strict=True))


def click_metrics(logits: np.ndarray, labels: np.ndarray, groups: np.ndarray | None = None) -> LabelMetrics:
    """Of a label of clicks. logits: float32 [n]; labels: 0 or 1, [n]; groups: as `grouped_auc` has them, where there are any."""
    n, clicked = len(logits), labels > 0.5
    positives, nothing = int(clicked.sum()), math.nan
    rate = positives / n if n else nothing
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < positives < n else nothing
    log_loss = exact_sum(log_losses(logits, clicked)) / n if n else nothing
    finite = bool(np.isfinite(logits).all())
    predicted = exact_sum(np.exp(-np.logaddexp(0, -logits.astype(np.float64)))) if finite else nothing
    return LabelMetrics(
        log_loss=log_loss,
        auc=auc(logits, clicked),
        normalized_entropy=log_loss / entropy,
        predicted_over_observed=predicted / positives if positives else nothing,
        grouped_auc=None if groups is None else grouped_auc(logits, clicked, groups),
        calibration=calibration(logits, clicked),
    )


def number_metrics(predicted: np.ndarray, numbers: np.ndarray) -> LabelMetrics:
    """Of a label of numbers. predicted, numbers: float32 [n]."""
    n, nothing = len(predicted), math.nan
    errors = predicted.astype(np.float64) - numbers.astype(np.float64)
    observed = exact_sum(numbers.astype(np.float64))
    return LabelMetrics(
        rmse=math.sqrt(exact_sum(errors * errors) / n) if n else nothing,
        mae=exact_sum(np.abs(errors)) / n if n else nothing,
        predicted_over_observed=exact_sum(predicted.astype(np.float64)) / observed if observed else nothing,
    )


class EvaluationSamples:
    """Collects outputs and labels until the metrics are asked for: 5 bytes a sample and label of clicks, 8 of numbers, and 8 for a group or a loss.

    kinds: of each label, "click" or "number".
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = tuple(kinds)
        self._outputs: list[np.ndarray] = []
        self._labels: list[list[np.ndarray]] = [[] for _ in kinds]
        self._groups: list[np.ndarray] = []
        self._trained_losses: list[np.ndarray] = []

    def add(
        self, outputs: np.ndarray, labels: np.ndarray, groups: np.ndarray | None = None, losses: np.ndarray | None = None
    ) -> None:
        """outputs: float32 [n] or [n, labels]; labels: [n, labels]; groups: int64 [n]; losses: float64 [n], where the log loss is not trained."""
        self._outputs.append(np.array(outputs, np.float32).reshape(labels.shape))
        for column, kind, kept in zip(labels.T, self._kinds, self._labels, strict=True):
            kept.append(np.array(column, np.float32) if kind == "number" else column > 0.5)
        self._groups += [] if groups is None else [np.array(groups)]
        self._trained_losses += [] if losses is None else [losses]

    @property
    def samples(self) -> int:
        """How many were added."""
        return sum(map(len, self._outputs))

    def metrics(self) -> list[LabelMetrics]:
        """Of all samples added, for each label."""
        outputs = np.concatenate([np.empty((0, len(self._kinds)), np.float32), *self._outputs])
        groups = np.concatenate(self._groups) if self._groups else None
        of_labels = []
        for kind, column, kept in zip(self._kinds, outputs.T, self._labels, strict=True):
            if kind == "number":
                of_labels.append(number_metrics(column, np.concatenate([np.empty(0, np.float32), *kept])))
            else:
                of_labels.append(click_metrics(column, np.concatenate([np.empty(0, np.bool_), *kept]), groups))
        return of_labels

    def mean_loss(self) -> float | None:
        """The mean of the trained loss over the samples; None where it is the log loss."""
        return exact_sum(np.concatenate(self._trained_losses)) / self.samples if self._trained_losses else None


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Called with outputs and labels, both float32 [b] or [b, labels]: a loss for each sample, float32 [b]."""

_OF_KIND: dict[str, Callable[..., Tensor]] = {
    "click": functional.binary_cross_entropy_with_logits,
    "number": functional.mse_loss,
}
_EVALUATED = {"click": log_losses, "number": squared_errors}


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A loss of a user's own. name: as `--loss` has it."""

    name: str
    function: LossFunction

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """A loss for each sample, float32 [b]. Raises ModelError where the function raises, or returns something else."""
        try:
            losses = self.function(outputs, labels)
        except Exception as error:  # a user's function may raise anything
            raise ModelError(f"--loss {self.name}: failed: {type(error).__name__}: {error}{raised_at(error)}") from error
        if not isinstance(losses, Tensor) or losses.shape != (len(outputs),) or losses.dtype != torch.float32:
            got = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            remedy = (
                "add up those of its labels, such as .sum(1)"
                if outputs.dim() > 1 and got.count(",")
                else 'give one each, such as with reduction="none"'
            )
            raise ModelError(
                f"--loss {self.name}: must return a loss for each sample, torch.float32 [{len(outputs)}], for {len(outputs)} sample(s); got {got}; "
                f"{remedy}"
            )
        return losses


@dataclass(frozen=True, slots=True)
class TrainingLoss:
    """What is trained. kinds: of the labels, "click" or "number"; label_weights: what the loss of each is multiplied by; own: in their place."""

    kinds: tuple[str, ...]
    label_weights: tuple[float, ...]
    own: OwnLoss | None = None

    def of_slice(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The sum over a slice's samples. outputs, labels: float32 [b] or [b, labels]; weights: of the samples, float32 [b], where they have any."""
        if weights is None and self._is_log_loss:
            return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
        losses = self._of_samples(outputs, labels)
        return (losses if weights is None else losses * weights).sum()

    def of_evaluation(self, outputs: Tensor, labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray | None:
        """The loss of each sample of a slice, float64 [b]; None where that is the log loss. outputs: as forward gives them; labels: [b, labels]."""
        if weights is None and self._is_log_loss:
            return None
        if self.own is not None:
            given = torch.from_numpy(np.array(labels, np.float32)).to(outputs.device)
            losses = self.own(outputs, given.reshape(outputs.shape)).double().cpu().numpy()
        else:
            columns = outputs.cpu().numpy().reshape(labels.shape).T
            terms = zip(self.kinds, self.label_weights, columns, labels.T, strict=True)
            losses = sum(
                (weight * _EVALUATED[kind](column, label) for kind, weight, column, label in terms), np.zeros(len(labels))
            )
        return losses if weights is None else losses * weights.astype(np.float64)

    @property
    def _is_log_loss(self) -> bool:
        """Whether it is the log loss of one label, but for weights of the samples."""
        return self.own is None and self.kinds == ("click",)

    def _of_samples(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(outputs, labels)
        if outputs.dim() == 1:
            return _OF_KIND[self.kinds[0]](outputs, labels, reduction="none")
        total = None
        for kind, weight, column, label in zip(self.kinds, self.label_weights, outputs.unbind(1), labels.unbind(1), strict=True):
            # The bits of an operation may depend on whether its operands are contiguous.
            losses = _OF_KIND[kind](column.contiguous(), label.contiguous(), reduction="none") * weight
            total = losses if total is None else total + losses
        assert total is not None
        return total
