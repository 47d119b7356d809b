"""Trials of other libraries' model classes under `wrap`: the logits of the module itself, and the same bits for several trainers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peer_models
import torch
from peer_models import IDS, NUMBERS, ROWS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from training import job_in_memory, train

from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.lookups import Lookup
from foreload.trainer.models.spec import ModelSpec
from foreload.trainer.models.wrapping import Wrapped

SAMPLES, BATCH, LANES, SEED = 96, 16, 3, 5
NEAR = 1e-5
"""The tolerance between logits, relative to 1 + the absolute value of the logit."""


class _Sigmoids(TorchFunctionMode):
    """Notes what each sigmoid is given and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0].clone() if function in (torch.sigmoid, Tensor.sigmoid) else None
        result = function(*args, **(kwargs or {}))
        if given is not None:
            self.calls.append((given, result))
        return result


def logits_itself(module: nn.Module, given: Tensor) -> Tensor:
    """What the last sigmoids of an unwrapped module are given, [b, labels]; its outputs where it has none."""
    with torch.no_grad(), _Sigmoids() as noted:
        outputs = module.eval()(given)
    columns = outputs.reshape(len(given), -1).unbind(1)
    logits = []
    for column in columns:
        before = [x.reshape(-1) for x, result in noted.calls if torch.equal(result.reshape(-1), column)]
        logits.append(before[-1] if before else column)
    return torch.stack(logits, 1)


def spec_of(wrapped: Wrapped, labels: Sequence[str]) -> ModelSpec:
    """The data that go with a wrapped module."""
    features = tuple((feature.name, feature.table.dimension, feature.table.name) for feature in wrapped.features)
    poolings = tuple(feature.table.pooling for feature in wrapped.features)
    return ModelSpec(len(wrapped.dense_names), features, wrapped.dense_names, poolings, tuple(labels), ("click",) * len(labels))


def some_inputs() -> tuple[Tensor, Tensor]:
    """Random IDS, int64 [64, 7], and NUMBERS, float32 [64, 3]."""
    items = ROWS["item"]
    ids = torch.stack([torch.randint(0, ROWS.get(column, items), (64,)) for column in IDS], 1)
    length = torch.randint(0, len(IDS) - len(ROWS) + 1, (64, 1))
    return ids, torch.cat([torch.randn(64, len(NUMBERS) - 1), length], 1)


def worst_difference(library: str, name: str) -> float:
    """The largest difference of logits from those of the module itself on the same rows, relative to 1 + |logit|.

    Raises:
        ModelError: foreload refuses the module.
    """
    torch.manual_seed(SEED)
    plain = peer_models.build(library, name)
    here = load_model(f"peer_models:{peer_models.function_name(library, name)}")
    labels = peer_models.labels_of(name)
    ids, dense = some_inputs()
    with torch.no_grad():
        # Rows of the size of trained ones: those that a library begins with are about 0.
        for layer in plain.modules():
            if isinstance(layer, nn.Embedding):
                layer.weight.normal_(0, 0.3)
    expected = logits_itself(plain, peer_models.given(library, name, ids, dense))
    spec = spec_of(peer_models.wrapped(library, name), labels)
    model: Any = build_model(here, spec, {}, SEED, twice=True, drop_weights=True)
    with torch.no_grad():
        own = dict(plain.named_parameters())
        for path, parameter in model.module.named_parameters():
            parameter.copy_(own[path])
        logits = model.eval()(dense[:, : spec.dense_width], rows_of(plain, model, ids)).reshape(len(ids), -1)
    return largest_difference(logits, expected)


def largest_difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference of logits from those expected, relative to 1 + |logit|."""
    return float(((logits - expected).abs() / (1 + expected.abs())).max())


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module itself has the rows of a feature.

    Attributes:
        path: the path of their table there.
        first: the row there of id 0. A table for several fields has the rows of the fields before it first.
        column: the place of the feature's column in IDS.
    """

    path: str
    first: int
    column: int


def places(model: Wrapped) -> dict[str, Place]:
    """Where the module has the rows of each feature."""
    starts = dict(zip(IDS, [0, *itertools.accumulate(ROWS.values())], strict=False))
    features = {feature.name: feature for feature in model.features}
    of_features = {}
    for layer in model.module.modules():
        if isinstance(layer, Lookup):
            for feature in layer.features.values():
                is_part = features[feature].table.rows < layer.table.rows
                column = features[feature].column
                of_features[feature] = Place(layer.path, starts[column] if is_part else 0, IDS.index(column))
    return of_features


def rows_of(plain: nn.Module, model: Wrapped, ids: Tensor) -> dict[str, Tensor]:
    """The rows of the module's own tables for each feature, [b, dimension]."""
    return {
        feature: plain.get_parameter(f"{place.path}.weight")[ids[:, place.column] + place.first]
        for feature, place in places(model).items()
    }


def write_clicks(path: Path, samples: int) -> None:
    """Write random clicks whose values are ids."""
    draw = random.Random(3)
    lines = [",".join(["clicked", "liked", *IDS, *NUMBERS])]
    for _ in range(samples):
        ids = [draw.randrange(ROWS.get(column, ROWS["item"])) for column in IDS]
        labels = [int(draw.random() < 0.1 + 0.8 * (ids[0] % 2)) for _ in range(2)]
        numbers = [f"{draw.gauss(0, 1):.4f}", f"{draw.random():.4f}", draw.randint(1, 3)]
        lines.append(",".join(map(str, [*labels, *ids, *numbers])))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def prepared(library: str, name: str, clicks: Path, folder: Path, batch: int, *rest: str) -> Schedule:
    """The schedule of a class for clicks, in a new folder. rest: further settings of `prepare`."""
    folder.mkdir()
    features = folder / "features.toml"
    peer_models.wrapped(library, name).write_features(features, label=peer_models.labels_of(name))
    given = [clicks, "--format=csv", f"--features={features}", f"--batch-size={batch}", f"--lanes={LANES}", *rest]
    prepare.run([str(word) for word in [*given, f"--out={folder / 'schedule'}"]])
    return Schedule(folder / "schedule")


def job_of(library: str, name: str, **settings: Any) -> TrainJob:
    """A job for `training.train` that trains the class with these settings."""
    model = f"peer_models:{peer_models.function_name(library, name)}"
    return job_in_memory(model=model, dim=1, seed=SEED, drop_weights=True, **settings)


def digests(library: str, name: str, clicks: Path, folder: Path, urls: Sequence[str], trainers: Sequence[int]) -> list[str]:
    """The digests of the model trained by these numbers of trainers."""
    schedule = prepared(library, name, clicks, folder, BATCH, "--slots=all")
    settings = {"row_optimizer": "adagrad", "lr": 0.05, "dense_optimizer": "Adam", "dense_lr": 0.01}
    return [train(job_of(library, name, **settings), schedule, urls, count).digest for count in trainers]
