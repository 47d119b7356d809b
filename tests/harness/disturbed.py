"""DoFns under conditions that a local runner never makes: groups in any order, work done twice. Importable by workers."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import apache_beam as beam
import pytest

from foreload.pipelines import prepare
from foreload.pipelines.beam.stages import GroupStage, Stage
from foreload.pipelines.compiler.compile import Counted


class Disturbed(beam.DoFn):
    """Shuffles every group that the stage is given, and runs the stage again over what it has written."""

    def __init__(self, stage: Stage, seed: int) -> None:
        super().__init__()
        self.stage, self.seed = stage, seed

    def process(self, element: Any) -> Iterator[Any]:
        generator = random.Random(self.seed)
        outputs = []
        for _ in range(2):
            if isinstance(self.stage, GroupStage):
                values = list(element[1])
                generator.shuffle(values)
                element = element[0], values
            outputs.append(list(self.stage.process(element)))
        assert outputs[0] == outputs[1]
        yield from generator.sample(outputs[0], len(outputs[0]))


def disturb(seed: int) -> Callable[[beam.DoFn], beam.DoFn]:
    """For prepare.run's `wrap`."""
    return partial(_disturbed, seed)


def _disturbed(seed: int, stage: Stage) -> beam.DoFn:
    return Disturbed(stage, seed)


class Killed(beam.DoFn):
    """Ends the process with SIGKILL once the stage has written its n-th element."""

    def __init__(self, stage: Stage, elements: int) -> None:
        super().__init__()
        self.stage, self.left = stage, elements

    def process(self, element: Any) -> Iterator[Any]:
        yield from self.stage.process(element)
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def prepare_and_die(arguments: list[str], where: str, elements: int, piece_rows: int) -> None:
    """Run prepare until it is killed: after a stage's n-th element, or when reading or planning has told of its progress so many times."""
    method = {"reading": "read", "planning": "planned"}.get(where)
    times = 0

    def until_killed(counted: Counted, *steps: int) -> None:
        nonlocal times
        times += 1
        if times == elements:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreload.pipelines.planning.plan.PIECE_ROWS", piece_rows)
        if method is not None:
            patch.setattr(Counted, method, until_killed)
        prepare.run(
            arguments, wrap=lambda stage: Killed(stage, elements) if type(stage).__name__ == where and method is None else stage
        )
