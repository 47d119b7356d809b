"""All figures that a page shows of a run.

They are read from the run's folder, and from its schedule if that still exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreload.base.codec import FormError, parse_json
from foreload.base.memory import available_bytes
from foreload.pipelines.compiler.other_slots import BYTES_OF_USE, count_moves, lane_uses, lru_arrivals, lru_depths
from foreload.pipelines.errors import PipelineError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.checkpoints.best import kept_best
from foreload.trainer.errors import RunError
from foreload.trainer.pages.run_story import Story, story_of
from foreload.trainer.pages.step_figures import StepFigures, read_steps
from foreload.trainer.run.directory import METRICS, SUMMARY, Run
from foreload.trainer.run.event_log import read_events
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.saved.kept import schedule_of

USES_AT_ONCE = 10_000_000
"""The most rows used, over all steps, for which the end of a run counts an LRU cache's arrivals.

Counting takes about 0.1 us for each.
"""


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """The arrivals of a whole schedule.

    Attributes:
        planned: the arrivals of the schedule as it is planned.
        rows_used: the rows used, over all steps.
        fewest: the fewest arrivals that the schedule's slots allow. If None, they are not known.
        lru: the arrivals of an LRU cache with the same slots. If None, `why` says why they are not
            known.
        lru_steps: the LRU arrivals of each step, int64 [steps], from `first_step` on.
    """

    planned: int
    rows_used: int
    fewest: int | None = None
    lru: int | None = None
    why: str = ""
    lru_steps: np.ndarray | None = None
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run.

    Attributes:
        state: the state of the run, in a word.
        summary: the summary of its last call. If None, the call has not ended.
        schedule: its last schedule, or what the run keeps of it. If None, neither exists.
        cache: the arrivals of its last schedule. If None, they cannot be counted.
        best_step: the step of its best evaluation, if the run stands for that; else None.
    """

    name: str
    state: str
    manifest: Manifest
    steps: StepFigures
    story: Story
    summary: Mapping[str, Any] | None
    schedule: Schedule | None
    cache: CacheCounts | None
    best_step: int | None

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations, as metrics.jsonl has them."""
        return self.steps.evaluations

    @property
    def is_of_best(self) -> bool:
        """Whether `evaluation` is the best one; otherwise it is the last one."""
        return any(one["step"] == self.best_step for one in self.evaluations)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The evaluation of the model that the run stands for, of the first set. None if there is none."""
        step = self.best_step if self.is_of_best else self.evaluations[-1]["step"] if self.evaluations else None
        return next((one for one in self.evaluations if one["step"] == step), None)


def read_run(path: Path | str, state: str | None = None, most_uses: int | None = None) -> RunFigures:
    """Read the figures of a run, which may be training. The run is not changed.

    Args:
        state: the state of the run in a word. If None, the status in the run's folder says it.
        most_uses: the most rows used for which arrivals are counted. If None, memory alone limits
            it: counting may take half of what is free.

    Raises:
        RunError: there is no run at `path`.
        OSError: a file cannot be read.
    """
    run = Run.open(path)
    manifest, status = run.manifest, run.status
    steps = read_steps(run.path / METRICS)
    metrics = run.path / METRICS
    latest = metrics.stat().st_mtime if metrics.exists() else None
    kept = kept_best(run)
    began_with = manifest.local_stores or len(manifest.store_urls)
    return RunFigures(
        name=run.path.absolute().name,
        state=state or ("never trained" if status is None else status.state),
        manifest=manifest,
        steps=steps,
        story=story_of(read_events(run.path), range(began_with), latest),
        summary=_summary(run.path / SUMMARY),
        schedule=_schedule(run),
        cache=cache_counts(manifest, most_uses),
        best_step=None if kept is None else kept.best.step,
    )


def _summary(path: Path) -> Mapping[str, Any] | None:
    with suppress(OSError, FormError):
        summary = parse_json(path.read_bytes())
        return summary if isinstance(summary, dict) else None
    return None


def _schedule(run: Run) -> Schedule | None:
    with suppress(RunError, OSError):
        return schedule_of(run)
    return None


def cache_counts(manifest: Manifest, most_uses: int | None) -> CacheCounts | None:
    """Return the arrivals of the schedule that a run trained on last.

    Returns None if the schedule no longer exists, was prepared again, or is not complete.
    """
    stage = manifest.stages[-1]
    try:
        schedule = Schedule(stage.path)
    except (PipelineError, OSError):
        return None
    if schedule.identity != stage.identity:
        return None
    with suppress(PipelineError, OSError):
        return schedule_counts(schedule, most_uses)
    return None


def countable(schedule: Schedule, most_uses: int | None) -> str:
    """Return why the uses of a schedule's rows cannot be counted, or "" if they can.

    Args:
        most_uses: as in `read_run`.
    """
    uses = schedule.manifest["counts"]["rows_used"]
    if most_uses is not None and uses > most_uses:
        return f"{uses:,} rows used are many to count at the end of a run: `foreload report` does it"
    if 2 * BYTES_OF_USE * uses > available_bytes():
        return f"{uses:,} rows used are too many to be counted in this machine's memory"
    return ""


def schedule_counts(schedule: Schedule, most_uses: int | None) -> CacheCounts:
    """Return the arrivals of a complete schedule.

    Raises:
        ScheduleError: the schedule is damaged.
    """
    counts, exact = schedule.manifest["counts"], bool(schedule.manifest["lookahead"]["exact"])
    planned, used = int(counts["arrivals"]), int(counts["rows_used"])
    if why := countable(schedule, most_uses):
        return CacheCounts(planned, used, planned if exact else None, None, why)
    header = schedule.header
    of_steps = np.zeros(header.end_step - header.first_step, np.int64)
    fewest = 0
    for lane in range(header.lanes):
        uses = lane_uses(schedule, lane)
        of_steps += lru_arrivals(uses, lru_depths(uses), header.slots[lane])
        fewest += 0 if exact else int(count_moves(uses, header.slots[lane]).arrived.sum())
    return CacheCounts(planned, used, planned if exact else fewest, int(of_steps.sum()), "", of_steps, header.first_step)
