"""The contents of metrics.jsonl in a bounded number of points, however many steps it has.

The file is read twice, line by line, and never held in memory.
"""

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
_CHUNK = 1 << 14  # steps that are processed together


@dataclass(slots=True)
class StepFigures:
    """Steps in points of equally many consecutive ones, and evaluations as they are logged.

    If steps were trained again after a rollback, the last log of each step counts. Arrays are
    float64 [points].

    Attributes:
        first: the first step of each point.
        last: the last step of each point.
        steps: the number of steps in each point.
        sums: COLUMNS, added up over each point.
        loss: the mean loss over a point's samples.
        loss_low: the lowest loss of a step.
        loss_high: the highest loss of a step.
        rate_low: the lowest samples a second of a step.
        rate_high: the highest samples a second of a step.
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
        """The middle step of each point."""
        return (self.first + self.last) / 2

    def total(self, column: str) -> float:
        """Return the sum of a column over all steps."""
        return float(self.sums[column].sum())

    def mean(self, column: str) -> np.ndarray:
        """Return the mean of a column over the steps of each point."""
        return self.sums[column] / np.maximum(self.steps, 1)

    @property
    def rate(self) -> np.ndarray:
        """Samples a second in each point."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1000 * self.sums["samples"] / self.sums["ms"]

    @property
    def hit_rate(self) -> np.ndarray:
        """1 - arrivals / rows used, in each point."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1 - self.sums["rows_arrived"] / self.sums["rows_used"]


@dataclass(slots=True)
class _Stretch:
    """Consecutive steps that follow one another in the file.

    Attributes:
        first: the number of the first step.
        last: the number of the last step.
        begin: the offset of the first line, in bytes.
        end: the offset behind the last line, in bytes.
    """

    first: int
    last: int
    begin: int
    end: int


def read_steps(path: Path) -> StepFigures:
    """Read the steps of a run, which may be training.

    If there is no file, there are no steps. A line that is not complete is left out.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            stretches, evaluations = _survey(file)
            steps = sum(stretch.last - stretch.first + 1 for stretch in stretches)
            figures = _points(_chunks(file, stretches), max(-(-steps // MOST_POINTS), 1))
    except FileNotFoundError:
        return _points(iter(()), 1)
    figures.evaluations = evaluations
    return figures


def _survey(file: IO[bytes]) -> tuple[list[_Stretch], list[dict[str, Any]]]:
    """Find the steps that count, and the evaluations.

    If a run went back, steps are logged again, and the last log of a step counts. The same holds
    for evaluations.
    """
    stretches: list[_Stretch] = []
    evaluations: dict[tuple[int, str], dict[str, Any]] = {}
    at = 0
    for line in file:
        begin, at = at, at + len(line)
        # The line is still being written, or its writer was killed.
        if not line.endswith(b"\n"):
            break
        if not line.startswith(_STEP):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                record = json.loads(line)
                if record["kind"] == "evaluation":
                    # The last record of a step and a set replaces earlier ones.
                    evaluations[record["step"], record.get("set", "")] = record
            continue
        try:
            step = int(line[len(_STEP) : line.index(b",", len(_STEP))])
        except ValueError:
            continue
        if stretches and step == stretches[-1].last + 1:
            stretches[-1].last, stretches[-1].end = step, at
            continue
        # The run went back to before this step. What was logged from this step on was discarded.
        while stretches and stretches[-1].first >= step:
            stretches.pop()
        if stretches and stretches[-1].last >= step:
            stretches[-1].last = step - 1
        evaluations = {place: one for place, one in evaluations.items() if one["step"] < step}
        stretches.append(_Stretch(step, step, begin, at))
    return stretches, list(evaluations.values())


def _chunks(file: IO[bytes], stretches: list[_Stretch]) -> Iterator[np.ndarray]:
    """Yield the number, the loss and COLUMNS of the steps, float64 [n, columns]."""
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
    """Return points of `stride` steps each. The last point may have fewer."""
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
    """Combine steps into a point.

    The result is first, last, steps, loss, its lowest and highest, the lowest and the highest rate,
    and the sums of COLUMNS.
    """
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
