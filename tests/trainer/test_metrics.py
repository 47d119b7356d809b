"""Metrics against their definitions, in any order and any pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreload.trainer.compute.metrics import CALIBRATION_BINS, BinaryMetrics, Metrics, auc, calibration


def measured(logits: np.ndarray, labels: np.ndarray, pieces: int = 1) -> Metrics:
    """What BinaryMetrics gives for samples that come in so many pieces."""
    metrics = BinaryMetrics()
    for part, clicked in zip(np.array_split(logits, pieces), np.array_split(labels, pieces), strict=True):
        metrics.add(part, clicked)
    return metrics.result()


def log_loss(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Of probabilities, in float64."""
    return float(-np.mean(np.log(np.where(labels == 1, predicted, 1 - predicted))))


def pairs_in_order(labels: np.ndarray, logits: np.ndarray) -> float:
    """The share of (click, no click) pairs in which the click has the higher logit; a tie counts half."""
    above = logits[labels == 1][:, None] - logits[labels == 0][None, :]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


@pytest.mark.parametrize("levels", [2, 10, None])
@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_metrics_are_what_they_are_defined_as(levels: int | None, rate: float) -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(3000) < rate).astype(np.float32)
    logits = (rng.standard_normal(3000) + labels).astype(np.float32)
    # Few distinct logits, so that many tie.
    if levels:
        logits = np.round(logits * levels / 10).astype(np.float32)
    metrics = measured(logits, labels, 7)
    predicted = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert metrics.samples == 3000
    assert metrics.log_loss == pytest.approx(log_loss(labels, predicted), rel=1e-12)
    assert metrics.auc == pytest.approx(pairs_in_order(labels, logits), rel=1e-12)
    base = log_loss(labels, np.full(3000, labels.mean(dtype=np.float64)))
    assert metrics.normalized_entropy == pytest.approx(metrics.log_loss / base, rel=1e-9)


def test_metrics_do_not_depend_on_order_or_pieces() -> None:
    rng = np.random.default_rng(1)
    labels, logits = (rng.random(999) < 0.3).astype(np.float32), rng.standard_normal(999).astype(np.float32)
    order = rng.permutation(999)
    assert measured(logits, labels) == measured(logits[order], labels[order], 13)


@pytest.mark.parametrize("levels", [1, 3, None])
def test_calibration_bins_have_each_sample_once_and_what_was_predicted_of_it(levels: int | None) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(1000).astype(np.float32)
    logits = logits if levels is None else np.floor(logits * levels / 4).astype(np.float32)
    labels = (rng.random(1000) < 0.3).astype(np.float32)
    bins = calibration(logits, labels)
    predicted = 1 / (1 + np.exp(-logits.astype(np.float64)))
    samples, means, shares = (np.array(column) for column in zip(*bins, strict=True))
    assert samples.sum() == 1000
    assert len(bins) == CALIBRATION_BINS if levels is None else len(bins) <= len(np.unique(logits))
    assert (np.diff(means) > 0).all()
    assert (samples @ means, samples @ shares) == (pytest.approx(predicted.sum()), pytest.approx(labels.sum()))
    order, ends = np.argsort(logits, kind="stable"), np.cumsum(samples).astype(int)
    assert means[0] == pytest.approx(predicted[order][: ends[0]].mean())
    assert calibration(logits[::-1], labels[::-1]) == bins


def test_calibration_is_left_out_where_a_logit_is_not_finite() -> None:
    assert calibration(np.array([1, np.inf], np.float32), np.array([1, 0])) == ()


def test_extreme_logits_have_finite_losses() -> None:
    metrics = measured(np.array([1000, -1000, 0], np.float32), np.array([1, 1, 0], np.float32))
    assert metrics.log_loss == pytest.approx((1000 + math.log(2)) / 3)


def test_metrics_that_are_not_defined_are_nan() -> None:
    assert all(math.isnan(value) for value in (BinaryMetrics().result().log_loss, BinaryMetrics().result().auc))
    metrics = measured(np.zeros(4, np.float32), np.ones(4, np.float32))
    assert metrics.log_loss == pytest.approx(math.log(2))
    assert math.isnan(metrics.auc)
    assert math.isnan(metrics.normalized_entropy)
    assert math.isnan(auc(np.array([0, np.nan], np.float32), np.array([0, 1])))
