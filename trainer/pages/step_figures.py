"""What metrics.jsonl has, in a bounded number of points, whatever the number of steps: read twice, never held."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from foreload.trainer.compute.reports import COLUMNS, values_of

MOST_POINTS = 150
_STEP = b'{"kind": "step", "step": '
_CHUNK = 1 << 14  # steps that are looked at together


@dataclass(slots=True)
class StepFigures:
    """Steps in points of as many consecutive ones each, float64 [points], and evaluations and checkpoints as they are logged.

    first, last: numbers of a point's first and last step; steps: how many it has; sums: COLUMNS, added up; loss: mean over its samples, with the
    lowest and the highest of a step; rate_low, rate_high: samples a second, of a step. Of steps that were trained again, since the run went back,
    what was logged last counts.
    """

    first: np.ndarray
    last: np.ndarray
    steps: np.ndarray
    sums: dict[str, np.ndarray]
    loss: np.ndarray
    loss_low: np.ndarray
    loss_high: np.ndarray
    rate_low: np.ndarray
    rate_high: np.ndarray
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def middle(self) -> np.ndarray:
        """Where a point stands among the steps."""
        return (self.first + self.last) / 2

    def total(self, column: str) -> float:
        """Of all steps."""
        return float(self.sums[column].sum())

    def mean(self, column: str) -> np.ndarray:
        """Of a step, in each point."""
        return self.sums[column] / np.maximum(self.steps, 1)

    @property
    def rate(self) -> np.ndarray:
        """Samples a second of each point."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1000 * self.sums["samples"] / self.sums["ms"]

    @property
    def hit_rate(self) -> np.ndarray:
        """1 - arrivals / rows used, of each point."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1 - self.sums["rows_arrived"] / self.sums["rows_used"]


@dataclass(slots=True)
class _Stretch:
    """Steps that follow one another in the file: numbers of the first and the last, bytes where their lines begin and end, how many they are."""

    first: int
    last: int
    begin: int
    end: int


def read_steps(path: Path, most_points: int = MOST_POINTS) -> StepFigures:
    """Of a run, which may be training; without a file, of no step. A line that is not whole is left out. Raises OSError."""
    try:
        with open(path, "rb") as file:
            stretches, evaluations = _survey(file)
            steps = sum(stretch.last - stretch.first + 1 for stretch in stretches)
            figures = _points(_chunks(file, stretches), max(-(-steps // most_points), 1))
    except FileNotFoundError:
        return _points(iter(()), 1)
    figures.evaluations = evaluations
    return figures


def _survey(file: IO[bytes]) -> tuple[list[_Stretch], list[dict[str, Any]]]:
    """Where the steps stand that count: of those logged twice, since a run went back, the last. And the evaluations, likewise."""
    stretches: list[_Stretch] = []
    evaluations: dict[tuple[int, str], dict[str, Any]] = {}
    at = 0
    for line in file:
        begin, at = at, at + len(line)
        if not line.endswith(b"\n"):
            break  # still being written, or what a writer was killed in
        if not line.startswith(_STEP):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                record = json.loads(line)
                if record["kind"] == "evaluation":
                    evaluations[record["step"], record.get("set", "")] = record  # of a step and a set, the last that is logged
            continue
        try:
            step = int(line[len(_STEP) : line.index(b",", len(_STEP))])
        except ValueError:
            continue
        if stretches and step == stretches[-1].last + 1:
            stretches[-1].last, stretches[-1].end = step, at
            continue
        while stretches and stretches[-1].first >= step:
            stretches.pop()
        if stretches and stretches[-1].last >= step:
            stretches[-1].last = step - 1
        evaluations = {place: one for place, one in evaluations.items() if one["step"] < step}
        stretches.append(_Stretch(step, step, begin, at))
    return stretches, list(evaluations.values())


def _chunks(file: IO[bytes], stretches: list[_Stretch]) -> Iterator[np.ndarray]:
    """Steps: number, loss and COLUMNS, float64 [n, columns], in chunks."""
    rows: list[tuple[float, ...]] = []
    for stretch in stretches:
        file.seek(stretch.begin)
        at = stretch.begin
        while at < stretch.end:
            line = file.readline()
            at += len(line)
            if not line.startswith(_STEP):
                continue
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                record = json.loads(line)
                if record["step"] > stretch.last:
                    break
                loss = math.nan if record["loss"] is None else float(record["loss"])
                rows.append((record["step"], loss, *map(float, values_of(record))))
            if len(rows) == _CHUNK:
                yield np.array(rows, np.float64)
                rows = []
    if rows:
        yield np.array(rows, np.float64)


def _points(chunks: Iterator[np.ndarray], stride: int) -> StepFigures:
    """Points of `stride` steps each, the last of fewer."""
    kept: list[np.ndarray] = []
    rest = np.empty((0, 2 + len(COLUMNS)))
    for chunk in chunks:
        steps = np.concatenate([rest, chunk])
        whole = len(steps) - len(steps) % stride
        kept += [_point(steps[k : k + stride]) for k in range(0, whole, stride)]
        rest = steps[whole:]
    if len(rest):
        kept.append(_point(rest))
    columns = np.array(kept).reshape(len(kept), 8 + len(COLUMNS)).T
    sums = dict(zip(COLUMNS, columns[8:], strict=True))
    first, last, steps, *others = columns[:8]
    return StepFigures(first, last, steps, sums, *others)


def _point(steps: np.ndarray) -> np.ndarray:
    """first, last, steps, loss, its lowest and highest, the lowest and the highest rate, then COLUMNS added up."""
    number, loss = steps[:, 0], steps[:, 1]
    samples, ms = steps[:, 2 + COLUMNS.index("samples")], steps[:, 2 + COLUMNS.index("ms")]
    finite = np.isfinite(loss)
    losses = (
        [np.average(loss[finite], weights=np.maximum(samples[finite], 1e-9)), loss[finite].min(), loss[finite].max()]
        if finite.any()
        else [math.nan] * 3
    )
    rates = 1000 * samples / np.maximum(ms, 1e-9)
    return np.array([number[0], number[-1], len(steps), *losses, rates.min(), rates.max(), *steps[:, 2:].sum(axis=0)])
