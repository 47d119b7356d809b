"""Trainings that last long enough for checkpoints to be saved meanwhile, with faults, and what they must leave."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import Command
from injection import AnyFault
from small_job import summary, synthetic_schedule

from foreload.trainer.checkpoints.best import BEST
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.checkpoints.draft import LOCK

EVERY, EPOCH = 10, 41  # steps between checkpoints, and of an epoch
MODEL = ("--dim", "4", "--lr", "0.05", "--model-options", "bottom=512-512-4", "top=512-512-1")
"""Its dense part is large, so that steps take a while, and several checkpoints are saved in a run."""


def arguments(schedule: Path, run: Path, *further: str) -> list[str]:
    """The command line, without the program's name, that trains the model."""
    return ["train", str(schedule), "--run", str(run), *MODEL, *further]


@dataclass(frozen=True)
class Case:
    """A schedule of two epochs in four lanes, with evaluation after each, and few slots; and what a run left that nothing happened to: its digest,
    and its checkpoint after the first epoch, of all rows.
    """

    schedule: Path
    digest: str
    checkpoint: Path

    def begin(self, run: Path, *further: object, faults: Sequence[AnyFault] = ()) -> Command:
        """Start training in other processes."""
        return Command(*arguments(self.schedule, run, *map(str, further), "--digest"), faults=faults)

    def train(self, run: Path, *further: object, faults: Sequence[AnyFault] = (), status: int = 0) -> str:
        """Train; returns what was told on stderr."""
        ended, _, err = self.begin(run, *further, faults=faults).end()
        assert ended == status, err
        assert "Traceback" not in err
        return err

    def check_goes_on(self, checkpoint: Path, run: Path, *further: object) -> None:
        """Assert that a run made of a checkpoint ends with the bits of the undisturbed one."""
        train = ["train", str(self.schedule), "--from", str(checkpoint), "--run", str(run), "--digest", *map(str, further)]
        ended, _, err = Command(*train).end()
        assert ended == 0, err
        assert summary(run)["digest"] == self.digest


def saved(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, by step; asserts that nothing else is there, and that each is as it was saved."""
    names = {path.name for path in folder.iterdir()} - {LOCK, BEST}
    assert all(re.fullmatch(r"step-\d+", name) for name in names), names
    there = sorted((Checkpoint.open(path) for path in folder.glob("step-*")), key=lambda one: one.contents.step)
    for one in there:
        one.verify()
    return there


def live_case(folder: Path) -> Case:
    """The schedule, and the digest of a run, made in a folder."""
    schedule = synthetic_schedule(folder, 5700, lanes=4, slots=500, further="--eval-fraction 0.1 --epochs 2")
    undisturbed = Case(schedule, "", folder)
    save = ("--checkpoint-every", EPOCH, "--checkpoint", folder, "--checkpoint-policy", "full")
    undisturbed.train(folder / "run", "--store", "local:1", "--trainers", 1, *save)
    return Case(schedule, str(summary(folder / "run")["digest"]), folder / f"step-{EPOCH - 1}")
