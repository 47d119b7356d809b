"""One digest, and one set of metrics, also with several labels, numbers, weights of samples, groups, and a loss of a user's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import reference_config
import reference_data
from training import job_in_memory, train

from foreload.base.codec import to_stored
from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.own_loss import load_loss
from foreload.trainer.models.building import load_model

FEATURES = """
[[feature]]
name = "site"
rows = 25
[[feature]]
name = "tags"
rows = 12
pooling = "mean"
[[dense]]
name = "x"
"""
CLICK = '[[label]]\nname = "clicked"\ncolumn = "click"\n'
SECONDS = '[[label]]\nname = "seconds"\nkind = "number"\n'
LONG = '[[label]]\nname = "long"\ncolumn = "seconds"\nat_least = 2.5\n'
LANES, BATCH, EPOCHS, DIM = 5, 13, 2, 4

pytestmark = pytest.mark.usefixtures("one_thread", "cases_on_path")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 random samples: 90 to train on, the last step of an epoch short; 30 held out, of 4 users, of which one never clicks."""
    random = np.random.default_rng(8)
    lines = ["click,seconds,worth,user,site,tags,x"]
    for _ in range(120):
        tags, user = "|".join(random.choice(list("abcdefgh"), random.integers(1, 4))), random.integers(4)
        clicked = int(user > 0 and random.random() < 0.4)
        numbers = f"{clicked},{random.exponential(2) + 2 * clicked:.3f},{random.integers(1, 9) / 4}"
        lines.append(f"{numbers},{user},site {random.integers(20)},{tags},{random.normal():.4f}")
    path = tmp_path_factory.mktemp("clicks") / "clicks.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Case:
    """A training. labels: of the feature file, with what it says of weight and group; job: what the job has of its own; slots: of each training."""

    labels: str
    model: str
    job: dict[str, Any] = field(default_factory=dict)
    slots: tuple[str, ...] = ("min", "min")


CASES = {
    "clicks, weighed, of groups": Case('label = "click"\nweight = "worth"\ngroup = "user"\n', "wide_deep"),
    "a number": Case('label = "seconds"\nlabel_kind = "number"\n', "deepfm"),
    "three labels": Case(
        CLICK + SECONDS + LONG, "model_cases:Heads", {"label_weights": {"seconds": 0.1, "long": 3}}, ("min", "all", "min")
    ),
    "a number first, weighed, of groups": Case('weight = "worth"\ngroup = "user"\n' + SECONDS + CLICK, "model_cases:Heads"),
    "three labels on a shared bottom": Case(
        CLICK + SECONDS + LONG, "shared_bottom", {"model_options": {"bottom": "12", "tower": "6"}}
    ),
    "experts of two labels, weighed, of groups": Case(
        'weight = "worth"\ngroup = "user"\n' + LONG + SECONDS,
        "mmoe",
        {"model_options": {"experts": 3, "expert": "10-6", "tower": ""}, "label_weights": {"long": 0.5}},
        ("min", "all", "min"),
    ),
    "a loss of two labels": Case(CLICK + SECONDS, "model_cases:Heads", {"loss": "loss_cases:clicks_and_huber"}),
    "a loss of clicks, weighed": Case('label = "click"\nweight = "worth"\n', "dcn", {"loss": "loss_cases:focal"}),
}


def _schedule(case: Case, clicks: Path, folder: Path, slots: str) -> Schedule:
    features, out = folder / "features.toml", folder / slots
    features.write_text(case.labels + FEATURES)
    options = f"--format csv --features {features} --batch-size {BATCH} --lanes {LANES} --epochs {EPOCHS} --eval-fraction 0.25"
    prepare.run([str(clicks), *options.split(), "--slots", slots, "--out", str(out)])
    return Schedule(out)


def _expected(case: Case, clicks: Path, features: Path) -> reference.ReferenceResult:
    own = case.job.get("loss")
    return reference.train(
        reference_config.Config(
            log=reference_data.read_features(features), sources=(clicks,), model=load_model(case.model), dim=DIM, batch_size=BATCH, lanes=LANES,
            epochs=EPOCHS, seed=9, evaluation_fraction=0.25, row_optimizer="adagrad", lr=0.05, dense_optimizer="Adam", dense_options={"lr": 0.01},
            label_weights=case.job.get("label_weights", {}), model_options=case.job.get("model_options", {}),
            loss=None if own is None else load_loss(own),
        )
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_loss_trains_as_in_memory(case: Case, clicks: Path, servers: LocalStores, tmp_path: Path) -> None:
    schedules = {slots: _schedule(case, clicks, tmp_path, slots) for slots in dict.fromkeys(case.slots)}
    settings = {"dim": DIM, "seed": 9, "row_optimizer": "adagrad", "lr": 0.05, "dense_optimizer": "Adam", "dense_lr": 0.01}
    expected = _expected(case, clicks, tmp_path / "features.toml")
    told = []
    for (trainers, shards), slots in zip(((3, 1), (1, 2), (2, 1)), case.slots, strict=False):
        job = job_in_memory(model=case.model, **settings, **case.job)
        outcome = train(job, schedules[slots], servers.urls[:shards], trainers)
        assert [step.loss for step in outcome.steps] == expected.log_losses
        assert outcome.digest == expected.digest
        told.append([to_stored(report) for report in outcome.evaluations])
    assert all(one == told[0] for one in told)
    names = list(expected.evaluations[0].labels)
    for one, other in zip(told[0], expected.evaluations, strict=True):
        labels = one["labels"] if len(names) > 1 else {names[0]: one}
        assert list(labels) == names
        for name, metrics in other.labels.items():
            assert {metric: labels[name][metric] for metric in metrics} == pytest.approx(metrics, rel=1e-6, nan_ok=True)
        assert one["loss"] == pytest.approx(other.loss, rel=1e-6)
        first = {name: value for name, value in next(iter(labels.values())).items() if name != "labels"}
        assert first.items() <= one.items()
