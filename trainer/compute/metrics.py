"""Metrics of predicted clicks: log loss, AUC, normalised entropy, calibration. They do not depend on the order in which samples are added."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

CALIBRATION_BINS = 20
"""Into so many bins, of as many samples each, an evaluation's samples are cut by what is predicted of them."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of some samples; nan where they are not defined: without samples, or (auc, normalized_entropy) with labels of one kind.

    log_loss: nats a sample; auc: the area under the ROC curve, ties counted half; normalized_entropy: log_loss over the entropy of the
    samples' click rate (He et al. 2014, Practical lessons from predicting clicks on ads at Facebook). calibration: see `calibration`.
    """

    samples: int
    log_loss: float
    auc: float
    normalized_entropy: float
    calibration: tuple[tuple[float, ...], ...] = ()


def log_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Binary cross-entropy of each sample, in nats, float64 [n]. logits: [n]; labels: 0 or 1, [n]."""
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    return np.asarray(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x))))


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


class BinaryMetrics:
    """Collects logits and labels, 5 bytes a sample, until result() is asked for."""

    def __init__(self) -> None:
        self._logits: list[np.ndarray] = []
        self._clicked: list[np.ndarray] = []

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """logits: float32 [n]; labels: 0 or 1, [n]."""
        self._logits.append(np.array(logits, np.float32))
        self._clicked.append(labels > 0.5)

    def result(self) -> Metrics:
        """The metrics of all samples added."""
        logits = np.concatenate([np.empty(0, np.float32), *self._logits])
        clicked = np.concatenate([np.empty(0, np.bool_), *self._clicked])
        n, positives = len(logits), int(clicked.sum())
        if not n:
            return Metrics(0, math.nan, math.nan, math.nan)
        losses = log_losses(logits, clicked)
        # An exact sum, so that the order of samples, and with it the number of trainers, shows in no digit.
        log_loss = math.fsum(losses.tolist()) / n if np.isfinite(losses).all() else math.nan
        rate = positives / n
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < positives < n else math.nan
        return Metrics(n, log_loss, auc(logits, clicked), log_loss / entropy, calibration(logits, clicked))
