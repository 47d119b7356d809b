"""Parts of a run's page: losses and metrics, throughput, step time, and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foreload.trainer.pages.markup import Html, count, fixed, missing, number, share, tag
from foreload.trainer.pages.plots import Plot, Series, whole
from foreload.trainer.pages.run_figures import RunFigures
from foreload.trainer.pages.run_metrics import (
    in_set,
    label_names,
    labels_of,
    line_colour,
    lines,
    loss_points,
    metric_plots,
    metric_table,
    named,
    of_label,
    ratio,
    set_names,
)

_PARTS = (
    ("ms_compute", "compute", "c0"),
    ("ms_exchange", "exchange between trainers", "c2"),
    ("ms_waiting", "waiting for rows", "c1"),
    ("rest", "the rest", "c4"),
)
_MOST_MARKS = 200  # marks of a run that are drawn, the last ones


def learning(runs: Sequence[RunFigures]) -> list[Html]:
    """Return the losses and the metrics."""
    several = len(runs) > 1
    drawn, losses = [], set()
    of_training = lines(runs, "training loss", lambda steps: (steps.loss, steps.loss_low, steps.loss_high), dashed=True)
    for run, line in zip(runs, of_training, strict=True):
        drawn.append(line)
        for place, name in enumerate(set_names([run]) if run.evaluations else ()):
            what, at, values = loss_points(run, name)
            words = named(run, in_set(f"{what} in evaluation", name), several)
            drawn.append(Series(words, at, values, line.colour if several else line_colour(1 + place), "dots"))
            losses.add(what)
    points = max((run.steps.steps.max(initial=1) for run in runs), default=1)
    each = (
        "each point is one step"
        if points == 1
        else f"each point is the mean of {points:.0f} steps, with the lowest and highest of a step as a band"
    )
    read = f"Lower is better; {each}. Dots are evaluations: a gap that widens between them and the line shows overfitting."
    unit = "training loss" if "loss" in losses else "log loss, nats a sample"
    loss = Plot("Loss", unit, read, drawn, x_from_zero=True)
    listed = metric_table(runs) or missing("No evaluation: the schedule has none, or none has finished yet.")
    return [tag("div", [loss.html(), *metric_plots(runs)], class_="plots"), listed]


def throughput(runs: Sequence[RunFigures]) -> list[Html]:
    """Return samples a second over the steps, with the events of the run as marks."""
    drawn = lines(runs, "samples a second", lambda steps: (steps.rate, steps.rate_low, steps.rate_high))
    read = "Higher is faster. Only the time of the steps counts, not start or evaluation; the band shows the slowest and the fastest step."
    marks = [mark for run in runs for mark in run.story.marks[-_MOST_MARKS:]]
    if marks:
        read += " Dotted vertical lines mark when store shards or trainers were lost, and when they were back: a dip beside one is what it cost."
    return [Plot("Throughput", "samples a second", read, drawn, marks, from_zero=True, cut=True).html()]


def step_time(runs: Sequence[RunFigures]) -> list[Html]:
    """Return the parts of the step time, on average and over the steps."""
    several, drawn = len(runs) > 1, []
    for run in runs:
        steps = run.steps
        if not len(steps.steps):
            continue
        means = {name: _part(run, name) for name, _, _ in _PARTS}
        total = {name: float((values * steps.steps).sum() / steps.steps.sum()) for name, values in means.items()}
        bar = [(name, colour, total[part], f"{number(total[part])} ms") for part, name, colour in _PARTS]
        read = (
            f"A step takes {number(steps.total('ms') / steps.steps.sum())} ms on average, of the slowest trainer. "
            "Waiting for rows is the time of the "
            "trainer that waited longest: if it is wide, the store is slow, or there are few slots. If the exchange is wide, fewer trainers or "
            "a faster link between them help."
        )
        drawn.append(whole(named(run, "A step on average", several), "milliseconds", read, bar))
        areas = [Series(name, steps.middle, means[part], colour, "area") for part, name, colour in _PARTS]
        read = "The height is the time of a step; the colours show how it is spent. A part that grows during training is worth a look."
        title = named(run, "A step during training", several)
        drawn.append(Plot(title, "milliseconds a step", read, areas, from_zero=True, cut=True).html())
    return [tag("div", drawn, class_="plots")]


def _part(run: RunFigures, name: str) -> np.ndarray:
    """Return a part of the step time in each point, in milliseconds a step.

    The rest is the time that no other part measures.
    """
    if name != "rest":
        return run.steps.mean(name)
    known = sum((run.steps.mean(part) for part, _, _ in _PARTS if part != "rest"), np.zeros(len(run.steps.steps)))
    return np.maximum(run.steps.mean("ms") - known, 0)


def calibration(runs: Sequence[RunFigures]) -> list[Html]:
    """Return predicted against observed clicks, for each label of clicks.

    The figures are of the evaluation of the model that the run stands for, of the first set.
    """
    parts: list[Html] = []
    for name in label_names(runs):
        of_runs = [None if run.evaluation is None else labels_of(run.evaluation).get(name) for run in runs]
        if not any(one is not None and "rmse" in one for one in of_runs):
            parts += _calibration_of(runs, name, of_runs)
    return parts or [missing("Labels that are numbers have no calibration plot; predicted over observed is above.")]


def _calibration_of(runs: Sequence[RunFigures], name: str, of_runs: Sequence[Mapping[str, Any] | None]) -> list[Html]:
    """Return the calibration of a label, from the metrics of each run's evaluation.

    Args:
        name: the label; "" if it is the only one.
    """
    several = len(runs) > 1
    drawn, words = [], []
    most = 0.0
    for place, (run, metrics) in enumerate(zip(runs, of_runs, strict=True)):
        bins = np.array((metrics or {}).get("calibration") or np.empty((0, 3)), np.float64).reshape(-1, 3)
        if metrics is None or not len(bins):
            why = (
                "it has no evaluation"
                if metrics is None
                else "its evaluations do not have it: it was trained by an earlier version, or a score is not finite"
            )
            words.append(missing(f"{run.name}: not known, since {why}."))
            continue
        samples, predicted, clicked = bins.T
        # Two standard errors of the share p of n samples. p (1 - p) is taken as at least 1 / n, as for
        # about one click, so that a bin without clicks has a bar too.
        error = 2 * np.sqrt(np.maximum(clicked * (1 - clicked), 1 / samples) / samples)
        most = max(most, float(predicted.max()), float(clicked.max()))
        low = np.maximum(clicked - error, 0)
        drawn.append(Series(named(run, "observed", several), predicted, clicked, f"c{place}", "dots", low, clicked + error))
        shares = [share(float(samples @ column / samples.sum())) for column in (predicted, clicked)]
        words.append(
            tag(
                "p",
                f"{run.name}: {shares[0]} predicted on average, {shares[1]} observed; predicted over observed {fixed(ratio(metrics), 4)}, after step "
                f"{count(run.evaluation['step'] if run.evaluation else None)}.",
            )
        )
    if not drawn:
        return words
    ideal = Series("as predicted", np.array([0.0, most]), np.array([0.0, most]), "c4", "dash")
    read = (
        "Each dot is the same number of evaluation samples, grouped by their predicted value. On the dashed line, as many were clicked "
        "as predicted; above it the model predicts too few clicks, below it too many. The bars are two standard errors."
    )
    title = of_label("Predicted against observed", name)
    plot = Plot(title, "share clicked", read, [*drawn, ideal], x_unit="mean prediction", from_zero=True, x_from_zero=True)
    return [tag("div", plot.html(), tag("div", words), class_="plots")]
