"""A schedule and a job small enough to be trained hundreds of times, for tests of terms: evaluation, many segments, rows that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import reference
import reference_config
import reference_data
import torch
from training import Trained, job_in_memory

from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.building import load_model
from foreload.trainer.step.program import Trainer

FEATURES = """
label = "label"
[table.who]
rows = 400
[table.what]
rows = 60
[[feature]]
name = "who"
[[feature]]
name = "what"
"""
LANES, STEPS = 4, 24
HELD_OUT = 40 / (12 * 32 + 40)


def log_lines(samples: int) -> list[str]:
    """A log without its header."""
    generator = torch.Generator().manual_seed(5)
    lines = []
    for _ in range(samples):
        who, what = (torch.rand(2, generator=generator) ** 2 * torch.tensor([400, 60])).long().tolist()
        lines.append(f"{(who + what) % 2},{who},{what}")
    return lines


def schedule(folder: Path, *further: str) -> Schedule:
    """Two epochs of 12 steps, each with its evaluation, in segments of a few steps, with as few slots as can be. further: options of `prepare`."""
    lines = ["label,who,what", *log_lines(12 * 32 + 40)]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "features.toml").write_text(FEATURES)
    given = [f"{folder}/log.csv", "--format=csv", f"--features={folder}/features.toml", f"--out={folder}/schedule", "--slots=min"]
    given += [
        "--batch-size=32",
        f"--lanes={LANES}",
        "--epochs=2",
        f"--eval-fraction={HELD_OUT}",
        "--segment-bytes=4000",
    ]
    prepare.run([*given, *further])
    prepared = Schedule(folder / "schedule")
    assert prepared.header.end_step == STEPS
    assert len(list(prepared.segments())) > 4
    return prepared


OPTIONS = {"bottom": "8", "top": "8-1"}


def job(**changed: Any) -> TrainJob:
    """A training of its own, in a namespace of its own, with a table under Adam and a moving average of the dense part."""
    given: dict[str, Any] = {
        "model": "dlrm", "dim": 8, "model_options": OPTIONS, "seed": 3, "row_optimizer": "rowwise_adagrad", "lr": 0.05,
        "tables": {"what": {"row-optimizer": "adam", "lr": 0.02}}, "dense_optimizer": "Adam", "dense_lr": 0.01, "dense_ema": 0.9,
    }  # fmt: skip
    return job_in_memory(**given | changed)


def plainly(folder: Path, **changed: Any) -> reference.ReferenceResult:
    """What the plain trainer makes of `schedule` in the same folder and of `job`."""
    config = reference_config.Config(
        log=reference_data.read_features(folder / "features.toml"), sources=(folder / "log.csv",), model=load_model("dlrm"), dim=8, batch_size=32,
        lanes=LANES, epochs=2, seed=3, evaluation_fraction=HELD_OUT, model_options=OPTIONS, row_optimizer="rowwise_adagrad", lr=0.05,
        by_table={"what": ("adam", 0.02)}, dense_optimizer="Adam", dense_options={"lr": 0.01}, dense_ema=0.9,
    )  # fmt: skip
    return reference.train(replace(config, **changed))


def assert_same(outcome: Trained, undisturbed: Trained) -> None:
    """The same model, and the same was told on the way."""
    assert outcome.digest == undisturbed.digest
    assert [(step.step, step.loss) for step in outcome.steps] == [(step.step, step.loss) for step in undisturbed.steps]
    assert [(e.step, e.epoch, e.auc, e.log_loss) for e in outcome.evaluations] == [
        (e.step, e.epoch, e.auc, e.log_loss) for e in undisturbed.evaluations
    ]


def seeding(slots: int) -> Callable[[int, Trainer], None]:
    """Return what has copies that are seeded while training goes on get so many slots after each step, as `break_it` of `train`."""

    def seed_slowly(number: int, trainer: Trainer) -> None:
        if trainer.commits is not None:
            trainer.commits._replication.seeding.stretch = slots

    return seed_slowly
