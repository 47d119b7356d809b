"""What metrics.jsonl says of a step: of the trainers' reports, and, where one of them is missing, of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.reports import StepReport

ROWS = ("rows_used", "rows_arrived", "rows_fetched", "rows_written_back")


def rows_of_steps(schedule: Schedule, first: int, last: int) -> dict[int, dict[str, int]]:
    """Return, by step, what the rows of all trainers' reports add up to, which the schedule determines. Raises ScheduleError.

    Args:
        schedule: The schedule, whose steps `first` to `last` are published.
        first: The first training step.
        last: The last one.
    """
    figures: dict[int, dict[str, int]] = {step: dict.fromkeys(ROWS, 0) for step in range(first, last + 1)}
    for segment in schedule.segments():
        steps = range(max(first, segment.first), min(last + 1, segment.first + len(segment.samples)))
        for lane in range(schedule.header.lanes if segment.kind == "train" else 0):
            moves = schedule.moves(segment.index, lane) if steps else None
            for step in steps:
                assert moves is not None
                used, tags, ends = (moves.column(name, step - segment.first) for name in ("slots", "arrival_tag", "ends"))
                counts = used.size, tags.size, int(np.count_nonzero(tags)), ends.size
                for name, count in zip(ROWS, counts, strict=True):
                    figures[step][name] += count
        if segment.kind == "train" and segment.first + len(segment.samples) > last:
            break
    return figures


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
