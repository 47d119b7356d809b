"""DoFns under conditions that a local runner never makes: groups in any order, work done twice. Importable by workers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import pytest

from foreload.base.files import write_atomically
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


class Doubled(Stage):
    """A number -> twice that."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(work=Path("nowhere"), over=False))  # type: ignore[arg-type]

    def name(self, element: int) -> str:
        return str(element)

    def outputs(self, element: int) -> Iterator[int]:
        yield 2 * element


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


class Held(beam.DoFn):
    """Holds the first worker that comes to the end of an element in its stage, until the file "release" is in a folder, or the command is over, as
    any stage then ends.

    The element's work is done then, and the runner does not know of it. The file "held" has the worker's process id, and "went on" is there later.
    """

    def __init__(self, stage: Stage, folder: Path) -> None:
        super().__init__()
        self.stage, self.folder = stage, folder

    def process(self, element: Any) -> Iterator[Any]:
        outputs = list(self.stage.process(element))
        # Only one worker can make the folder, whichever machine it is on.
        with contextlib.suppress(FileExistsError):
            (self.folder / "taken").mkdir()
            write_atomically(self.folder / "held", str(os.getpid()).encode())
            while not (self.folder / "release").exists() and not self.stage.plan.over:
                time.sleep(0.01)
            (self.folder / "went on").touch()
        yield from outputs


def prepare_held(arguments: list[str], where: str, folder: str, piece_rows: int) -> int:
    """Run `foreload prepare` with a stage that is held; returns its exit status."""
    from foreload.trainer import cli  # workers, which import this module, need none of it

    sys.argv = ["foreload", "prepare", *arguments]
    held = Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreload.pipelines.planning.plan.PIECE_ROWS", piece_rows)
        patch.setattr("foreload.pipelines.prepare.run", partial(prepare.run, wrap=partial(_held, where, held)))
        return cli.main()


def _held(where: str, folder: Path, stage: Stage) -> beam.DoFn:
    return Held(stage, folder) if type(stage).__name__ == where else stage
