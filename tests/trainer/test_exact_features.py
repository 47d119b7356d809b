"""One digest, also with what TalkingData lacks: dense values, several values a feature, shared tables of different widths, shuffles, dropout.

Short logs, more lanes than some steps have samples, and the fewest slots.
"""

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

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.models.building import load_model

FEATURES = """
label = "click"
order_by = "at"
[table.place]
rows = 30
dimension = {place}
[table.number]
rows = 12
dimension = {number}
[[feature]]
name = "home"
table = "place"
{padding}
[[feature]]
name = "visited"
table = "place"
pooling = "mean"
{padding}
[[feature]]
name = "tags"
encoding = "vocabulary"
pooling = "sum"
[[feature]]
name = "number"
encoding = "id"
table = "number"
[[dense]]
name = "x"
[[dense]]
name = "z"
transform = "standard"
"""
LANES, BATCH, EPOCHS = 5, 13, 2
DIM = 6
MIXED, EQUAL = (3, 9), (DIM, DIM)
"""Dimensions of the tables `place` and `number`; that of `tags` is DIM. DLRM and DeepFM take equal ones only."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 random clicks: 90 to train on, 7 steps of which the last has 12 samples; 10 held out."""
    random = np.random.default_rng(4)

    def some(values: list[str]) -> str:
        return "|".join(random.choice(values, random.integers(1, 5)))

    places, tags = [f"place {n}" for n in range(20)] + [""], ["a", "b", "c", "d", "", *(f"rare {n}" for n in range(60))]
    lines = ["at,click,home,visited,tags,number,x,z"]
    for _ in range(100):
        numbers = f"{random.integers(12)},{random.normal() * 9:.4f},{random.normal():.4f}"
        lines.append(f"{random.integers(50)},{random.integers(2)},{random.choice(places)},{some(places)},{some(tags)},{numbers}")
    path = tmp_path_factory.mktemp("clicks") / "clicks.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Case:
    """A training. dimensions: of the tables `place` and `number`; tables: their own settings, as a job has them."""

    model: str
    dimensions: tuple[int, int]
    options: dict[str, Any]
    shuffle_seed: int | None = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)  # row-... settings of all tables
    batch: int = BATCH
    of_number: str = ""  # further lines of the feature file about the table `number`
    padding: str = ""  # further lines about the features `home` and `visited`


