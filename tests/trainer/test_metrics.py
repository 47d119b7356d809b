"""Metrics against their definitions, in any order and any pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreload.trainer.compute.reports import LabelMetrics
from foreload.trainer.compute.training_loss import CALIBRATION_BINS, EvaluationSamples, auc, calibration, grouped_auc


def measured(logits: np.ndarray, labels: np.ndarray, pieces: int = 1, groups: np.ndarray | None = None) -> LabelMetrics:
    """The metrics of clicks whose samples come in so many pieces."""
    samples, places = EvaluationSamples(("click",)), np.array_split(np.arange(len(logits)), pieces)
    for part in places:
        samples.add(logits[part], labels[part, None], None if groups is None else groups[part])
    assert samples.samples == len(logits)
    return samples.metrics()[0]


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
    assert metrics.predicted_over_observed == pytest.approx(predicted.sum() / labels.sum(), rel=1e-12)
    assert (metrics.grouped_auc, metrics.rmse, metrics.mae) == (None, None, None)
    assert metrics.log_loss is not None
    assert metrics.log_loss == pytest.approx(log_loss(labels, predicted), rel=1e-12)
    assert metrics.auc == pytest.approx(pairs_in_order(labels, logits), rel=1e-12)
    base = log_loss(labels, np.full(3000, labels.mean(dtype=np.float64)))
    assert metrics.normalized_entropy == pytest.approx(metrics.log_loss / base, rel=1e-9)


def test_metrics_do_not_depend_on_order_or_pieces() -> None:
    rng = np.random.default_rng(1)
    labels, logits = (rng.random(999) < 0.3).astype(np.float32), rng.standard_normal(999).astype(np.float32)
    order, groups = rng.permutation(999), rng.integers(-9, 9, 999)
    assert measured(logits, labels, 1, groups) == measured(logits[order], labels[order], 13, groups[order])


@pytest.mark.parametrize("levels", [3, None])
def test_grouped_auc_is_the_mean_of_the_groups_that_have_one(levels: int | None) -> None:
    rng = np.random.default_rng(3)
    groups = rng.zipf(1.5, 500) % (1 << 40) * -7
    labels, logits = (rng.random(500) < 0.4).astype(np.float32), rng.standard_normal(500).astype(np.float32)
    logits = logits if levels is None else np.round(logits * levels / 3).astype(np.float32)
    terms = []
    for group in np.unique(groups):
        of_group, scores = labels[groups == group], logits[groups == group]
        if 0 < of_group.sum() < len(of_group):
            terms.append((len(of_group), pairs_in_order(of_group, scores)))
    assert 1 < len(terms) < len(np.unique(groups))
    expected = sum(count * value for count, value in terms) / sum(count for count, _ in terms)
    assert grouped_auc(logits, labels, groups) == pytest.approx(expected, rel=1e-12)
    assert grouped_auc(logits, labels, np.zeros(500, np.int64)) == auc(logits, labels)
    assert math.isnan(grouped_auc(logits, labels, np.arange(500)))


def test_numbers_have_the_metrics_of_numbers_in_any_order_and_pieces() -> None:
    rng = np.random.default_rng(4)
    numbers, order = rng.exponential(3, 700).astype(np.float32), rng.permutation(700)
    predicted = (numbers + rng.standard_normal(700)).astype(np.float32)
    one, other = EvaluationSamples(("number", "click")), EvaluationSamples(("number", "click"))
    labels = np.stack([numbers, numbers > 2], 1).astype(np.float32)
    outputs, losses = np.stack([predicted, predicted - 2], 1), rng.exponential(1, 700)
    one.add(outputs, labels, None, losses)
    for part in np.array_split(order, 5):
        other.add(outputs[part], labels[part], None, losses[part])
    assert (one.metrics(), one.mean_loss()) == (other.metrics(), other.mean_loss())
    of_numbers, of_clicks = one.metrics()
    errors = predicted.astype(np.float64) - numbers
    assert of_numbers.rmse == pytest.approx(math.sqrt(np.mean(errors**2)), rel=1e-12)
    assert of_numbers.mae == pytest.approx(np.mean(np.abs(errors)), rel=1e-12)
    assert of_numbers.predicted_over_observed == pytest.approx(predicted.sum(dtype=float) / numbers.sum(dtype=float), rel=1e-12)
    assert (of_numbers.log_loss, of_numbers.auc, of_numbers.calibration) == (None, None, ())
    assert of_clicks == measured(predicted - 2, (numbers > 2).astype(np.float32))
    assert one.mean_loss() == pytest.approx(losses.mean(), rel=1e-12)


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
    nothing = np.empty(0, np.float32)
    clicks, numbers = measured(nothing, nothing), EvaluationSamples(("number",)).metrics()[0]
    told = [clicks.log_loss, clicks.auc, clicks.normalized_entropy, clicks.predicted_over_observed, numbers.rmse, numbers.mae]
    assert all(value is not None and math.isnan(value) for value in told)
    metrics = measured(np.zeros(4, np.float32), np.ones(4, np.float32))
    assert metrics.log_loss == pytest.approx(math.log(2))
    assert all(value is not None and math.isnan(value) for value in (metrics.auc, metrics.normalized_entropy))
    assert math.isnan(auc(np.array([0, np.nan], np.float32), np.array([0, 1])))
