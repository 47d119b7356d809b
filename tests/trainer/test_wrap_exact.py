"""Models written for plain PyTorch: trained here as by the plain trainer, to the bit, and as by a loop of their authors', but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plain_models
import pytest
import reference
import reference_data
import torch
from grids import covering
from torch import Tensor, nn
from training import Trained, job_in_memory, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.models import load_model
from foreload.trainer.models.spec import ModelSpec

SAMPLES, HELD_OUT, BATCH, LANES, EPOCHS = 300, 30, 24, 3, 2
DENSE_LR, LR = 0.02, 0.05
pytestmark = pytest.mark.usefixtures("one_thread")

Data = reference_data.Samples


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random clicks, whose values are ids; `visited` has several, at times none."""
    random = np.random.default_rng(8)
    lines = ["clicked,site,ad,ad_before,user,visited,x,age"]
    for _ in range(SAMPLES):
        site, ad, before, user = (random.integers(rows) for rows in (40, 30, 30, 120))
        visited = "|".join(map(str, random.integers(0, 40, random.integers(0, 4))))
        clicked = int(random.random() < 0.2 + 0.5 * ((user + ad) % 3 == 0))
        lines.append(f"{clicked},{site},{ad},{before},{user},{visited},{random.normal():.4f},{random.random():.4f}")
    path = tmp_path_factory.mktemp("plain") / "clicks.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Prepared:
    """A model, its feature file as `wrap` wrote it, and its schedules by their slots."""

    model: str
    features: Path
    schedules: dict[str, Schedule]
    source: Path

    def config(self, **changed: Any) -> reference.Config:
        """What the plain trainer is told."""
        settings: dict[str, Any] = {
            "log": reference_data.read_features(self.features), "sources": (self.source,), "model": load_model(f"plain_models:{self.model}"),
            "dim": 1, "batch_size": BATCH, "lanes": LANES, "epochs": EPOCHS, "seed": 5, "evaluation_fraction": HELD_OUT / SAMPLES,
            "row_optimizer": "sgd", "lr": LR, "dense_optimizer": "SGD", "dense_options": {"lr": DENSE_LR},
        }  # fmt: skip
        return reference.Config(**settings | changed)

    def train(self, urls: Sequence[str], trainers: int, slots: str, **changed: Any) -> Trained:
        """Train it."""
        settings = {"row_optimizer": "sgd", "lr": LR, "dense_optimizer": "SGD", "dense_lr": DENSE_LR}
        job = job_in_memory(model=f"plain_models:{self.model}", dim=1, seed=5, **settings | changed)
        return train(job, self.schedules[slots], urls, trainers)


@pytest.fixture(scope="module", params=["dlrm_here", "two_tower_here", "wide_deep_here", "native_here"])
def prepared(request: pytest.FixtureRequest, clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Each model in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    features, schedules = folder / "features.toml", {}
    if request.param == "native_here":
        features.write_text(plain_models.NATIVE_FEATURES)
    else:
        getattr(plain_models, request.param)(ModelSpec(0, ())).write_features(features, label="clicked")
    for slots in ("min", "all"):
        given = [clicks, "--format=csv", f"--features={features}", f"--batch-size={BATCH}", f"--lanes={LANES}", f"--slots={slots}"]
        given += [f"--epochs={EPOCHS}", f"--eval-fraction={HELD_OUT / SAMPLES}", f"--out={folder / slots}"]
        prepare.run([str(word) for word in given])
        schedules[slots] = Schedule(folder / slots)
    return Prepared(request.param, features, schedules, clicks)


@pytest.fixture(scope="module")
def expected(prepared: Prepared) -> reference.ReferenceResult:
    """What plain training in memory gives."""
    return reference.train(prepared.config())


@pytest.mark.parametrize(
    ("trainers", "shards", "slots"), covering([(t, s, k) for k in ("min", "all") for t in (1, 2, 3) for s in (1, 2, 3)], 7)
)
def test_it_trains_to_the_bits_of_the_plain_trainer(
    prepared: Prepared, expected: reference.ReferenceResult, servers: LocalStores, trainers: int, shards: int, slots: str
) -> None:
    outcome = prepared.train(servers.urls[:shards], trainers, slots)
    assert outcome.digest == expected.digest
    assert [step.loss for step in outcome.steps] == expected.log_losses
    assert [e.auc for e in outcome.evaluations] == pytest.approx([e.auc for e in expected.evaluations])
    assert [e.log_loss for e in outcome.evaluations] == pytest.approx([e.log_loss for e in expected.evaluations])


def test_other_optimizers_and_dropout_give_the_bits_of_the_plain_trainer(prepared: Prepared, servers: LocalStores) -> None:
    options = {"dropout": 0.3} if prepared.model == "wide_deep_here" else {}
    given = {"row_optimizer": "rowwise_adagrad", "dense_optimizer": "Adam", "model_options": options}
    outcome = prepared.train(servers.urls[:2], 1, "min", **given)
    assert outcome.digest == reference.train(prepared.config(**given, dense_options={"lr": DENSE_LR})).digest
