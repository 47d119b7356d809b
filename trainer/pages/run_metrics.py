"""Parts of a run's page: lines over the steps, and the metrics of evaluations.

The metrics are shown as tiles, plots and a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from foreload.trainer.pages.markup import Html, count, fixed, table_of
from foreload.trainer.pages.plots import Plot, Series
from foreload.trainer.pages.run_figures import RunFigures
from foreload.trainer.pages.step_figures import MOST_POINTS, StepFigures

_COLOURS = 5  # colours of lines (`plots.Series`)
_MOST_EVALUATIONS = 100  # evaluations in the table, the last ones
_AUC, _RMSE, _GROUPED = ("AUC", "auc", 4), ("RMSE", "rmse", 5), ("grouped AUC", "grouped_auc", 4)
_CLICKS = (("log loss", "log_loss", 5), _AUC, ("normalised entropy", "normalized_entropy", 4))
_NUMBERS = (_RMSE, ("MAE", "mae", 5))
_NOTES = {
    "log_loss": "nats a sample, ",
    "auc": "",
    "normalized_entropy": "1 = the mean label",
    "rmse": "root mean square error, ",
    "mae": "mean absolute error, ",
}


def named(run: RunFigures, what: str, several: bool) -> str:
    """Return the name of a line, with its run if there are several."""
    return f"{run.name}: {what}" if several else what


def lines(
    runs: Sequence[RunFigures], what: str, read: Callable[[StepFigures], Sequence[np.ndarray]], dashed: bool = False
) -> list[Series]:
    """Return a line over the steps for each run, in the run's colour.

    Args:
        what: the name of the line.
        read: returns the values, and the lowest and the highest if the line has a band.
        dashed: whether the second run's line is dashed, so that both lines show where they
            coincide.
    """
    return [
        Series(
            named(run, what, len(runs) > 1), run.steps.middle, values, f"c{place}", "dash" if dashed and place else "line", *band
        )
        for place, run in enumerate(runs)
        for values, *band in [read(run.steps)]
    ]


def labels_of(evaluation: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the metrics of each label by its name, "" if there is only one."""
    labels: Mapping[str, Mapping[str, Any]] = evaluation.get("labels") or {"": evaluation}
    return labels


def label_names(runs: Sequence[RunFigures]) -> list[str]:
    """Return the names of the labels in the runs' evaluations; "" if there is only one."""
    return list(dict.fromkeys(name for run in runs for one in run.evaluations for name in labels_of(one))) or [""]


def set_names(runs: Sequence[RunFigures]) -> list[str]:
    """Return the names of the runs' evaluation sets; "" if they have no names."""
    return list(dict.fromkeys(_set(one) for run in runs for one in run.evaluations)) or [""]


def of_set(run: RunFigures, name: str) -> list[dict[str, Any]]:
    """Return a run's evaluations of a set."""
    return [one for one in run.evaluations if _set(one) == name]


def _set(evaluation: Mapping[str, Any]) -> str:
    return str(evaluation.get("set", ""))


def of_label(what: str, name: str) -> str:
    """Return a title, with its label if there are several."""
    return f"{what} of {name}" if name else what


def ratio(metrics: Mapping[str, Any]) -> float | None:
    """Return the ratio of predicted to observed of a label, or None if it is not logged."""
    if "predicted_over_observed" in metrics or not metrics.get("calibration"):
        return metrics.get("predicted_over_observed")
    # Runs of earlier versions log only the bins of the calibration.
    clicked = sum(samples * share_of for samples, _, share_of in metrics["calibration"])
    return sum(samples * predicted for samples, predicted, _ in metrics["calibration"]) / clicked if clicked else None


