"""The loss that is trained, and the metrics of predictions.

The loss is the cross-entropy of clicks, the squared error of numbers, or a loss of the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foreload.cache.rows.device_copies import upload
from foreload.trainer.compute.reports import LabelMetrics
from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import raised_at

CALIBRATION_BINS = 20
"""The number of bins of a calibration.

Samples are ordered by their predictions, and each bin has equally many.
"""


def log_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the binary cross-entropy of each sample, in nats, float64 [n].

    Args:
        logits: [n].
        labels: 0 or 1, [n].
    """
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    return np.asarray(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x))))


def squared_errors(predicted: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the square of each sample's error, float64 [n]. Both arguments are [n]."""
    return np.asarray((predicted.astype(np.float64) - numbers.astype(np.float64)) ** 2)


def exact_sum(values: np.ndarray) -> float:
    """Return the sum of float64 [n], rounded once.

    So the order of samples, and with it the number of trainers, does not affect any digit. The sum
    is nan if a value is not finite.
    """
    return math.fsum(values.tolist()) if np.isfinite(values).all() else math.nan


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of (clicked, unclicked) pairs of samples that the logits order correctly.

    Ties count half. Without pairs it is nan.
    """
    clicked = labels > 0.5
    positives = int(clicked.sum())
    negatives = len(labels) - positives
    if not positives or not negatives or np.isnan(logits).any():
        return math.nan
    # This is the Mann-Whitney U of the ranks. Twice the mean rank of each tie is an integer, so the
    # sum of these is exact.
    _, tie, count = np.unique(logits, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    twice_rank_sum = int((2 * last - count + 1)[tie[clicked]].sum())
    return (twice_rank_sum - positives * (positives + 1)) / (2 * positives * negatives)


def grouped_auc(logits: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the mean of the groups' `auc`, weighted by their samples.

    Only groups with both kinds of labels count. Without any it is nan. Source: Zhou et al. 2018,
    Deep interest network for click-through rate prediction, section 5.2.

    Args:
        logits: [n].
        labels: 0 or 1, [n].
        groups: int64 [n], the group of each sample.
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
    # This is as in `auc`, with ranks within the group.
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
    """Return samples, mean predicted probability and share of clicks of each bin.

    There are up to CALIBRATION_BINS bins, from the lowest logits to the highest. Samples with the
    same logit are in one bin. The result is empty without samples, and if a logit is not finite.
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
    """Return the metrics of a label of clicks.

    Args:
        logits: float32 [n].
        labels: 0 or 1, [n].
        groups: as in `grouped_auc`. If None, there is no grouped AUC.
    """
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
    """Return the metrics of a label of numbers. Both arguments are float32 [n]."""
    n, nothing = len(predicted), math.nan
    errors = predicted.astype(np.float64) - numbers.astype(np.float64)
    observed = exact_sum(numbers.astype(np.float64))
    return LabelMetrics(
        rmse=math.sqrt(exact_sum(errors * errors) / n) if n else nothing,
        mae=exact_sum(np.abs(errors)) / n if n else nothing,
        predicted_over_observed=exact_sum(predicted.astype(np.float64)) / observed if observed else nothing,
    )


class EvaluationSamples:
    """Outputs and labels of evaluation samples, collected until the metrics are computed.

    A sample takes 5 bytes for each label of clicks, 8 for each label of numbers, and 8 each for a
    group and a loss.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        """Begin without samples.

        Args:
            kinds: for each label, "click" or "number".
        """
        self._kinds = tuple(kinds)
        self._outputs: list[np.ndarray] = []
        self._labels: list[list[np.ndarray]] = [[] for _ in kinds]
        self._groups: list[np.ndarray] = []
        self._trained_losses: list[np.ndarray] = []

    def add(
        self, outputs: np.ndarray, labels: np.ndarray, groups: np.ndarray | None = None, losses: np.ndarray | None = None
    ) -> None:
        """Add samples.

        Args:
            outputs: float32 [n] or [n, labels].
            labels: [n, labels].
            groups: int64 [n], or None without groups.
            losses: float64 [n], the trained loss. None if that is the log loss.
        """
        self._outputs.append(np.array(outputs, np.float32).reshape(labels.shape))
        for column, kind, kept in zip(labels.T, self._kinds, self._labels, strict=True):
            kept.append(np.array(column, np.float32) if kind == "number" else column > 0.5)
        self._groups += [] if groups is None else [np.array(groups)]
        self._trained_losses += [] if losses is None else [losses]

    @property
    def samples(self) -> int:
        """The number of samples added."""
        return sum(map(len, self._outputs))

    def metrics(self) -> list[LabelMetrics]:
        """Return the metrics of all samples added, for each label."""
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
        """Return the mean of the trained loss over the samples, or None if it is the log loss."""
        return exact_sum(np.concatenate(self._trained_losses)) / self.samples if self._trained_losses else None


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs and labels, both float32 [b] or [b, labels].

It returns a loss for each sample, float32 [b].
"""

_OF_KIND: dict[str, Callable[..., Tensor]] = {
    "click": functional.binary_cross_entropy_with_logits,
    "number": functional.mse_loss,
}
_EVALUATED = {"click": log_losses, "number": squared_errors}


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A loss of the user's own.

    Attributes:
        name: as in `--loss`.
        function: computes the loss of each sample.
    """

    name: str
    function: LossFunction

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return a loss for each sample, float32 [b].

        Raises ModelError if the function raises, or returns something else.
        """
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
    """The loss that is trained.

    Attributes:
        kinds: for each label, "click" or "number".
        label_weights: for each label, the factor of its loss.
        own: the user's own loss, which replaces those of the labels. If None, there is none.
    """

    kinds: tuple[str, ...]
    label_weights: tuple[float, ...]
    own: OwnLoss | None = None

    def of_slice(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sum of the loss over a slice's samples.

        Args:
            outputs: float32 [b] or [b, labels].
            labels: float32, in the shape of `outputs`.
            weights: the weights of the samples, float32 [b], or None if they have none.
        """
        if weights is None and self._is_log_loss:
            return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
        losses = self._of_samples(outputs, labels)
        return (losses if weights is None else losses * weights).sum()

    def of_evaluation(self, outputs: Tensor, labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray | None:
        """Return the loss of each sample of a slice, float64 [b], or None if it is the log loss.

        Args:
            outputs: as forward returned them.
            labels: [b, labels].
            weights: the weights of the samples, [b], or None if they have none.
        """
        if weights is None and self._is_log_loss:
            return None
        if self.own is not None:
            given = upload(labels, outputs.device)
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
        """Whether it is the log loss of one label, apart from weights of the samples."""
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
