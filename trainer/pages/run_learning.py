"""Of a run's page: losses and metrics, throughput, where step time goes, calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreload.trainer.pages.markup import Html, count, fixed, missing, number, section, share, table, tag
from foreload.trainer.pages.plots import Plot, Series, whole
from foreload.trainer.pages.run_figures import RunFigures
from foreload.trainer.pages.step_figures import MOST_POINTS

_PARTS = (
    ("ms_compute", "compute", "c0"),
    ("ms_exchange", "exchange between trainers", "c2"),
    ("ms_waiting", "waiting for rows", "c1"),
    ("rest", "the rest", "c4"),
)
_NO_STEPS = "No step is trained yet."
_MOST_EVALUATIONS = 100  # that the table lists, the last ones
_MOST_MARKS = 200  # that are drawn, the last ones


def named(run: RunFigures, what: str, several: bool) -> str:
    """What a line shows, and of which run where there are several."""
    return f"{run.name}: {what}" if several else what


def learning(runs: Sequence[RunFigures]) -> Html:
    """Losses and metrics."""
    several = len(runs) > 1
    if not any(len(run.steps.steps) for run in runs):
        return section("Losses and metrics", missing(_NO_STEPS))
    lines, areas = [], []
    for place, run in enumerate(runs):
        # What two runs have in common is seen as both.
        steps, colour, style = run.steps, f"c{place}", "dash" if place else "line"
        lines.append(
            Series(named(run, "training loss", several), steps.middle, steps.loss, colour, style, steps.loss_low, steps.loss_high)
        )
        if run.evaluations:
            drawn = _spread(run.evaluations)
            at = np.array([float(one["step"]) for one in drawn])
            other = colour if several else "c1"
            lines.append(Series(named(run, "log loss in evaluation", several), at, _metric(drawn, "log_loss"), other, "dots"))
            areas.append(Series(named(run, "AUC", several), at, _metric(drawn, "auc"), colour, "dots"))
    points = max((run.steps.steps.max(initial=1) for run in runs), default=1)
    each = (
        "each point is one step"
        if points == 1
        else f"each point is the mean of {points:.0f} steps, with the lowest and highest of a step as a band"
    )
    read = f"Lower is better; {each}. Dots are evaluations: a gap that widens between them and the line tells of overfitting."
    loss = Plot("Loss", "log loss, nats a sample", "step", read, lines, x_from_zero=True)
    plots = [loss.html()]
    if len(areas) and max(len(area.x) for area in areas) > 1:
        read = "Higher is better: the share of pairs of a click and no click that the model orders rightly; 0.5 is chance."
        plots.append(Plot("AUC", "share of pairs", "step", read, areas, x_from_zero=True).html())
    head = [
        "after step",
        *(["run"] if several else []),
        "epoch",
        "samples",
        "log loss",
        "AUC",
        "normalised entropy",
        "predicted / observed",
    ]
    rows = [
        [
            count(one["step"]), *([run.name] if several else []), count(one["epoch"] + 1), count(one["samples"]), fixed(one["log_loss"], 5),
            fixed(one["auc"], 4), fixed(one["normalized_entropy"], 4), fixed(_ratio(one), 4),
        ]
        for run in runs
        for one in run.evaluations[-_MOST_EVALUATIONS:]
    ]  # fmt: skip
    listed = (
        table(head, rows, words=[1] if several else [])
        if rows
        else missing("No evaluation: the schedule has none, or none is over yet.")
    )
    return section("Losses and metrics", tag("div", plots, class_="plots"), listed)


def _spread(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOST_POINTS of them, evenly, the first and the last among them."""
    places = np.unique(np.linspace(0, len(evaluations) - 1, min(len(evaluations), MOST_POINTS)).round().astype(int))
    return [evaluations[place] for place in places]


