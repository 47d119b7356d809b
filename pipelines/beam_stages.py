"""What all stages of the pipeline share: the plan, the work folder, groups, and errors that reach the user as one line.

Only names and counts go through Beam; arrays lie in files on a disk that all workers share. A stage names its files and their contents
from its input alone and writes them under a temporary name, so that Beam may run any of it twice, at once, or from the beginning again.
An error of the user's making is noted in a file: a runner that retries would only meet it again. The stages after a group look first
whether any before it has failed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.typehints import with_output_types

from pipelines import encoding_state, errors
from pipelines.compile import CompileSettings
from pipelines.features import FeatureSpec
from pipelines.schedule import write_json

WORK = ".work"
FAILURES, ORDERS, PIECES, REJECTS = "failures", "orders", "pieces", "rejects"
FOLDERS = (FAILURES, ORDERS, PIECES, REJECTS)

Wrap = Callable[[beam.DoFn], beam.DoFn]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every worker knows.

    spec: the features as the sources are read, without the vocabularies' sizes unless a parent schedule gave them. settings: their
    features stand only where there is a parent. evaluation_fraction: of the training sources, held out. piece_rows: samples in a
    piece that a sort writes, about. counted: vocabularies or scales are to be taken from the data. first_number: that of the first
    training sample.
    """

    out: Path
    spec: FeatureSpec
    settings: CompileSettings
    evaluation_fraction: float
    max_rejects: int
    piece_rows: int
    counted: bool
    first_number: int

    @property
    def work(self) -> Path:
        """The folder of everything that is removed at the end."""
        return self.out / WORK

    @property
    def pieces(self) -> Path:
        """The folder of pieces."""
        return self.work / PIECES

    @property
    def encoding(self) -> Path:
        """The folder of vocabularies and scales."""
        return self.out / encoding_state.FOLDER

    def compile_settings(self) -> CompileSettings:
        """The settings, with what is known only once the data has been read."""
        features = self.settings.features
        if self.settings.parent is None:
            features = encoding_state.load(self.encoding, self.spec)[0]
        settings = {**self.settings.settings, "encoding": encoding_state.identity(self.encoding)}
        return replace(self.settings, features=features, settings=settings, threads=min(self.settings.lanes, os.cpu_count() or 1))

    def order_path(self, name: str) -> Path:
        """The file of an order or another result of a group."""
        return self.work / ORDERS / f"{name}.json"

    def save(self, name: str, value: Any) -> None:
        """Write the result of a group."""
        write_json(self.order_path(name), value)

    def load(self, name: str) -> Any:
        """Read the result of a group."""
        return json.loads(self.order_path(name).read_bytes())

    def failed(self) -> list[Path]:
        """The failures noted, in an order that does not depend on time."""
        return sorted((self.work / FAILURES).iterdir())

    def raise_failure(self) -> None:
        """Raise the first failure noted as the error that it was."""
        for path in self.failed():
            failure = json.loads(path.read_bytes())
            raise getattr(errors, failure["type"])(failure["message"])


class Stage(beam.DoFn):
    """A DoFn of the pipeline: `outputs` does the work. PipelineErrors and a full disk are noted; anything else is raised."""

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
        """What follows from an element."""
        raise NotImplementedError

    def process(self, element: Any) -> Iterator[Any]:
        """Beam's entry."""
        try:
            yield from self.outputs(element)
        except errors.PipelineError as error:
            self._note(element, error)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._note(element, errors.DiskError(f"--out {self.plan.out}: the disk is full; free space or choose another folder"))

    def _note(self, element: Any, error: errors.PipelineError) -> None:
        path = self.plan.work / FAILURES / f"{self.label}-{self.name(element)}.json"
        write_json(path, {"type": type(error).__name__, "message": str(error)})


class GroupStage(Stage):
    """A stage that gets all outputs of the stage before it at once, sorted; it does nothing where any has failed."""

    def outputs(self, element: Any) -> Iterator[Any]:
        _, values = element
        if not self.plan.failed():
            yield from self.together(sorted(values))

    def together(self, values: list[Any]) -> Iterator[Any]:
        """What follows from all values."""
        raise NotImplementedError


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


def piece_name(*parts: int | str) -> str:
    """A piece's file name; names sort as their parts do."""
    return "-".join(part if isinstance(part, str) else f"{part:08d}" for part in parts)
