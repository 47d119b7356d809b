"""The metrics of an evaluation in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_CLICKS = ("log_loss", "auc", "normalized_entropy")
_WORDS = {
    "log_loss": ("log loss", ".5f"),
    "auc": ("AUC", ".4f"),
    "normalized_entropy": ("normalised entropy", ".4f"),
    "grouped_auc": ("grouped AUC", ".4f"),
    "rmse": ("RMSE", ".5f"),
    "mae": ("MAE", ".5f"),
    "loss": ("loss", ".5f"),
}


def metric_lines(metrics: Mapping[str, Any], between: str) -> list[str]:
    """A line for each label, of several with its name, and of evaluation sets with theirs; and for the trained loss where
    that is not the log loss of one.

    metrics: as a line of metrics.jsonl or summary.json has it; between: what stands between two metrics.
    """
    if sets := metrics.get("sets"):
        return [f"{name}: {line}" for name, of_set in sets.items() for line in metric_lines(of_set, between)]
    loss = [_word(metrics, "loss")] if metrics.get("loss") is not None else []
    if labels := metrics.get("labels"):
        return [*(f"{name}: {between.join(_of_label(of_label))}" for name, of_label in labels.items()), *loss]
    return [between.join([*_of_label(metrics), *loss])]


def _of_label(metrics: Mapping[str, Any]) -> list[str]:
    of_clicks = [*_OF_CLICKS, *(["grouped_auc"] if "grouped_auc" in metrics else [])]
    return [_word(metrics, name) for name in (("rmse", "mae") if "rmse" in metrics else of_clicks)]


def _word(metrics: Mapping[str, Any], name: str) -> str:
    word, form = _WORDS[name]
    value = metrics.get(name)
    return f"{word} {'-' if value is None else format(value, form)}"
