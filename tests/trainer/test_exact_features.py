"""One digest, also with what TalkingData lacks: dense values, several values a feature, shared tables of different widths, shuffles, dropout.

Short logs, more lanes than some steps have samples, and the fewest slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import reference_data
from training import train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute import numerics
from foreload.trainer.models import load_model
from foreload.trainer.run.job import TrainJob

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
[[feature]]
name = "visited"
table = "place"
pooling = "mean"
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
MIXED, EQUAL = (3, 9), (6, 6)

_namespaces = itertools.count()


@pytest.fixture(autouse=True)
def _arithmetic() -> None:
    numerics.set_up(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Two stores."""
    with LocalStores(2, tmp_path_factory.mktemp("stores")) as stores:
        yield stores


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


CASES: dict[str, tuple[str, tuple[int, int], dict[str, Any], int | None, dict[str, dict[str, Any]]]] = {
    "dlrm, shuffled": ("dlrm", EQUAL, {"bottom": "7-6", "top": "9-1"}, 11, {}),
    "deepfm with dropout": ("deepfm", EQUAL, {"deep": "16-8", "dropout": 0.3}, None, {}),
    "wide_deep of mixed widths, shuffled": ("wide_deep", MIXED, {"deep": "16-8"}, -2, {}),
    "dcn of mixed widths with dropout": ("dcn", MIXED, {"deep": "16-8", "rank": 3, "dropout": 0.2}, None, {}),
    "row optimizers by table": (
        "wide_deep",
        MIXED,
        {"deep": "8"},
        None,
        {"place": {"row-optimizer": "sgd", "lr": 0.1}, "tags": {"row-optimizer": "rowwise_adagrad"}, "number": {"lr": 0.2}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_feature_trains_as_in_memory(case: str, clicks: Path, servers: LocalStores, tmp_path: Path) -> None:
    model, (place, number), options, shuffle_seed, tables = CASES[case]
    features = tmp_path / "features.toml"
    features.write_text(FEATURES.format(place=place, number=number))
    given = [clicks, "--format=csv", f"--features={features}", f"--batch-size={BATCH}", f"--lanes={LANES}", "--slots=min"]
    given += [f"--epochs={EPOCHS}", "--eval-fraction=0.1", f"--out={tmp_path / 'schedule'}"]
    given += [] if shuffle_seed is None else [f"--shuffle-seed={shuffle_seed}"]
    prepare.run([str(word) for word in given])
    job = TrainJob.of(
        {
            "schedule": "-", "run": "-", "store": "-", "model": model, "dim": 6, "model_options": options, "seed": 9,
            "row_optimizer": "adagrad", "lr": 0.05, "dense_optimizer": "Adam", "dense_lr": 0.01, "tables": tables,
            "namespace": f"features-{next(_namespaces)}",
        }
    )  # fmt: skip
    expected = reference.train(
        reference.Config(
            log=reference_data.read_features(features),
            sources=(clicks,),
            model=load_model(model),
            dim=6,
            batch_size=BATCH,
            lanes=LANES,
            epochs=EPOCHS,
            seed=9,
            shuffle_seed=shuffle_seed,
            evaluation_fraction=0.1,
            model_options=options,
            row_optimizer="adagrad",
            lr=0.05,
            by_table={name: (own.get("row-optimizer", "adagrad"), own.get("lr", 0.05)) for name, own in tables.items()},
            dense_optimizer="Adam",
            dense_options={"lr": 0.01},
        )
    )
    # Threads share torch's generator, which processes do not: one trainer where a forward draws random numbers.
    trained = train(job, Schedule(tmp_path / "schedule"), servers.urls, 1 if "dropout" in options else 3)
    assert [step.loss for step in trained.steps] == expected.losses
    assert [e.auc for e in trained.evaluations] == pytest.approx([e.auc for e in expected.evaluations])
    assert trained.digest == expected.digest
