"""Plots of the benchmarks' results, drawn from what their JSON files hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from comparison import Point


def file_name(script: str, title: str) -> str:
    """The name of a script's plot."""
    return f"{script}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.png"


def draw(plot: dict[str, Any], path: Path) -> None:
    """Draw a `comparison.Series`; the same figures make the same file, since the date and matplotlib's version are left out."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    _draw(axes, plot)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def _draw(axes: Axes, plot: dict[str, Any]) -> None:
    data: dict[str, list[Point]] = plot["data"]
    if plot["kind"] == "lines":
        for name, points in data.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        numbers = [x for points in data.values() for x, _ in points if isinstance(x, int | float)]
        if numbers and min(numbers) > 0 and max(numbers) > 20 * min(numbers):
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
    else:
        words = list(dict.fromkeys(str(x) for points in data.values() for x, _ in points))
        base = [0.0] * len(words)
        for place, (name, points) in enumerate(data.items()):
            heights = {str(x): y for x, y in points}
            values = [heights.get(word, 0.0) for word in words]
            if plot["kind"] == "stacked":
                axes.bar(words, values, bottom=base, label=name)
                base = [low + value for low, value in zip(base, values, strict=True)]
            else:
                width = 0.8 / len(data)
                axes.bar(
                    [number + (place - (len(data) - 1) / 2) * width for number in range(len(words))], values, width, label=name
                )
        axes.set_xticks(range(len(words)), [word.replace(", ", ",\n") for word in words])
    axes.set_title(plot["title"])
    axes.set_xlabel(plot["x_label"])
    axes.set_ylabel(plot["y_label"])
    if len(data) > 1:
        axes.legend()
    axes.grid(axis="y", alpha=0.3)
