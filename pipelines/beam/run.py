"""Run the pipeline on whichever runner the flags name."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from foreload.base.errors import SettingError
from foreload.base.interrupts import came_of_interrupt
from foreload.pipelines.beam.local import compiling
from foreload.pipelines.beam.pipeline import add_ordering, add_planning, publish_lanes
from foreload.pipelines.beam.stages import Wrap
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.planning.command_line import beam_flags
from foreload.pipelines.planning.plan import Plan, ReadTask

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