def trained_loss(evaluation: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the name of the loss that is trained, and its mean."""
    return ("loss", evaluation["loss"]) if "loss" in evaluation else ("log loss", evaluation["log_loss"])


def in_set(what: str, name: str) -> str:
    """Return a title, with its evaluation set if sets have names."""
    return f"{what}, {name}" if name else what


def line_colour(place: int) -> str:
    """Return the colour of a line, given its index in the plot."""
    return f"c{place % _COLOURS}"


def loss_points(run: RunFigures, name: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the loss in a run's evaluations of a set.

    Returns the name of the loss, the steps and the values, float64 [n].
    """
    drawn = _spread(of_set(run, name))
    values = [trained_loss(one) for one in drawn]
    steps = np.array([float(one["step"]) for one in drawn])
    return (values[0][0] if values else "log loss"), steps, np.array([_number(value) for _, value in values])


def metric_plots(runs: Sequence[RunFigures]) -> list[Html]:
    """Plot AUC of clicks and RMSE of numbers over the steps.

    A metric with a single evaluation is not plotted.
    """
    plots = []
    for name in label_names(runs):
        areas: list[Series] = []
        errors: list[Series] = []
        for place, (run, of) in enumerate((one, of) for one in runs for of in set_names([one])):
            drawn = _spread([one for one in of_set(run, of) if name in labels_of(one)])
            at = np.array([float(one["step"]) for one in drawn])
            metrics = [labels_of(one)[name] for one in drawn]
            if metrics:
                into, metric, word = (errors, "rmse", "RMSE") if _is_number(metrics[0]) else (areas, "auc", "AUC")
                values = np.array([_number(one.get(metric)) for one in metrics])
                into.append(Series(named(run, in_set(word, of), len(runs) > 1), at, values, line_colour(place), "dots"))
        if _drawable(areas):
            read = "Higher is better: the share of pairs of a click and no click that the model orders correctly; 0.5 is chance."
            plots.append(Plot(of_label("AUC", name), "share of pairs", read, areas, x_from_zero=True).html())
        if _drawable(errors):
            read = "Lower is better: the root mean square of predicted minus observed values."
            plots.append(Plot(of_label("RMSE", name), "as the label", read, errors, x_from_zero=True).html())
    return plots


def metric_table(runs: Sequence[RunFigures]) -> Html | None:
    """Return the last evaluations as a table, or None if there are none.

    There is a row for each evaluation, set and label.
    """
    names, several = label_names(runs), len(runs) > 1
    shown = [
        (run, one, name, metrics)
        for run in runs
        for one in run.evaluations[-_MOST_EVALUATIONS:]
        for name, metrics in labels_of(one).items()
    ]
    kinds = {_is_number(metrics) for _, _, _, metrics in shown}
    with_loss, in_sets = (any(name in one for _, one, _, _ in shown) for name in ("loss", "set"))
    columns = [
        *(_CLICKS if False in kinds else ()),
        *((_GROUPED,) if any("grouped_auc" in metrics for _, _, _, metrics in shown) else ()),
        *(_NUMBERS if True in kinds else ()),
    ]
    rows = [
        {
            "after step": count(one["step"]),
            **({"run": run.name} if several else {}),
            "epoch": count(one["epoch"] + 1),
            "samples": count(one["samples"]),
            **({"loss": fixed(one.get("loss"), 5)} if with_loss else {}),
            **({"set": _set(one)} if in_sets else {}),
            **({"label": name} if names != [""] else {}),
            **{title: fixed(metrics.get(metric), digits) for title, metric, digits in columns},
            "predicted / observed": fixed(ratio(metrics), 4),
        }
        for run, one, name, metrics in shown
    ]
    return table_of(rows, words=("run", "set", "label")) if rows else None


def metric_tiles(runs: Sequence[RunFigures]) -> list[tuple[str, list[str], str]]:
    """Return the headline metrics: a title, a value for each run, and a note.

    If there is one label, these are all of its metrics. If there are several, they are the most
    important one of each. All are of the first evaluation set.
    """
    shown = [run.evaluation for run in runs]
    names, tiles = label_names(runs), []
    of_sets = "".join(f" of {name}" for name in dict.fromkeys(_set(one) for one in shown if one is not None) if name)
    which = _which(runs)
    if any(one is not None and "loss" in one for one in shown):
        values = [fixed(None if one is None else one.get("loss"), 5) for one in shown]
        tiles.append(("loss", values, f"the training loss, mean, {which}{of_sets}"))
    for name in names:
        of_runs = [{} if one is None else labels_of(one).get(name, {}) for one in shown]
        metrics, foremost = (_NUMBERS, _RMSE) if any(map(_is_number, of_runs)) else (_CLICKS, _AUC)
        for title, metric, digits in metrics if names == [""] else [foremost]:
            note = _NOTES[metric] if metric == "normalized_entropy" else f"{_NOTES[metric]}{which}"
            tiles.append((of_label(title, name), [fixed(one.get(metric), digits) for one in of_runs], note + of_sets))
    return tiles


def _which(runs: Sequence[RunFigures]) -> str:
    """Return which evaluation the headline metrics are of: the last one, or the best one and its step."""
    of_runs = [f"best evaluation, after step {count(run.best_step)}" if run.is_of_best else "last evaluation" for run in runs]
    if len(set(of_runs)) == 1:
        return of_runs[0]
    return "; ".join(f"{run.name}: {which}" for run, which in zip(runs, of_runs, strict=True))


def _is_number(metrics: Mapping[str, Any]) -> bool:
    """Return whether these are the metrics of a label of numbers."""
    return "rmse" in metrics


def _drawable(lines: Sequence[Series]) -> bool:
    return any(len(line.x) > 1 for line in lines)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _spread(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most MOST_POINTS evenly spaced evaluations, the first and the last included."""
    places = np.unique(np.linspace(0, len(evaluations) - 1, min(len(evaluations), MOST_POINTS)).round().astype(int))
    return [evaluations[place] for place in places]
