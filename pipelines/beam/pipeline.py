"""The pipeline as a whole: read -> (count ->) encode -> order -> (shuffle ->) compile."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam

from foreload.pipelines.base.files import write_atomically
from foreload.pipelines.beam.order import (
    CollectShuffled,
    CollectSorted,
    CutBuckets,
    CutShuffle,
    HoldOut,
    ShuffleBucket,
    SortBucket,
    SortRuns,
    source_of,
)
from foreload.pipelines.beam.read import add_reading
from foreload.pipelines.beam.stages import (
    GroupStage,
    Wrap,
    each,
    grouped,
)
from foreload.pipelines.compiler.compile import compile_schedule
from foreload.pipelines.planning.plan import PROGRESS, Plan, ReadTask
from foreload.pipelines.schedule.format import MANIFEST

_PROGRESS_SECONDS = 1.0


class Compile(GroupStage):
    """The final orders -> the schedule. One worker does it; lanes are planned in threads."""

    def together(self, values: list[Any]) -> Iterator[Any]:
        if (self.plan.out / MANIFEST).exists():  # a runner may try again what is done
            return
        # A folder of this attempt alone: a worker given up for dead may still be writing into its own.
        scratch = Path(tempfile.mkdtemp(prefix="compile-", dir=self.plan.work))
        try:
            source = source_of(self.plan)
            settings = self.plan.compile_settings(source.training_samples)
            compile_schedule(source, settings, self.plan.out, scratch, self._progress())
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        yield "compiled"

    def _progress(self) -> Any:
        """What compile_schedule calls with steps done and steps in all; writes them for the command to show, once a second at most."""
        noted = 0.0

        def note(done: int, total: int) -> None:
            nonlocal noted
            if time.monotonic() - noted >= _PROGRESS_SECONDS:
                noted = time.monotonic()
                write_atomically(self.plan.work / PROGRESS, f"{done} {total}".encode())

        return note


def add_schedule(pipeline: beam.Pipeline, plan: Plan, tasks: Sequence[ReadTask], wrap: Wrap = lambda stage: stage) -> None:
    """Add everything to a pipeline, from tasks to a complete schedule in plan.out. wrap: applied to every DoFn (tests disturb them)."""
    orders = add_reading(pipeline, plan, tasks, wrap)
    if plan.spec.order_by is not None:
        buckets = each(orders, CutBuckets(plan), wrap, spread=False)
        orders = grouped(each(buckets, SortBucket(plan), wrap), CollectSorted(plan), wrap)
    ready = each(orders, HoldOut(plan), wrap, spread=False)
    if plan.settings.shuffle_seed is not None:
        parts = grouped(each(ready, SortRuns(plan), wrap), CutShuffle(plan), wrap)
        ready = grouped(each(parts, ShuffleBucket(plan), wrap), CollectShuffled(plan), wrap)
    grouped(ready, Compile(plan), wrap)
