"""Metrics of predicted clicks and numbers. They do not depend on the order in which samples are added, and do not weigh them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foreload.trainer.compute.reports import LabelMetrics

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
