"""The figures of a step that the schedule determines, for steps that a trainer which was lost did not report."""

from __future__ import annotations

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.reports import moved_rows


def rows_of_steps(schedule: Schedule, first: int, last: int) -> dict[int, dict[str, int]]:
    """Return, by step, what the rows of all trainers' reports add up to. Raises ScheduleError.

    Args:
        schedule: The schedule, whose steps `first` to `last` are published.
        first: The first training step.
        last: The last one.
    """
    figures = {}
    for segment in schedule.segments():
        if segment.kind != "train":
            continue
        steps = range(max(first, segment.first), min(last + 1, segment.first + len(segment.samples)))
        lanes = [schedule.moves(segment.index, lane) for lane in range(schedule.header.lanes if steps else 0)]
        for step in steps:
            names, place = ("slots", "arrival_tag", "ends"), step - segment.first
            figures[step] = moved_rows([[moves.column(name, place) for name in names] for moves in lanes])
        if segment.first + len(segment.samples) > last:
            break
    return figures
