"""What all stages of the pipeline share: the plan, the work folder, groups, and errors that reach the user as one line.

Only names and counts go through Beam; arrays lie in files on a disk that all workers share, in the folder of this call of the command alone. A stage
names its files and their contents from its input alone and writes them under a temporary name, so that Beam may run any of it twice, at once, or from
the beginning again.
An error of the user's making is noted in a file: a runner that retries would only meet it again. The stages after a group look first
whether any before it has failed.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.typehints import with_output_types

from foreload.base.errors import ForeloadError
from foreload.base.files import write_atomically
from foreload.base.process import keep_freed
from foreload.pipelines.errors import disk_error
from foreload.pipelines.planning.plan import PROGRESS, Plan

_PROGRESS_SECONDS = 1.0
Wrap = Callable[[beam.DoFn], beam.DoFn]
"""Applied to every DoFn of the pipeline: the identity but in tests, which disturb them."""


class Stage(beam.DoFn):
    """A DoFn of the pipeline: `outputs` does the work. Errors of foreload's and of the disk are noted; anything else is raised."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    @property
    def label(self) -> str:
        """How the stage is named in Beam."""
        return type(self).__name__

    def name(self, element: Any) -> str:
        """A file name for the element, unique in the stage."""
        return "all"

    def outputs(self, element: Any) -> Iterator[Any]:
        """Do the stage's work for an element, and give what it puts out for the next stage."""
        raise NotImplementedError

    def setup(self) -> None:
        """Beam's call in each process that is to run the stage."""
        keep_freed()

    def process(self, element: Any) -> Iterator[Any]:
        """Beam's entry: `outputs`, with errors of the user's making and of the disk noted in the work folder.

        Where the command is over, nothing is done, and that is no error, which a runner would only try again: so a job ends on every runner soon
        after its command, also where that cannot cancel it.
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
    """A stage that gets all outputs of the stage before it at once, sorted; it does nothing where any has failed."""

    def outputs(self, element: Any) -> Iterator[Any]:
        _, values = element
        if not self.plan.failed():
            yield from self.together(sorted(values))

    def together(self, values: list[Any]) -> Iterator[Any]:
        """Do the stage's work for all values, and give what it puts out for the next stage."""
        raise NotImplementedError


@contextlib.contextmanager
def attempt(plan: Plan) -> Iterator[Path]:
    """A folder of this attempt alone: a worker given up for dead may still be writing into its own."""
    scratch = Path(tempfile.mkdtemp(prefix="compile-", dir=plan.work))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def progress_of(plan: Plan, name: str) -> Callable[[int, int, int], None]:
    """What is called with the work done, the schedule's steps, and the work in all; writes them for the command to show, once a second at most."""
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
    """All elements as one group, in any order."""

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        return elements | "WithOneKey" >> beam.Map(_with_one_key) | "Group" >> beam.GroupByKey()


def grouped(elements: beam.PCollection, stage: GroupStage, wrap: Wrap) -> beam.PCollection:
    """Run a group stage."""
    return elements | f"Before{stage.label}" >> Together() | stage.label >> beam.ParDo(wrap(stage))


def each(elements: beam.PCollection, stage: Stage, wrap: Wrap, spread: bool = True) -> beam.PCollection:
    """Run a stage on every element; spread: over all workers, which what one group stage put out would not be."""
    if spread:
        elements = elements | f"Spread{stage.label}" >> beam.Reshuffle()
    return elements | stage.label >> beam.ParDo(wrap(stage))
