"""What metrics.jsonl says of a step: of the trainers' reports, and, where one of them is missing, of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import walk
from foreload.trainer.compute.reports import StepReport

ROWS = ("rows_used", "rows_arrived", "rows_fetched", "rows_written_back")


def rows_of_steps(schedule: Schedule, first: int, last: int) -> dict[int, dict[str, int]]:
    """Return, by step, what the rows of all trainers' reports add up to, which the schedule determines. Raises ScheduleError.

    Args:
        schedule: The schedule, whose steps `first` to `last` are published.
        first: The first training step.
        last: The last one.
    """
    figures = np.zeros((len(ROWS), last + 1 - first), np.int64)
    for lane in range(schedule.header.lanes):
        for moves in walk(schedule, lane, first - 1, [last]):
            figures[:, moves.first - first : moves.last + 1 - first] += moves.counts()
    return {step: dict(zip(ROWS, of_step, strict=True)) for step, of_step in enumerate(figures.T.tolist(), first)}


def merged(reports: Sequence[StepReport]) -> dict[str, Any]:
    """One step's line of metrics.jsonl from the reports of all trainers about it.

    Rows, bytes and processor time are added up; times are those of the trainer that took longest, waiting, and processor time of the step's own
    thread, the longest any took.
    """
    first = reports[0]
    slowest = max(reports, key=lambda report: report.seconds)
    waiting = max(report.seconds_waiting for report in reports)
    return {
        "kind": "step",
        **{name: getattr(first, name) for name in ("step", "epoch", "samples", "loss")},
        **{name: sum(getattr(report, name) for report in reports) for name in (*ROWS, "bytes_sent")},
        "ms": 1000 * slowest.seconds,
        "ms_compute": 1000 * slowest.seconds_compute,
        "ms_exchange": 1000 * slowest.seconds_exchange,
        "ms_waiting": 1000 * waiting,
        "ms_processor": 1000 * sum(report.seconds_processor for report in reports),
        "ms_thread": 1000 * max(report.seconds_thread for report in reports),
    }
