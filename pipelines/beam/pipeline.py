"""The pipeline as a whole: read -> (count ->) encode -> order -> (shuffle ->) compile."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam

from foreload.pipelines.base.files import write_atomically, write_json
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
    Stage,
    Wrap,
    each,
    grouped,
)
from foreload.pipelines.compiler.compile import Compilation, Counted
from foreload.pipelines.compiler.exact import LanePlan, Program
from foreload.pipelines.planning.plan import PROGRESS, Plan, ReadTask, piece_name
from foreload.pipelines.schedule.format import MANIFEST

_PROGRESS_SECONDS = 1.0
_PROGRAM = "program.json"


class Compile(GroupStage):
    """The final orders -> the schedule, through a window. One worker does it; lanes are planned in threads."""

    def together(self, values: list[Any]) -> Iterator[Any]:
        if (self.plan.out / MANIFEST).exists():  # a runner may try again what is done
            return
        source, note = source_of(self.plan), _note(self.plan, self.label)
        with _attempt(self.plan) as scratch:
            compilation = Compilation(self.plan.compile_settings(source.training_samples), self.plan.out)
            compilation.compile(source, scratch, lambda done, total: note(done, total, total))
        yield "compiled"


class ReadAll(GroupStage):
    """The final orders -> sample files, row table, and in the folder "lanes" what planning needs; puts out the lanes that one worker is to plan.

    alone: one worker does all of it, lanes in threads.
    """

    def __init__(self, plan: Plan, alone: bool) -> None:
        super().__init__(plan)
        self._alone = alone

    def together(self, values: list[Any]) -> Iterator[Any]:
        if not self.plan.lanes.exists():  # a runner may try again what is done
            with _attempt(self.plan) as scratch:
                self._read(scratch)
                try:
                    scratch.rename(self.plan.lanes)
                except OSError:
                    if not self.plan.lanes.exists():  # else another attempt was there first, with the same
                        raise
        lanes = range(self.plan.settings.lanes)
        yield from [tuple(lanes)] if self._alone else ((lane,) for lane in lanes)

    def _read(self, folder: Path) -> None:
        source = source_of(self.plan)
        settings = self.plan.compile_settings(source.training_samples)
        counted = Counted.of(settings, source, _note(self.plan, self.label))
        program = Compilation(settings, self.plan.out).read(source, folder, counted.read)
        write_json(folder / _PROGRAM, program.to_dict())


class PlanLanes(Stage):
    """Lanes -> their moves, and in the folder "lanes" what the manifests tell of them; puts out each."""

    def name(self, element: Any) -> str:
        return piece_name(*element)

    def outputs(self, element: tuple[int, ...]) -> Iterator[Any]:
        program = _program(self.plan)
        header = program.header
        name = f"{self.label}-{self.name(element)}"
        counted = Counted(header.steps_per_epoch, header.epochs, header.lanes, program.shuffled, _note(self.plan, name))
        compilation = Compilation(self.plan.settings, self.plan.out)
        threads = min(len(element), os.cpu_count() or 1)
        with _attempt(self.plan) as scratch:
            plans = compilation.plan_all(program, element, self.plan.lanes, scratch, threads, counted.planned)
        for lane, planned in zip(element, plans, strict=True):
            write_json(self.plan.lanes / _lane_name(lane), planned.to_dict())
        yield from element


class Publish(GroupStage):
    """All lanes -> the schedule."""

    def together(self, values: list[Any]) -> Iterator[Any]:
        if (self.plan.out / MANIFEST).exists():  # a runner may try again what is done
            return
        plans = [LanePlan.from_dict(json.loads((self.plan.lanes / _lane_name(lane)).read_bytes())) for lane in values]
        Compilation(self.plan.settings, self.plan.out).publish(_program(self.plan), plans)
        yield "published"


def _lane_name(lane: int) -> str:
    return f"plan-{lane:02d}.json"


def _program(plan: Plan) -> Program:
    return Program.from_dict(json.loads((plan.lanes / _PROGRAM).read_bytes()))


@contextlib.contextmanager
def _attempt(plan: Plan) -> Iterator[Path]:
    """A folder of this attempt alone: a worker given up for dead may still be writing into its own."""
    scratch = Path(tempfile.mkdtemp(prefix="compile-", dir=plan.work))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _note(plan: Plan, name: str) -> Callable[[int, int, int], None]:
    """What is called with the work done, the schedule's steps, and the work in all; writes them for the command to show, once a second at most."""
    noted = 0.0

    def note(done: int, steps: int, work: int) -> None:
        nonlocal noted
        if time.monotonic() - noted >= _PROGRESS_SECONDS:
            noted = time.monotonic()
            write_atomically(plan.work / PROGRESS / name, f"{done} {steps} {work}".encode())

    return note


def add_schedule(
    pipeline: beam.Pipeline, plan: Plan, tasks: Sequence[ReadTask], wrap: Wrap = lambda stage: stage, alone: bool = False
) -> None:
    """Add everything to a pipeline, from tasks to a complete schedule in plan.out.

    wrap: applied to every DoFn (tests disturb them); alone: there is one worker.
    """
    orders = add_reading(pipeline, plan, tasks, wrap)
    if plan.spec.order_by is not None:
        buckets = each(orders, CutBuckets(plan), wrap, spread=False)
        orders = grouped(each(buckets, SortBucket(plan), wrap), CollectSorted(plan), wrap)
    ready = each(orders, HoldOut(plan), wrap, spread=False)
    if plan.settings.shuffle_seed is not None:
        parts = grouped(each(ready, SortRuns(plan), wrap), CutShuffle(plan), wrap)
        ready = grouped(each(parts, ShuffleBucket(plan), wrap), CollectShuffled(plan), wrap)
    if plan.settings.window_accesses is not None:
        grouped(ready, Compile(plan), wrap)
        return
    grouped(each(grouped(ready, ReadAll(plan, alone), wrap), PlanLanes(plan), wrap), Publish(plan), wrap)
