"""What all stages of the pipeline share: the plan, the work folder, groups, and error handling.

Only names and counts go through Beam. Arrays lie in files on a disk that all workers share, in the
work folder of this call of the command. A stage derives the names and contents of its files from
its input alone, and writes them under temporary names first. So Beam may run any stage twice, at
the same time, or again from the beginning.

If the user or the disk caused an error, the stage records it in a file, because a runner that
retries would only meet it again. Group stages check first whether an earlier stage has failed. The
command reports the error to the user in one line.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.typehints import with_output_types

from foreload.base.errors import ForeloadError
from foreload.base.files import write_atomically
from foreload.base.process import keep_freed
from foreload.pipelines.errors import disk_error
from foreload.pipelines.planning.plan import BEGUN, PROGRESS, Plan

_PROGRESS_SECONDS = 1.0
DASK_RUNNER = "DaskRunner"
Wrap = Callable[[beam.DoFn], beam.DoFn]
"""Applied to each DoFn of the pipeline. It is the identity except in tests, which disturb them."""


class Stage(beam.DoFn):
    """A DoFn of the pipeline; `outputs` does its work.

    Foreload's own errors and errors of the disk are recorded in the work folder. Any other error is
    raised.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    @property
    def label(self) -> str:
        """The name of the stage in Beam."""
        return type(self).__name__

    def name(self, element: Any) -> str:
        """Return a file name for the element that is unique within the stage."""
        return "all"

    def outputs(self, element: Any) -> Iterator[Any]:
        """Do the stage's work for an element, and yield its outputs for the next stage."""
        raise NotImplementedError

    def setup(self) -> None:
        """Prepare a process to run the stage, and note that a worker is there. Beam calls this."""
        keep_freed()
        # The folder is gone once the command is over.
        with contextlib.suppress(OSError):
            (self.plan.work / BEGUN).touch()

    def process(self, element: Any) -> Iterator[Any]:
        """Run `outputs`, and record errors that the user or the disk caused. Beam calls this.

        Once the command is over, this does nothing and raises no error, because a runner would
        retry after one. So a job ends soon after its command on every runner, even on one that
        cannot cancel it.
        """
        try:
            if not self.plan.over:
                yield from self.outputs(element)
        except Exception as error:
            if self.plan.over:
                return
            failure = error if isinstance(error, ForeloadError) else disk_error(error, self.plan.out)
            if failure is None:
                raise
            self.plan.note_failure(f"{self.label}-{self.name(element)}", failure)


class GroupStage(Stage):
    """A stage that gets all outputs of the stage before it at once, sorted.

    It does nothing if any stage has failed.
    """

    def outputs(self, element: Any) -> Iterator[Any]:
        _, values = element
        if not self.plan.failed():
            yield from self.together(sorted(values))

    def together(self, values: list[Any]) -> Iterator[Any]:
        """Do the stage's work for all values, and yield its outputs for the next stage."""
        raise NotImplementedError


@contextlib.contextmanager
def attempt(plan: Plan) -> Iterator[Path]:
    """Create a folder for this attempt alone, and remove it afterwards.

    Another worker that was given up may still be writing to a folder of its own.
    """
    scratch = Path(tempfile.mkdtemp(prefix="compile-", dir=plan.work))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def progress_of(plan: Plan, name: str) -> Callable[[int, int, int], None]:
    """Return a function that writes progress to a file, which the command displays.

    The function takes the work done, the schedule's steps, and the total work. It writes at most
    once a second.

    Args:
        name: The name of the file, unique to the caller.
    """
    noted = 0.0

    def note(done: int, steps: int, work: int) -> None:
        nonlocal noted
        if time.monotonic() - noted >= _PROGRESS_SECONDS:
            noted = time.monotonic()
            write_atomically(plan.work / PROGRESS / name, f"{done} {steps} {work}".encode())

    return note


@with_output_types(tuple[str, Any])
def _with_one_key(value: Any) -> tuple[str, Any]:
    return "", value


class Together(beam.PTransform):
    """Collects all elements into one group, in any order."""

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        return elements | "WithOneKey" >> beam.Map(_with_one_key) | "Group" >> beam.GroupByKey()


def grouped(elements: beam.PCollection, stage: GroupStage, wrap: Wrap) -> beam.PCollection:
    """Run a group stage."""
    return elements | f"Before{stage.label}" >> Together() | stage.label >> beam.ParDo(wrap(stage))


class _KeyedByName(beam.DoFn):
    """An element of a stage -> the element, with a number that follows from its name."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def process(self, element: Any) -> Iterator[tuple[int, Any]]:
        yield zlib.crc32(self.stage.name(element).encode()), element


def _values(group: tuple[int, Iterable[Any]]) -> Iterable[Any]:
    return group[1]


class Spread(beam.PTransform):
    """Spreads the elements of a stage over all workers."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        # Beam's runner for Dask leaves elements where they are when they are to be reshuffled.
        if type(elements.pipeline.runner).__name__ != DASK_RUNNER:
            return elements | beam.Reshuffle()
        keyed = elements | "Name" >> beam.ParDo(_KeyedByName(self.stage)).with_output_types(tuple[int, Any])
        return keyed | "Group" >> beam.GroupByKey() | "Values" >> beam.FlatMap(_values)


def each(elements: beam.PCollection, stage: Stage, wrap: Wrap, spread: bool = True) -> beam.PCollection:
    """Run a stage on every element.

    Args:
        wrap: See `Wrap`.
        spread: Whether to spread the elements over all workers. Without that, one worker would
            process all outputs of a group stage.
    """
    if spread:
        elements = elements | f"Spread{stage.label}" >> Spread(stage)
    return elements | stage.label >> beam.ParDo(wrap(stage))
