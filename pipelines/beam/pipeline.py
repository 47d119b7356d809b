"""The Beam pipeline: read -> (count ->) encode -> order -> (shuffle ->) compile; and running it on the runner that the flags name."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from foreload.base.errors import SettingError
from foreload.base.files import read_json, write_json
from foreload.base.interrupts import came_of_interrupt
from foreload.pipelines.beam.local import compiling
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
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.planning.options import beam_flags
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


_LOCAL_RUNNERS = ("", "direct", "directrunner", "fnapirunner")


def check_flags(flags: Sequence[str]) -> None:
    """Refuse what neither this program nor Beam knows, where Beam would drop it without a word. Raises SettingError."""
    if not runs_locally(flags):
        return  # a job service has flags of its own
    known = beam_flags()
    for flag in flags:
        if flag.startswith("-") and flag.partition("=")[0] not in known:
            raise SettingError(f"{flag}: is not an option; see `foreload prepare --help` for those there are")


def runner_name(flags: Sequence[str]) -> str:
    """The runner that the flags name, or ""."""
    return PipelineOptions(list(flags)).view_as(StandardOptions).runner or ""


def runs_locally(flags: Sequence[str]) -> bool:
    """Whether the pipeline runs in this process (or in workers that it starts)."""
    return runner_name(flags).lower().rpartition(".")[2] in _LOCAL_RUNNERS


def run_pipeline(
    plan: Plan, tasks: Sequence[ReadTask], rows: Mapping[str, int], counted: bool, flags: Sequence[str], wrap: Wrap
) -> None:
    """Run to the end. The plan's work folder exists; failures that the user can see to are noted there, others are raised.

    rows: of the sources of each of the plan's sets, about; counted: exactly.
    """
    local = runs_locally(flags)
    here = local or plan.settings.window_accesses is not None  # one process compiles through a window, so it is this one
    # Beam's own default first tries to download another runner, so name the one in this process.
    with _temporary_folders_in(plan.work):
        pipeline = beam.Pipeline(FnApiRunner() if local else None, PipelineOptions(list(flags)))
    ready = add_ordering(pipeline, plan, tasks, wrap)
    if not here:
        add_planning(ready, plan, wrap)
    logging.getLogger("apache_beam.runners.common").addFilter(_tells_more_than_a_stop)
    with compiling(plan, tasks, rows, counted) if here else contextlib.nullcontext():
        _run(pipeline)
        if not plan.failed() and not plan.saved("columns"):
            raise ScheduleError(f"--out {plan.out}: the workers wrote nothing there; it must be on a disk that they share")
    if not here and not plan.failed():
        publish_lanes(plan)


def _run(pipeline: beam.Pipeline) -> None:
    try:
        result = pipeline.run()
        try:
            result.wait_until_finish()
        except KeyboardInterrupt:
            result.cancel()
            raise
    except RuntimeError as error:
        if came_of_interrupt(error):  # Beam wraps what its workers meet, Ctrl-C too
            raise KeyboardInterrupt from error
        raise


@contextlib.contextmanager
def _temporary_folders_in(folder: Path) -> Iterator[None]:
    """A pipeline makes a temporary folder at once, and removes it only if it comes to run: so it gets one that is removed in any case."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _tells_more_than_a_stop(record: logging.LogRecord) -> bool:
    """A filter of log records: False for the stack that Beam logs where Ctrl-C met it, as it does for a failure."""
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)) and not record.getMessage().startswith(
        KeyboardInterrupt.__name__
    )
