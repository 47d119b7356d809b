"""Metrics of the plain trainer's evaluations, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from reference_config import Config
from reference_data import Samples


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of one pass over the evaluation samples: of the first label, with NaN for those that it has not; and all of each label, by name.

    loss: the mean of what is trained; set: the evaluation set's name, "" of one without.
    """

    log_loss: float
    auc: float
    normalized_entropy: float
    labels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loss: float = float("nan")
    set: str = ""


def metrics(logits: np.ndarray, labels: np.ndarray) -> Evaluation:
    """Log loss, AUC (ties count half) and log loss over the labels' own entropy, in float64."""
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    log_loss = float(np.mean(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))))
    positive, rate = y == 1, float(y.mean())
    ascending = np.sort(x)
    # The middle of the ranks that equal values share, from 1.
    ranks = (np.searchsorted(ascending, x, "left") + np.searchsorted(ascending, x, "right") + 1) / 2
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return Evaluation(log_loss, float("nan"), float("nan"))
    auc = (ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return Evaluation(log_loss, float(auc), float(log_loss / entropy))


def click_metrics(logits: np.ndarray, labels: np.ndarray, groups: np.ndarray | None) -> dict[str, float]:
    """Of a label of clicks, in float64."""
    whole = metrics(logits, labels)
    predicted = 1 / (1 + np.exp(-logits.astype(np.float64)))
    told = {name: getattr(whole, name) for name in ("log_loss", "auc", "normalized_entropy")}
    told["predicted_over_observed"] = float(predicted.sum() / labels.sum()) if labels.any() else float("nan")
    if groups is not None:
        terms = [
            (int((groups == one).sum()), metrics(logits[groups == one], labels[groups == one]).auc) for one in np.unique(groups)
        ]
        terms = [(count, value) for count, value in terms if not np.isnan(value)]
        told["grouped_auc"] = sum(count * value for count, value in terms) / sum(count for count, _ in terms)
    return told


def number_metrics(predicted: np.ndarray, numbers: np.ndarray) -> dict[str, float]:
    """Of a label of numbers, in float64."""
    x, y = predicted.astype(np.float64), numbers.astype(np.float64)
    errors = x - y
    return {
        "rmse": float(np.sqrt(np.mean(errors**2))),
        "mae": float(np.mean(np.abs(errors))),
        "predicted_over_observed": float(x.sum() / y.sum()),
    }


def evaluation_of(config: Config, outputs: np.ndarray, samples: Samples) -> Evaluation:
    """The metrics of all labels, and the mean of what is trained."""
    log, told, columns = config.log, {}, outputs.reshape(samples.labels.shape)
    losses = np.zeros(len(samples))
    for place, label in enumerate(log.labels):
        column, of_label = columns[:, place], samples.labels[:, place]
        x, y = column.astype(np.float64), of_label.astype(np.float64)
        if label.kind == "number":
            told[label.name], term = number_metrics(column, of_label), (x - y) ** 2
        else:
            told[label.name] = click_metrics(column, of_label, samples.groups if log.group else None)
            term = np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))
        losses += config.label_weights.get(label.name, 1.0) * term
    if config.loss is not None:
        losses = config.loss(torch.tensor(outputs), torch.tensor(samples.labels).reshape(outputs.shape)).double().numpy()
    first = next(iter(told.values()))
    log_loss, auc, entropy = (first.get(name, float("nan")) for name in ("log_loss", "auc", "normalized_entropy"))
    return Evaluation(log_loss, auc, entropy, told, float(np.mean(losses * samples.weights)))
