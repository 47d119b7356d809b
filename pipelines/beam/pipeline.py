"""The Beam pipeline, and running it on the runner that the flags name.

The stages are read -> (count ->) encode -> order -> (shuffle ->) compile.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
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
    DASK_RUNNER,
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
    """The final orders -> sample files and row table. Outputs all lanes.

    The stage leaves what the planning of lanes needs in the folder "lanes".
    """

    def together(self, values: list[Any]) -> Iterator[Any]:
        # A runner may retry a stage that has already succeeded.
        if not self.plan.lanes.exists():
            with attempt(self.plan) as scratch:
                self._read(scratch)
                try:
                    scratch.rename(self.plan.lanes)
                except OSError:
                    # If the folder exists, another attempt was first, and its result is the same.
                    if not self.plan.lanes.exists():
                        raise
        yield from range(self.plan.settings.lanes)

    def _read(self, folder: Path) -> None:
        source, settings = source_of(self.plan), self.plan.compile_settings()
        counted = Counted.of(settings, source, progress_of(self.plan, self.label))
        program = Compilation(settings, self.plan.written).read(source, folder, counted.read)
        write_json(folder / _PROGRAM, program)


class PlanLanes(Stage):
    """A lane -> its moves. Outputs the lane.

    The stage leaves what the manifests need about the lane in the folder "lanes".
    """

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
    """Complete the schedule from the results of `add_planning`, in the command's own process."""
    plans = [read_json(plan.lanes / _lane_name(lane), LanePlan) for lane in range(plan.settings.lanes)]
    program = _program(plan)
    give_lanes(plan)
    Compilation(plan.settings, plan.out).publish(program, plans)


def _lane_name(lane: int) -> str:
    return f"plan-{lane:02d}.json"


def _program(plan: Plan) -> Program:
    return read_json(plan.lanes / _PROGRAM, Program)


def add_ordering(pipeline: beam.Pipeline, plan: Plan, tasks: Sequence[ReadTask], wrap: Wrap) -> beam.PCollection:
    """Add all stages from the tasks to samples in their final order (`order.source_of`).

    Args:
        wrap: See `stages.Wrap`.
    """
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
    """Add the stages that compile on the workers of a cluster.

    Their results are all that the command needs to publish the schedule (`publish_lanes`).
    """
    each(grouped(ready, ReadAll(plan), wrap), PlanLanes(plan), wrap)


_DASK_PATH, _DASK_PARTITIONS = f"apache_beam.runners.dask.dask_runner.{DASK_RUNNER}", 64
_LOCAL_RUNNERS = ("", "direct", "directrunner", "fnapirunner")


def check_flags(flags: Sequence[str]) -> None:
    """Raise SettingError for a flag that neither this program nor Beam knows.

    Beam itself would ignore such a flag silently.
    """
    # A job service has flags of its own.
    if not runs_locally(flags):
        return
    known = beam_flags()
    for flag in flags:
        if flag.startswith("-") and flag.partition("=")[0] not in known:
            raise SettingError(f"{flag}: is not an option; see `foreload prepare --help` for the options")


def runner_name(flags: Sequence[str]) -> str:
    """Return the runner that the flags name, or ""."""
    return PipelineOptions(list(flags)).view_as(StandardOptions).runner or ""


DASK_NAMES = (DASK_RUNNER, _DASK_PATH)
"""The names of Beam's runner for Dask. Beam itself knows only the longer one."""


def with_dask(flags: Sequence[str]) -> list[str]:
    """Return the flags for Beam's runner for Dask, with what it needs to use all workers.

    Raises:
        SettingError: Dask is not installed.
    """
    try:
        import distributed  # noqa: F401 - it sets levels of its own for its messages
    except ImportError as error:
        raise SettingError("--runner: Dask is not installed; install it with pip install 'foreload[dask]'") from error
    # A cluster that Dask starts in this process would log every connection.
    logging.getLogger("distributed").setLevel(logging.WARNING)
    given = [*flags, f"--runner={_DASK_PATH}"]
    # By default Beam puts up to 128 elements of a stage into one task, one after the other.
    own = ("--dask_npartitions", "--dask_partition_size")
    return given if any(flag.startswith(own) for flag in flags) else [*given, f"--dask_npartitions={_DASK_PARTITIONS}"]


def runs_locally(flags: Sequence[str]) -> bool:
    """Return whether the pipeline runs in this process, or in workers that this process starts."""
    return runner_name(flags).lower().rpartition(".")[2] in _LOCAL_RUNNERS


def run_pipeline(
    plan: Plan, tasks: Sequence[ReadTask], rows: Mapping[str, int], counted: bool, flags: Sequence[str], wrap: Wrap
) -> None:
    """Run the pipeline to its end.

    The plan's work folder exists. Failures that the user can fix are recorded there; others are
    raised.

    Args:
        rows: The number of rows of each of the plan's sets, about.
        counted: Whether `rows` is exact.
        flags: Beam's flags.
        wrap: See `stages.Wrap`.
    """
    local = runs_locally(flags)
    # Only a single process can compile through a window, so this one does.
    here = local or plan.settings.window_accesses is not None
    # Beam's default runner first tries to download another one, so name the runner that works in
    # this process.
    with _temporary_folders_in(plan.work):
        options = PipelineOptions(with_dask(flags) if runner_name(flags) in DASK_NAMES else list(flags))
        pipeline = beam.Pipeline(FnApiRunner() if local else None, options)
    ready = add_ordering(pipeline, plan, tasks, wrap)
    if not here:
        add_planning(ready, plan, wrap)
    logging.getLogger("apache_beam.runners.common").addFilter(_is_more_than_a_stop)
    if not local:
        pass_over_closed_channels()
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
        finally:
            # Beam's runner for Dask leaves its connection open, and the workers that it may have started.
            if (client := getattr(result, "client", None)) is not None:
                client.close()
    except RuntimeError as error:
        # Beam wraps the errors of its workers, including Ctrl-C.
        if came_of_interrupt(error):
            raise KeyboardInterrupt from error
        raise


@contextlib.contextmanager
def _temporary_folders_in(folder: Path) -> Iterator[None]:
    """Let Beam create its temporary folders in a folder that is removed in any case.

    A pipeline creates a temporary folder as soon as it is constructed, but removes it only if it
    runs.
    """
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def pass_over_closed_channels() -> None:
    """Have this process, from now on, say nothing of connections that a runner closes.

    With --environment_type=LOOPBACK this process has the workers. At the end of a job the runner may
    close their connections before they do. Whether the job succeeded, the runner itself says.
    """
    logging.getLogger("apache_beam.runners.worker.data_plane").addFilter(_is_not_of_a_channel)
    before = threading.excepthook

    def report(ended: threading.ExceptHookArgs) -> None:
        if not isinstance(ended.exc_value, grpc.RpcError):
            before(ended)

    threading.excepthook = report


def _is_not_of_a_channel(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.RpcError))


def _is_more_than_a_stop(record: logging.LogRecord) -> bool:
    """Filter log records: return False for the stack trace that Beam logs after Ctrl-C.

    Beam logs that like the stack trace of a failure.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)) and not record.getMessage().startswith(
        KeyboardInterrupt.__name__
    )
