"""Models written for plain PyTorch: trained here as by the plain trainer, to the bit, and as by a loop of their authors', but for rounding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plain_models
import pyarrow.parquet as pq
import pytest
import reference
import reference_config
import reference_data
import reference_tables
import torch
from command_line import done
from grids import covering
from torch import Tensor, nn
from training import Trained, job_in_memory, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.models.building import load_model
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

    def config(self, **changed: Any) -> reference_config.Config:
        """What the plain trainer is told."""
        settings: dict[str, Any] = {
            "log": reference_data.read_features(self.features), "sources": (self.source,), "model": load_model(f"plain_models:{self.model}"),
            "dim": 1, "batch_size": BATCH, "lanes": LANES, "epochs": EPOCHS, "seed": 5, "evaluation_fraction": HELD_OUT / SAMPLES,
            "row_optimizer": "sgd", "lr": LR, "dense_optimizer": "SGD", "dense_options": {"lr": DENSE_LR},
        }  # fmt: skip
        return reference_config.Config(**settings | changed)

    def train(self, urls: Sequence[str], trainers: int, slots: str, **changed: Any) -> Trained:
        """Train it."""
        settings = {"row_optimizer": "sgd", "lr": LR, "dense_optimizer": "SGD", "dense_lr": DENSE_LR}
        job = job_in_memory(model=f"plain_models:{self.model}", dim=1, seed=5, **settings | changed)
        return train(job, self.schedules[slots], urls, trainers)


@pytest.fixture(scope="module", params=["dlrm_here", "two_tower_here", "wide_deep_here", "native_here", "annealed_here"])
def prepared(request: pytest.FixtureRequest, clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Each model in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    features, schedules = folder / "features.toml", {}
    if request.param == "native_here":
        features.write_text(plain_models.NATIVE_FEATURES)
    else:
        getattr(plain_models, request.param)(ModelSpec(0, ())).write_features(features, label="clicked")
    for slots in ("min", "all"):
        given = [
            clicks,
            "--format=csv",
            f"--features={features}",
            f"--batch-size={BATCH}",
            f"--lanes={LANES}",
            f"--slots={slots}",
        ]
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


@dataclass(frozen=True)
class Batch:
    """Samples as their authors' code has them: per column indices and offsets; dense values by name."""

    bags: dict[str, tuple[Tensor, Tensor]]
    dense: dict[str, Tensor]
    labels: Tensor

    @classmethod
    def of(cls, samples: reference_data.Samples, log: reference_data.Log) -> Batch:
        """A part of the data."""
        bags = {}
        for place, feature in enumerate(log.features):
            own = [bag[place] for bag in samples.bags]
            offsets = np.cumsum([0, *(len(bag) for bag in own)])[:-1]
            bags[feature.column] = (torch.tensor(np.concatenate(own)), torch.tensor(offsets))
        dense = {described.name: torch.tensor(samples.dense[:, place]) for place, described in enumerate(log.dense)}
        return cls(bags, dense, torch.tensor(samples.labels[:, 0]))


def call_dlrm(module: nn.Module, batch: Batch) -> Tensor:
    given = [batch.bags[name] for name in ("site", "ad", "user", "visited")]
    dense_x = torch.stack([batch.dense["x"], batch.dense["age"]], 1)
    logits: Tensor = module(dense_x, [offsets for _, offsets in given], [indices for indices, _ in given])
    return logits.squeeze(1)


def call_two_tower(module: nn.Module, batch: Batch) -> Tensor:
    user, ad, last_ad = (batch.bags[name][0] for name in ("user", "ad", "ad_before"))
    logits: Tensor = module(user, ad, last_ad, *batch.bags["visited"], age=batch.dense["age"])
    return logits


def call_wide_deep(module: nn.Module, batch: Batch) -> Tensor:
    ids = {name: batch.bags[name][0] for name in plain_models.ROWS}
    logits: Tensor = module(ids, torch.stack([batch.dense["age"], batch.dense["x"]], 1))
    return logits


THEIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor], list[str]]] = {
    "dlrm_here": (plain_models.dlrm, call_dlrm, ["emb_l.0", "emb_l.1", "emb_l.2", "emb_l.3"]),
    "two_tower_here": (plain_models.two_tower, call_two_tower, ["ad_emb", "user_emb", "history_emb"]),
    "wide_deep_here": (
        plain_models.wide_deep, call_wide_deep, ["wide.site", "wide.ad", "wide.user", "deep.site", "deep.ad", "deep.user"],
    ),
}  # fmt: skip
"""Per model: how it is built, how it is called, and its tables in the order of the feature file."""


