"""Learning rates that follow the step, and dense gradients clipped by their norm: to the bits of the plain trainer, wherever training is cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import reference_config
import reference_data
import reference_rates
import torch
from training import job_in_memory, train

from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.rate_schedules import RateSchedule
from foreload.trainer.compute.rates import clip
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.building import load_model

LANES, BATCH, EPOCHS, SAMPLES = 4, 24, 2, 240
OPTIONS = {"bottom": "8-4", "top": "8-1"}
FEATURES = """
label = "clicked"
[[dense]]
name = "age"
[table.site]
rows = 40
[table.user]
rows = 90
[[feature]]
name = "site"
[[feature]]
name = "user"
"""
pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = [
    *("warmup:7", "warmup:3,linear:15:0.1", "linear:30:0", "cosine:18:0.05", "warmup:4,cosine:11:2"),
    *("step:3:0.5", "warmup:2,step:5:0.9", "4:0.1,9:1,40:0.25"),
]


@dataclass(frozen=True)
class Log:
    """Random clicks and their schedules, by slots."""

    source: Path
    features: Path
    schedules: dict[str, Schedule]

    def config(self, **changed: Any) -> reference_config.Config:
        settings: dict[str, Any] = {
            "log": reference_data.read_features(self.features), "sources": (self.source,), "model": load_model("dlrm"), "dim": 4,
            "batch_size": BATCH, "lanes": LANES, "epochs": EPOCHS, "seed": 2, "model_options": OPTIONS, "row_optimizer": "adagrad", "lr": 0.1,
            "by_table": {"site": ("rowwise_adagrad", 0.03)}, "dense_optimizer": "Adam", "dense_options": {"lr": 0.02},
        }  # fmt: skip
        return reference_config.Config(**settings | changed)

    def job(self, **changed: Any) -> TrainJob:
        settings: dict[str, Any] = {
            "model": "dlrm", "dim": 4, "seed": 2, "model_options": OPTIONS, "row_optimizer": "adagrad", "lr": 0.1, "dense_optimizer": "Adam",
            "tables": {"site": {"row-optimizer": "rowwise_adagrad", "lr": 0.03}}, "dense_lr": 0.02,
        }  # fmt: skip
        return job_in_memory(**settings | changed)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    folder, random = tmp_path_factory.mktemp("log"), np.random.default_rng(4)
    lines = ["clicked,age,site,user"]
    lines += [f"{random.integers(2)},{random.random():.3f},{random.integers(40)},{random.integers(90)}" for _ in range(SAMPLES)]
    source, features, schedules = folder / "clicks.csv", folder / "features.toml", {}
    source.write_text("\n".join(lines) + "\n")
    features.write_text(FEATURES)
    for slots in ("min", "all"):
        given = ["--format=csv", f"--features={features}", f"--batch-size={BATCH}", f"--lanes={LANES}", f"--epochs={EPOCHS}"]
        prepare.run([str(source), *given, f"--slots={slots}", f"--out={folder / slots}"])
        schedules[slots] = Schedule(folder / slots)
    return Log(source, features, schedules)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_factors_are_those_of_the_definition(schedule: str) -> None:
    parsed = RateSchedule.parse("lr-schedule", schedule)
    for step in (*range(60), 10**6, 2**31 - 3):
        assert parsed.factor(step) == reference_rates.rate_factor(schedule, step)
        assert 0 <= parsed.factor(step) < 3


def test_a_cosine_is_one() -> None:
    factor = RateSchedule.parse("lr-schedule", "cosine:1000:0").factor
    assert all(abs(factor(step) - (1 + math.cos(math.pi * step / 1000)) / 2) < 1e-15 for step in range(1001))
    assert (factor(0), factor(1000), factor(5000)) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("warmup", "must be warmup:STEPS"),
        ("warmup:0", "must be warmup:STEPS"),
        ("cosine:10:-1", "must be warmup:STEPS"),
        ("cosine:10", "must be warmup:STEPS"),
        ("cosine:10:nan", "must be warmup:STEPS"),
        ("linear:10:0,cosine:20:0", "must be warmup:STEPS"),
        ("", "must be warmup:STEPS"),
        (7, "must be warmup:STEPS"),
        ("warmup:10,linear:10:0", "linear must end after step 10, where it begins"),
        ("step:0:0.5", "step must have an interval of at least 1 step"),
        ("10:1,10:2", "steps of points must ascend"),
        ("10:1,5:2", "steps of points must ascend"),
    ],
)
def test_what_is_no_schedule_is_refused(given: object, message: str) -> None:
    with pytest.raises(SettingError, match=f"^--lr-schedule: {message}"):
        TrainJob.of({"schedule": "s", "run": "r", "store": "local:1", "lr_schedule": given})


def test_a_clip_of_nothing_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^--dense-clip: must be above 0; got 0"):
        TrainJob.of({"schedule": "s", "run": "r", "store": "local:1", "dense-clip": 0})


def test_a_job_keeps_its_schedules() -> None:
    job = TrainJob.of(
        {"schedule": "s", "run": "r", "store": "local:1", "lr-schedule": "warmup:3, cosine:9:0.5", "dense_clip": "2"}
    )
    assert (str(job.lr_schedule), job.dense_clip, job.dense_lr_schedule) == ("warmup:3,cosine:9:0.5", 2.0, None)
    assert TrainJob.of(job.to_dict()).to_dict() == job.to_dict()


GIVEN: dict[str, dict[str, Any]] = {
    "both": {"lr_schedule": "warmup:4,cosine:17:0.1", "dense_lr_schedule": "0:0.2,6:1,15:0.3"},
    "rows": {"lr_schedule": "step:3:0.5"},
    "adam": {"lr_schedule": "warmup:3", "row_optimizer": "adam", "row_options": {"beta1": 0.8}},
    "dense, clipped": {"dense_lr_schedule": "warmup:2,linear:18:0", "dense_clip": 0.05},
}
GRID = list(itertools.product(GIVEN, (1, 2, 4), (1, 3), ("min", "all")))
ALWAYS = {
    ("both", 2, 3, "min"),
    ("adam", 2, 1, "min"),
    ("rows", 1, 1, "all"),
    ("dense, clipped", 4, 3, "min"),
    ("dense, clipped", 1, 1, "min"),
}


@pytest.mark.parametrize(
    ("name", "trainers", "shards", "slots"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full) for case in GRID],
)
def test_it_trains_to_the_bits_of_the_plain_trainer(
    log: Log, servers: LocalStores, name: str, trainers: int, shards: int, slots: str
) -> None:
    outcome = train(log.job(**GIVEN[name]), log.schedules[slots], servers.urls[:shards], trainers)
    expected = reference.train(log.config(**GIVEN[name]))
    assert outcome.digest == expected.digest
    assert [step.loss for step in outcome.steps] == expected.log_losses
    assert outcome.digest != reference.train(log.config()).digest


def test_a_training_that_stops_and_goes_on_is_at_the_same_rates(log: Log, servers: LocalStores) -> None:
    given = GIVEN["adam"] | GIVEN["both"] | {"dense_clip": 0.1}
    job, schedule = log.job(**given), log.schedules["min"]
    stopped = train(job, schedule, servers.urls[:2], 2, stop_after=lambda step: step == 6)
    outcome = train(job, schedule, servers.urls[:2], 3, resume=stopped)
    assert outcome.digest == reference.train(log.config(**given)).digest


def test_a_training_may_go_on_with_other_rates(log: Log, servers: LocalStores) -> None:
    job, schedule = log.job(), log.schedules["min"]
    stopped = train(job, schedule, servers.urls[:2], 2, stop_after=lambda step: step == 6)
    changed = replace(job, lr=0.01, dense_lr_schedule=RateSchedule.parse("", "step:2:0.5"))
    outcome = train(changed, schedule, servers.urls[:2], 2, resume=stopped)
    later = log.config(lr=0.01, dense_lr_schedule="step:2:0.5")
    assert outcome.digest == reference.train(log.config(later=(7, later))).digest


def test_what_changes_nothing_gives_the_same_bits(log: Log, servers: LocalStores) -> None:
    job = log.job(lr_schedule="0:1", dense_lr_schedule="step:5:1", dense_clip=1e6)
    assert train(job, log.schedules["all"], servers.urls[:1]).digest == reference.train(log.config()).digest


@pytest.mark.parametrize("sizes", [(1,), (8, 3), (17, 0, 250)])
def test_clipped_gradients_have_the_norm_that_is_asked_for(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(size) for size in sizes]
    before, norm = [gradient.clone() for gradient in gradients], torch.cat(gradients).double().norm().item()
    clip(gradients, norm * 1.0001)
    assert all(map(torch.equal, gradients, before))
    clip(gradients, norm / 4)
    assert torch.cat(gradients).double().norm().item() == pytest.approx(norm / 4, rel=1e-6)


def test_gradients_without_a_norm_stay_as_they_are() -> None:
    gradients = [torch.tensor([math.nan, 1.0])]
    clip(gradients, 0.5)
    assert gradients[0][1] == 1.0