def _metric(evaluations: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([math.nan if one[name] is None else float(one[name]) for one in evaluations])


def _ratio(evaluation: dict[str, Any]) -> float | None:
    """What is predicted over what is observed; None where neither is told."""
    bins = evaluation.get("calibration") or []
    clicked = sum(samples * share_of for samples, _, share_of in bins)
    return sum(samples * predicted for samples, predicted, _ in bins) / clicked if clicked else None


def throughput(runs: Sequence[RunFigures]) -> Html:
    """Samples a second, with what befell the run."""
    if not any(len(run.steps.steps) for run in runs):
        return section("Throughput", missing(_NO_STEPS))
    several = len(runs) > 1
    lines = []
    for place, run in enumerate(runs):
        steps = run.steps
        line = Series(
            named(run, "samples a second", several),
            steps.middle,
            steps.rate,
            f"c{place}",
            "line",
            steps.rate_low,
            steps.rate_high,
        )
        lines.append(line)
    read = "Higher is faster, by the time of the steps alone, without start and evaluation; the band has the slowest and the fastest step."
    marks = [mark for run in runs for mark in run.story.marks[-_MOST_MARKS:]]
    if marks:
        read += " Dotted upright lines are losses of store shards and trainers, and their end: a dip beside one is what it cost."
    return section(
        "Throughput", Plot("Throughput", "samples a second", "step", read, lines, marks, from_zero=True, cut=True).html()
    )


def step_time(runs: Sequence[RunFigures]) -> Html:
    """Where it goes, in all and over the steps."""
    shown = [run for run in runs if len(run.steps.steps)]
    if not shown:
        return section("Where step time goes", missing(_NO_STEPS))
    several, drawn = len(runs) > 1, []
    for run in shown:
        means = {name: _part(run, name) for name, _, _ in _PARTS}
        steps = run.steps
        total = {name: float((values * steps.steps).sum() / steps.steps.sum()) for name, values in means.items()}
        bar = [(name, colour, total[part], f"{number(total[part])} ms") for part, name, colour in _PARTS]
        read = (
            f"A step takes {number(steps.total('ms') / steps.steps.sum())} ms on average, of the slowest trainer. Waiting for rows is that of the "
            "trainer which waited most: where it is wide, the store is slow, or there are few slots. Where the exchange is wide, fewer trainers or "
            "a faster link between them help."
        )
        drawn.append(whole(named(run, "A step on average", several), "milliseconds", read, bar))
        areas = [Series(name, steps.middle, means[part], colour, "area") for part, name, colour in _PARTS]
        read = "The height is the time of a step; the colours say on what. A part that grows on the way is worth a look."
        drawn.append(
            Plot(
                named(run, "A step on the way", several), "milliseconds a step", "step", read, areas, from_zero=True, cut=True
            ).html()
        )
    return section("Where step time goes", tag("div", drawn, class_="plots"))


def _part(run: RunFigures, name: str) -> np.ndarray:
    """Milliseconds a step, in each point; what no clock is at is the rest."""
    if name != "rest":
        return run.steps.mean(name)
    known = sum((run.steps.mean(part) for part, _, _ in _PARTS if part != "rest"), np.zeros(len(run.steps.steps)))
    return np.maximum(run.steps.mean("ms") - known, 0)


def calibration(runs: Sequence[RunFigures]) -> Html:
    """Predicted against observed, of the last evaluation."""
    title, several = "Calibration", len(runs) > 1
    lines, words = [], []
    most = 0.0
    for place, run in enumerate(runs):
        last = run.evaluations[-1] if run.evaluations else None
        bins = np.array((last or {}).get("calibration") or np.empty((0, 3)), np.float64).reshape(-1, 3)
        if last is None or not len(bins):
            why = (
                "it has no evaluation"
                if last is None
                else "its evaluations do not tell it: it was trained by an earlier version, or a score is not finite"
            )
            words.append(missing(f"{run.name}: not known, since {why}."))
            continue
        samples, predicted, clicked = bins.T
        error = 2 * np.sqrt(np.maximum(clicked * (1 - clicked), 1 / samples) / samples)
        most = max(most, float(predicted.max()), float(clicked.max()))
        lines.append(
            Series(
                named(run, "observed", several),
                predicted,
                clicked,
                f"c{place}",
                "dots",
                np.maximum(clicked - error, 0),
                clicked + error,
            )
        )
        ratio = _ratio(last)
        told = f"{share(float(samples @ predicted / samples.sum()))} predicted on average, {share(float(samples @ clicked / samples.sum()))} observed"
        words.append(
            tag("p", f"{run.name}: {told}; predicted over observed {fixed(ratio, 4)}, after step {count(last['step'])}.")
        )
    if not lines:
        return section(title, words)
    ideal = Series("as predicted", np.array([0.0, most]), np.array([0.0, most]), "c4", "dash")
    read = (
        "Each dot is as many evaluation samples as the others, put together by what is predicted of them. On the dashed line, as many were clicked "
        "as predicted; above it the model says too little, below too much. The bars are two standard errors of chance."
    )
    plot = Plot(
        "Predicted against observed", "share clicked", "mean prediction", read, [*lines, ideal], from_zero=True, x_from_zero=True
    )
    return section(title, tag("div", plot.html(), tag("div", words), class_="plots"))