@pytest.mark.parametrize("prepared", THEIRS, indirect=True)
def test_a_loop_of_its_authors_trains_the_same_but_for_rounding(prepared: Prepared, expected: reference.ReferenceResult) -> None:
    build, call, tables = THEIRS[prepared.model]
    config = prepared.config()
    data = reference_data.load(config.log, config.sources, (), config.evaluation_fraction)
    torch.manual_seed(config.seed)
    module = build()
    for number, path in enumerate(tables):
        table = module.get_submodule(path)
        assert isinstance(table, nn.Embedding | nn.EmbeddingBag)
        rows, dimension = table.weight.shape
        with torch.no_grad():
            table.weight.copy_(
                torch.tensor(reference_tables.initial_weights(config.seed, number, np.arange(rows), rows, dimension))
            )
    rows_of_tables = [module.get_parameter(f"{path}.weight") for path in tables]
    others = [parameter for parameter in module.parameters() if not any(parameter is rows for rows in rows_of_tables)]
    optimizer = torch.optim.SGD([{"params": rows_of_tables, "lr": LR}, {"params": others, "lr": DENSE_LR}])
    losses = []
    for _ in range(EPOCHS):
        for first in range(0, len(data.training), BATCH):
            places = np.arange(first, min(first + BATCH, len(data.training)))
            batch = Batch.of(data.training.take(places), config.log)
            loss = nn.functional.binary_cross_entropy_with_logits(call(module, batch), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        logits = call(module.eval(), Batch.of(data.evaluation, config.log)).numpy()
    assert np.abs(logits - expected.logits).max() < 1e-5
    assert np.abs(np.subtract(losses, expected.log_losses)).max() < 1e-5


def train_by_command(prepared: Prepared, run: Path, *rest: object) -> str:
    """`foreload train`, told of the model by a job file; returns the digest."""
    job = run.with_suffix(".toml")
    job.write_text(
        f'[train]\nmodel = "plain_models.py:{prepared.model}"\nmodel-folder = "{Path(__file__).parent}"\nseed = 5\nrow-optimizer = "sgd"\nlr = {LR}\n'
        f'dense-optimizer = "SGD"\ndense-lr = {DENSE_LR}\n'
    )
    done("train", prepared.schedules["min"].path, "--run", run, "--job", job, "--digest", *rest)
    return str(json.loads((run / "summary.json").read_text())["digest"])


@pytest.mark.parametrize("prepared", ["two_tower_here"], indirect=True)
def test_commands_take_it_by_its_name(prepared: Prepared, expected: reference.ReferenceResult, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_by_command(prepared, run, "--store", "local:2", "--trainers", 2) == expected.digest
    done("evaluate", run, "--json", tmp_path / "evaluated.json")
    assert json.loads((tmp_path / "evaluated.json").read_text())["log_loss"] == pytest.approx(expected.evaluations[-1].log_loss)
    lines = prepared.source.read_text().splitlines()
    (tmp_path / "held-out.csv").write_text("\n".join([lines[0], *lines[-HELD_OUT:]]) + "\n")
    steps_of = ("--steps-of", prepared.schedules["min"].path)
    done("predict", run, tmp_path / "held-out.csv", "--out", tmp_path / "logits.parquet", *steps_of, "--logits")
    assert np.array_equal(pq.read_table(tmp_path / "logits.parquet")["logit"].to_numpy(), expected.logits)


@pytest.mark.full
@pytest.mark.parametrize("prepared", ["dlrm_here", "wide_deep_here", "native_here"], indirect=True)
def test_it_goes_on_from_a_checkpoint(prepared: Prepared, expected: reference.ReferenceResult, tmp_path: Path) -> None:
    whole = ("--store", "local:3", "--trainers", 3, "--checkpoint-every", 7)
    assert train_by_command(prepared, tmp_path / "run", *whole) == expected.digest
    first = min((tmp_path / "run" / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    assert train_by_command(prepared, tmp_path / "again", "--store", "local:1", "--from", first) == expected.digest