OWN_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "place": {"row-optimizer": "sgd", "lr": 0.1},
    "tags": {"row-optimizer": "rowwise_adagrad"},
    "number": {"lr": 0.2},
}
WITH_OPTIONS: dict[str, dict[str, Any]] = {
    "place": {"row-optimizer": "ftrl", "lr": 0.3, "row-options": {"l1": 0.001, "l2": 0.01, "beta": 0.1}},
    "tags": {"row-optimizer": "adam", "row-options": {"beta1": 0.5}},
    "number": {"row-options": {"decay": 0.9, "epsilon": 1e-4}},
}
PENALISED: dict[str, dict[str, Any]] = {
    "place": {"row-optimizer": "ftrl", "lr": 0.3, "row-options": {"l1": 0.001}, "row-l2": 0},
    "tags": {"row-optimizer": "adam", "row-l1": 0.004},
    "number": {"row-optimizer": "sgd", "row-l2": 0.3},
}
CASES = {
    "dlrm, shuffled": Case("dlrm", EQUAL, {"bottom": f"7-{DIM}", "top": "9-1"}, shuffle_seed=11),
    "deepfm with dropout": Case("deepfm", EQUAL, {"deep": "16-8", "dropout": 0.3}),
    "wide_deep of mixed dimensions, shuffled": Case("wide_deep", MIXED, {"deep": "16-8"}, shuffle_seed=-2),
    "dcn of mixed dimensions with dropout": Case("dcn", MIXED, {"deep": "16-8", "rank": 3, "dropout": 0.2}),
    "row optimizers by table": Case("wide_deep", MIXED, {"deep": "8"}, tables=OWN_OPTIMIZERS),
    "row optimizers with options": Case("wide_deep", MIXED, {"deep": "8"}, tables=WITH_OPTIONS),
    "initial values by table": Case(
        "wide_deep",
        MIXED,
        {"deep": "8"},
        tables={"place": {"row-initial": "xavier"}},
        rows={"row_initial": "uniform:0.05"},
        of_number='initial = "normal:0.3"',
    ),
    "initial values of all": Case("dlrm", EQUAL, {"bottom": f"7-{DIM}", "top": "9-1"}, rows={"row_initial": "normal:0.01"}),
    "initial zeros": Case(
        "wide_deep", MIXED, {"deep": "8"}, tables={"tags": {"row-initial": "zeros"}}, of_number='initial = "zeros"'
    ),
    "a loss of its own, on fewer samples than lanes at the end": Case("model_cases:Balanced", MIXED, {"share": 0.2}, batch=29),
    "padding": Case("wide_deep", MIXED, {"deep": "8"}, padding=f"padding = {[f'place {n}' for n in range(9)]}"),
    "penalties": Case("wide_deep", MIXED, {"deep": "8"}, rows={"row_l1": 0.002, "row_l2": 0.01}),
    "penalties by table": Case("wide_deep", MIXED, {"deep": "8"}, tables=PENALISED, rows={"row_l2": 0.01}),
    "penalties with row-wise Adagrad": Case(
        "dlrm",
        EQUAL,
        {"bottom": f"7-{DIM}", "top": "9-1"},
        tables={name: {"row-optimizer": "rowwise_adagrad"} for name in OWN_OPTIMIZERS},
        rows={"row_l2": 0.1, "row_l1": 0.003},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kind_of_feature_trains_as_in_memory(case: Case, clicks: Path, servers: LocalStores, tmp_path: Path) -> None:
    features = tmp_path / "features.toml"
    place, number = case.dimensions
    features.write_text(FEATURES.format(place=place, number=f"{number}\n{case.of_number}", padding=case.padding))
    given = [clicks, "--format=csv", f"--features={features}", f"--batch-size={case.batch}", f"--lanes={LANES}", "--slots=min"]
    given += [f"--epochs={EPOCHS}", "--eval-fraction=0.1", f"--out={tmp_path / 'schedule'}"]
    given += [] if case.shuffle_seed is None else [f"--shuffle-seed={case.shuffle_seed}"]
    prepare.run([str(word) for word in given])
    job = job_in_memory(
        model=case.model, dim=DIM, model_options=case.options, seed=9, row_optimizer="adagrad", lr=0.05, dense_optimizer="Adam",
        dense_lr=0.01, tables=case.tables, **case.rows,
    )  # fmt: skip
    penalties = (case.rows.get("row_l1", 0.0), case.rows.get("row_l2", 0.0))
    expected = reference.train(
        reference_config.Config(
            log=reference_data.read_features(features),
            sources=(clicks,),
            model=load_model(case.model),
            dim=DIM,
            batch_size=case.batch,
            lanes=LANES,
            epochs=EPOCHS,
            seed=9,
            shuffle_seed=case.shuffle_seed,
            evaluation_fraction=0.1,
            model_options=case.options,
            row_optimizer="adagrad",
            lr=0.05,
            by_table={
                name: (own.get("row-optimizer", "adagrad"), own.get("lr", 0.05), own.get("row-options", {}))
                for name, own in case.tables.items()
            },
            row_initial=case.rows.get("row_initial", "uniform"),
            initial_by_table={name: own["row-initial"] for name, own in case.tables.items() if "row-initial" in own},
            penalties=penalties,
            penalties_by_table={
                name: (own.get("row-l1", penalties[0]), own.get("row-l2", penalties[1])) for name, own in case.tables.items()
            },
            dense_optimizer="Adam",
            dense_options={"lr": 0.01},
        )
    )
    # Threads share torch's generator, which processes do not: one trainer where a forward draws random numbers.
    outcome = train(job, Schedule(tmp_path / "schedule"), servers.urls[:2], 1 if "dropout" in case.options else 3)
    assert [step.loss for step in outcome.steps] == expected.log_losses
    assert [e.auc for e in outcome.evaluations] == pytest.approx([e.auc for e in expected.evaluations])
    assert outcome.digest == expected.digest
