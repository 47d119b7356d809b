"""Metrics against scikit-learn, in any order and any pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from trainer.metrics import BinaryMetrics, Metrics, auc


def measured(logits: np.ndarray, labels: np.ndarray, pieces: int = 1) -> Metrics:
    metrics = BinaryMetrics()
    for part, clicked in zip(np.array_split(logits, pieces), np.array_split(labels, pieces), strict=True):
        metrics.add(part, clicked)
    return metrics.result()


@pytest.mark.parametrize("levels", [2, 10, None])
@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_metrics_are_scikit_learns(levels: int | None, rate: float) -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(3000) < rate).astype(np.float32)
    logits = (rng.standard_normal(3000) + labels).astype(np.float32)
    if levels:
        logits = np.round(logits * levels / 10).astype(np.float32)
    found = measured(logits, labels, 7)
    predicted = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert found.samples == 3000
    assert found.log_loss == pytest.approx(log_loss(labels, predicted), rel=1e-12)
    assert found.auc == pytest.approx(roc_auc_score(labels, logits), rel=1e-12)
    base = log_loss(labels, np.full(3000, labels.mean(dtype=np.float64)))
    assert found.normalized_entropy == pytest.approx(found.log_loss / base, rel=1e-9)


def test_metrics_do_not_depend_on_order_or_pieces() -> None:
    rng = np.random.default_rng(1)
    labels, logits = (rng.random(999) < 0.3).astype(np.float32), rng.standard_normal(999).astype(np.float32)
    order = rng.permutation(999)
    assert measured(logits, labels) == measured(logits[order], labels[order], 13)


def test_extreme_logits_have_finite_losses() -> None:
    found = measured(np.array([1000, -1000, 0], np.float32), np.array([1, 1, 0], np.float32))
    assert found.log_loss == pytest.approx((1000 + math.log(2)) / 3)


def test_metrics_that_are_not_defined_are_nan() -> None:
    assert all(math.isnan(value) for value in (BinaryMetrics().result().log_loss, BinaryMetrics().result().auc))
    found = measured(np.zeros(4, np.float32), np.ones(4, np.float32))
    assert found.log_loss == pytest.approx(math.log(2))
    assert math.isnan(found.auc)
    assert math.isnan(found.normalized_entropy)
    assert math.isnan(auc(np.array([0, np.nan], np.float32), np.array([0, 1])))
