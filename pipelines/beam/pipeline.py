"""The pipeline as a whole: read -> (count ->) encode -> order -> (shuffle ->) compile, the last here or in `local`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam

from foreload.base.files import read_json, write_json
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
    attempt,
    each,
    grouped,
    progress_of,
)
from foreload.pipelines.compiler.compile import Compilation, Counted
from foreload.pipelines.compiler.exact import LanePlan, Program
from foreload.pipelines.planning.plan import Plan, ReadTask, piece_name
from foreload.pipelines.planning.work_folder import give_lanes

_PROGRAM = "program.json"


class ReadAll(GroupStage):
    """The final orders -> sample files, row table, and in the folder "lanes" what planning needs; puts out all lanes."""

    def together(self, values: list[Any]) -> Iterator[Any]:
        if not self.plan.lanes.exists():  # a runner may try again what is done
            with attempt(self.plan) as scratch:
                self._read(scratch)
                try:
                    scratch.rename(self.plan.lanes)
                except OSError:
                    if not self.plan.lanes.exists():  # else another attempt was there first, with the same
                        raise
        yield from range(self.plan.settings.lanes)

    def _read(self, folder: Path) -> None:
        source, settings = source_of(self.plan), self.plan.compile_settings()
        counted = Counted.of(settings, source, progress_of(self.plan, self.label))
        program = Compilation(settings, self.plan.written).read(source, folder, counted.read)
        write_json(folder / _PROGRAM, program)


class PlanLanes(Stage):
    """A lane -> its moves, and in the folder "lanes" what the manifests say of it; puts it out."""

    def name(self, element: Any) -> str:
        return piece_name(element)

    def outputs(self, element: int) -> Iterator[Any]:
        program = _program(self.plan)
        header = program.header
        name = f"{self.label}-{self.name(element)}"
        counted = Counted(header.steps_per_epoch, header.epochs, header.lanes, program.shuffled, progress_of(self.plan, name))
        compilation = Compilation(self.plan.settings, self.plan.written)
        with attempt(self.plan) as scratch:
            (planned,) = compilation.plan_all(program, [element], self.plan.lanes, scratch, 1, counted.planned)
        write_json(self.plan.lanes / _lane_name(element), planned)
        yield element


def publish_lanes(plan: Plan) -> None:
    """Make the schedule of what `add_planning` has left, in the command's own process."""
    plans = [read_json(plan.lanes / _lane_name(lane), LanePlan) for lane in range(plan.settings.lanes)]
    program = _program(plan)
    give_lanes(plan)
    Compilation(plan.settings, plan.out).publish(program, plans)


def _lane_name(lane: int) -> str:
    return f"plan-{lane:02d}.json"


def _program(plan: Plan) -> Program:
    return read_json(plan.lanes / _PROGRAM, Program)


def add_ordering(pipeline: beam.Pipeline, plan: Plan, tasks: Sequence[ReadTask], wrap: Wrap) -> beam.PCollection:
    """Add everything from tasks to samples in their final order (`order.source_of`). wrap: applied to every DoFn (tests disturb them)."""
    orders = add_reading(pipeline, plan, tasks, wrap)
    if plan.spec.order_by is not None:
        buckets = each(orders, CutBuckets(plan), wrap, spread=False)
        orders = grouped(each(buckets, SortBucket(plan), wrap), CollectSorted(plan), wrap)
    ready = each(orders, HoldOut(plan), wrap, spread=False)
    if plan.settings.shuffle_seed is None:
        return ready
    parts = grouped(each(ready, SortRuns(plan), wrap), CutShuffle(plan), wrap)
    return grouped(each(parts, ShuffleBucket(plan), wrap), CollectShuffled(plan), wrap)


def add_planning(ready: beam.PCollection, plan: Plan, wrap: Wrap) -> None:
    """Add what follows, to all that the command needs to publish the schedule (`publish_lanes`): for workers that are not this machine's."""
    each(grouped(ready, ReadAll(plan), wrap), PlanLanes(plan), wrap)
