"""Plain synchronous training with whole tables in memory and no cache: what the project's digests are held against.

Follows docs/definitions.md alone. Of the project it uses the modules of foreload.trainer.models with what they are told (ModelSpec, Embeddings),
connects layers of features to that, and the numerics settings; reading, hashing, initial rows, gathers, sums, row optimizers and the digest are
written here afresh, for correctness before speed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_data import (
    Data,
    Log,
    Placement,
    Samples,
    criteo,
    key,
    key_array,
    load,
    mix_array,
    read_features,
    rows_of,
    shuffled,
    slice_bounds,
)
from torch import nn

from foreload.trainer.compute import numerics
from foreload.trainer.models import load_model
from foreload.trainer.models.layers import connect
from foreload.trainer.models.spec import Embeddings, ModelBuilder, ModelSpec

DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {},
    "adagrad": {"epsilon": 1e-8, "decay": 1.0},
    "rowwise_adagrad": {"epsilon": 1e-8, "decay": 1.0},
    "adam": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "ftrl": {"l1": 0.0, "l2": 0.0, "beta": 1.0},
}
"""Options of the row optimizers."""


@dataclass(frozen=True, slots=True)
class Config:
    """One training run. A table's row optimizer is its entry in by_table, (name, lr) or (name, lr, options), or else that of all tables."""

    log: Log
    sources: tuple[Path, ...]
    model: ModelBuilder
    dim: int
    batch_size: int
    lanes: int = 1
    placement: str = "locality"
    epochs: int = 1
    seed: int = 0
    shuffle_seed: int | None = None
    evaluation_sources: tuple[Path, ...] = ()
    evaluation_fraction: float = 0.0
    evaluation_sets: Mapping[str, tuple[Path, ...]] = field(
        default_factory=dict
    )  # in the place of both: the sources of each, by name
    eval_every: int | None = None  # steps of an epoch between evaluations amid it
    stop_after: int | None = None  # the last step; no evaluation comes behind it
    model_options: Mapping[str, object] = field(default_factory=dict)
    row_optimizer: str = "sgd"
    lr: float = 0.01
    row_options: Mapping[str, float] = field(default_factory=dict)
    by_table: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dense_optimizer: str = "SGD"
    dense_options: Mapping[str, object] = field(default_factory=lambda: {"lr": 0.01})
    lr_schedule: str | None = None
    dense_lr_schedule: str | None = None
    dense_clip: float | None = None
    dense_ema: float | None = None
    label_weights: Mapping[str, float] = field(default_factory=dict)
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None  # in the place of that of the labels' kinds
    later: tuple[int, Config] | None = None  # the step from which on another one holds, in what concerns learning rates


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of one pass over the evaluation samples: of the first label, with NaN for those that it has not; and all of each label, by name.

    loss: the mean of what is trained; set: the evaluation set's name, "" of one without.
    """

    log_loss: float
    auc: float
    normalized_entropy: float
    labels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loss: float = float("nan")
    set: str = ""


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """digest: hex; log_losses: per training step; evaluations, evaluated: in order, of a pass those of each set, and after which step each; logits:
    float32 [n] or, of several labels, [n, labels], of the last pass, by sample number.
    """

    digest: str
    log_losses: list[float]
    evaluations: list[Evaluation]
    logits: np.ndarray
    evaluated: list[int] = field(default_factory=list)


def initial_weights(seed: int, table: int, ids: np.ndarray, rows: int, dimension: int) -> np.ndarray:
    """Initial `weights` columns, float32 [len(ids), dimension]."""
    h = key_array((seed, table), ids)
    result = np.empty((len(ids), dimension), np.float32)
    scale = np.float32(1.0 / np.sqrt(float(rows)))
    for column in range(dimension):
        b = mix_array(h ^ np.uint64(column // 2))
        u = (b >> np.uint64(40)) if column % 2 == 0 else (b >> np.uint64(16)) & np.uint64(0xFFFFFF)
        result[:, column] = ((u.astype(np.float64) - 2.0**23) * 2.0**-23).astype(np.float32) * scale
    return result


class Table:
    """A whole table. weights: float32 [rows, W]; state: float32 [rows, S]; used: bool [rows], rows of training steps so far.

    Rows outside `touched` are never read, and keep zeros, so that a large table costs memory only for its touched pages.
    """

    def __init__(
        self, rows: int, parts: Sequence[int], optimizer: str, lr: float, options: Mapping[str, float] | None = None
    ) -> None:
        self.parts, self.optimizer, self.lr = list(parts), optimizer, lr
        self.options = DEFAULTS[optimizer] | dict(options or {})
        self.width = width = sum(parts)
        state_width = {"sgd": 0, "adagrad": width, "rowwise_adagrad": len(self.parts), "adam": 2 * width, "ftrl": 2 * width}[
            optimizer
        ]
        self.rows = rows
        self.weights = np.zeros((rows, self.width), np.float32)
        self.state = np.zeros((rows, state_width), np.float32)
        self.used = np.zeros(rows, bool)

    def initialise(self, seed: int, number: int, touched: np.ndarray) -> None:
        self.weights[touched, : self.parts[0]] = initial_weights(seed, number, touched, self.rows, self.parts[0])

    def update(self, ids: np.ndarray, gradients: np.ndarray, number: int = 0) -> None:
        """A step of the row optimizer, of this number. ids: int64 [n], distinct; gradients: float32 [n, W]."""
        self.used[ids] = True
        lr, option = np.float32(self.lr), {name: np.float32(value) for name, value in self.options.items()}
        if self.optimizer == "sgd":
            self.weights[ids] = self.weights[ids] - lr * gradients
        elif self.optimizer == "adagrad":
            state = option["decay"] * self.state[ids] + gradients * gradients
            self.state[ids] = state
            self.weights[ids] = self.weights[ids] - (lr * gradients) / (np.sqrt(state) + option["epsilon"])
        elif self.optimizer == "adam":
            self.adam(ids, gradients, number + 1, option)
        elif self.optimizer == "ftrl":
            if lr > 0:
                self.ftrl(ids, gradients, lr, option)
        else:
            start = 0
            for number, columns in enumerate(self.parts):
                g = gradients[:, start : start + columns]
                sums = option["decay"] * self.state[ids, number] + sum_of_squares(g) / np.float32(columns)
                self.state[ids, number] = sums
                step = (lr * g) / (np.sqrt(sums) + option["epsilon"])[:, None]
                self.weights[ids, start : start + columns] = self.weights[ids, start : start + columns] - step
                start += columns

    def adam(self, ids: np.ndarray, g: np.ndarray, t: int, option: Mapping[str, np.float32]) -> None:
        m, v = np.split(self.state[ids], 2, axis=1)
        first, second = self.options["beta1"], self.options["beta2"]
        m = option["beta1"] * m + np.float32(1 - first) * g
        v = option["beta2"] * v + np.float32(1 - second) * (g * g)
        rate, root = np.float32(self.lr / (1 - power(first, t))), np.float32(1 / math.sqrt(1 - power(second, t)))
        self.state[ids] = np.concatenate([m, v], axis=1)
        self.weights[ids] = self.weights[ids] - (rate * m) / (np.sqrt(v) * root + option["epsilon"])

    def ftrl(self, ids: np.ndarray, g: np.ndarray, lr: np.float32, option: Mapping[str, np.float32]) -> None:
        z, n = np.split(self.state[ids], 2, axis=1)
        total = n + g * g
        sigma = (np.sqrt(total) - np.sqrt(n)) / lr
        z = z + (g - sigma * self.weights[ids])
        self.state[ids] = np.concatenate([z, total], axis=1)
        changed = (np.where(z > 0, option["l1"], -option["l1"]) - z) / ((option["beta"] + np.sqrt(total)) / lr + option["l2"])
        self.weights[ids] = np.where(abs(z) <= option["l1"], np.float32(0), changed)


def sum_of_squares(g: np.ndarray) -> np.ndarray:
    """Q(g) of every row: float32 [n, columns] -> [n], eight running sums and then a tree."""
    p = np.zeros((len(g), 8), np.float32)
    for column in range(g.shape[1]):
        p[:, column % 8] = p[:, column % 8] + g[:, column] * g[:, column]
    for half in (4, 2):
        p[:, :half] = p[:, :half] + p[:, half : 2 * half]
    return p[:, 0] + p[:, 1]


def rate_factor(schedule: str, step: int) -> float:
    """What a learning rate is multiplied by at a training step."""
    words = [word.split(":") for word in schedule.split(",")]
    if words[0][0].isdigit():
        points = [(int(at), float(value)) for at, value in words]
        if step < points[0][0]:
            return points[0][1]
        for (a, x), (b, y) in itertools.pairwise(points):
            if a <= step < b:
                return x + (y - x) * ((step - a) / (b - a))
        return points[-1][1]
    n = int(words.pop(0)[1]) if words[0][0] == "warmup" else 0
    if step < n:
        return (step + 1) / n
    if not words:
        return 1.0
    kind, end, x = words[0][0], int(words[0][1]), float(words[0][2])
    if kind == "step":
        return power(x, (step - n) // end)
    t = min(step - n, end - n) / (end - n)
    return 1 + (x - 1) * t if kind == "linear" else x + (1 - x) * ((1 + cosine(t)) / 2)


def power(base: float, exponent: int) -> float:
    """By squaring from the lowest bit up."""
    product = 1.0
    while exponent:
        product = product * base if exponent % 2 else product
        exponent, base = exponent // 2, base * base
    return product


def cosine(t: float) -> float:
    """cos(pi t), 0 <= t <= 1."""
    if t > 0.5:
        return -cosine(1 - t)
    q, total = (math.pi * t) * (math.pi * t), 1.0
    for k in range(11, 0, -1):
        total = 1 - q / ((2 * k - 1) * (2 * k)) * total
    return total


def clip(gradients: Sequence[torch.Tensor], most: float) -> None:
    """Scale gradients whose norm over all of them is larger."""
    total = 0.0
    for gradient in gradients:
        values = gradient.numpy().reshape(-1).astype(np.float64)
        sums = [0.0] * 8
        for place, value in enumerate(values.tolist()):
            sums[place % 8] += value * value
        sums = [a + b for a, b in zip(sums[:4], sums[4:], strict=True)]
        total += (sums[0] + sums[2]) + (sums[1] + sums[3])
    norm = math.sqrt(total)
    if norm > most:
        for gradient in gradients:
            gradient *= np.float32(most / norm).item()


def sum_in_order(groups: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Per group the sum of its values in their order, starting from the first. groups: int [n], each of 0..count-1 present; values [n, W]."""
    by_group = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[by_group], np.arange(count))
    occurrence = np.empty(len(groups), np.int64)
    occurrence[by_group] = np.arange(len(groups)) - starts[groups[by_group]]
    result = values[by_group[starts]]
    # All first values, then all second ones, ...: within one round no group comes twice.
    rounds = np.argsort(occurrence, kind="stable")
    bounds = np.searchsorted(occurrence[rounds], np.arange(1, occurrence.max(initial=0) + 2))
    for first, last in itertools.pairwise(bounds):
        chosen = rounds[first:last]
        result[groups[chosen]] = result[groups[chosen]] + values[chosen]
    return result


@dataclass(frozen=True, slots=True)
class Lookups:
    """A slice's lookups by sample, feature, value. All int64 [lookups]; place: in its bag; count: the values of its bag."""

    sample: np.ndarray
    feature: np.ndarray
    place: np.ndarray
    count: np.ndarray
    id: np.ndarray

    @classmethod
    def of(cls, samples: Samples) -> Lookups:
        bags = [bag for sample in samples.bags for bag in sample]
        counts = np.array([len(bag) for bag in bags], np.int64)
        bag = np.repeat(np.arange(len(bags)), counts)
        place = np.arange(len(bag)) - (np.cumsum(counts) - counts)[bag]
        features = len(samples.bags[0])
        return cls(bag // features, bag % features, place, counts[bag], np.concatenate(bags))


class Trainer:
    """The model and its rows; `step` trains on one global batch, `evaluate` changes nothing."""

    def __init__(self, config: Config, data: Data) -> None:
        self.config = config
        log = config.log
        further = dict(getattr(config.model, "further_columns", {}))
        dimensions = [table.dimension or config.dim for table in log.tables]
        self.tables: list[Table] = []
        for described, rows, dimension in zip(log.tables, data.rows, dimensions, strict=True):
            optimizer = config.by_table.get(described.name, (config.row_optimizer, config.lr, config.row_options))
            self.tables.append(Table(rows, [dimension, *further.values()], *optimizer))
        for number, table in enumerate(self.tables):
            features = [f for f, feature in enumerate(log.features) if feature.table == number]
            bags = [sample[f] for samples in (data.training, data.evaluation) for sample in samples.bags for f in features]
            table.initialise(config.seed, number, np.unique(np.concatenate(bags)))

        self.table_of = np.array([feature.table for feature in log.features])
        self.pooling = np.array([feature.pooling for feature in log.features])
        self.width = max(table.width for table in self.tables)
        # What the model sees by name: a feature's columns of the block, and the further ones that the model declares.
        self.views: list[tuple[str, int, slice]] = []
        for f, feature in enumerate(log.features):
            start = 0
            for name, columns in {"": dimensions[feature.table], **further}.items():
                self.views.append((feature.name + ("." + name if name else ""), f, slice(start, start + columns)))
                start += columns

        spec = ModelSpec(
            len(log.dense),
            tuple((f.name, dimensions[f.table], log.tables[f.table].name) for f in log.features),
            labels=tuple(label.name for label in log.labels),
            label_kinds=tuple(label.kind for label in log.labels),
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(config.seed)
        self.module = connect(config.model(spec, **config.model_options))
        torch.set_num_threads(threads)
        self.parameters = dict(self.module.named_parameters())
        self.with_gradients = {name: value for name, value in self.parameters.items() if value.requires_grad}
        optimizers = {name.lower(): value for name, value in vars(torch.optim).items() if isinstance(value, type)}
        self.optimizer = optimizers[config.dense_optimizer.lower()](self.with_gradients.values(), **config.dense_options)

        # Of the parameters that are stepped, from the initial ones on.
        self.averages = {name: value.detach().numpy().copy() for name, value in self.with_gradients.items()}
        if config.dense_ema is None:
            self.averages = {}

    def block(self, lookups: Lookups, samples: int) -> torch.Tensor:
        """The embedding block of a slice, float32 [samples, F, Wmax]."""
        block = torch.zeros((samples, len(self.table_of), self.width))
        out = block.numpy()
        for number, table in enumerate(self.tables):
            of_table = self.table_of[lookups.feature] == number
            for place in range(lookups.place[of_table].max(initial=-1) + 1):
                chosen = of_table & (lookups.place == place)
                at = (lookups.sample[chosen], lookups.feature[chosen], slice(0, table.width))
                rows = table.weights[lookups.id[chosen]]
                out[at] = rows if place == 0 else out[at] + rows
        # One lookup of each bag with a mean.
        of_mean = (self.pooling[lookups.feature] == "mean") & (lookups.place == 0)
        bags = (lookups.sample[of_mean], lookups.feature[of_mean])
        out[bags] = out[bags] / lookups.count[of_mean].astype(np.float32)[:, None]
        return block

    def logits(self, block: torch.Tensor, dense: np.ndarray) -> torch.Tensor:
        embeddings = Embeddings({name: block[:, f, columns] for name, f, columns in self.views}, block)
        result: torch.Tensor = self.module(torch.tensor(dense), embeddings)
        return result

    def loss(self, outputs: torch.Tensor, samples: Samples) -> torch.Tensor:
        """The sum of a slice's losses."""
        labels, log = torch.tensor(samples.labels), self.config.log
        of_kind: dict[str, Callable[..., torch.Tensor]] = {
            "click": nn.functional.binary_cross_entropy_with_logits,
            "number": nn.functional.mse_loss,
        }
        if self.config.loss is not None:
            losses = self.config.loss(outputs, labels.reshape(outputs.shape))
        elif len(log.labels) == 1 and log.labels[0].kind == "click" and log.weight is None:
            return nn.functional.binary_cross_entropy_with_logits(outputs, labels[:, 0], reduction="sum")
        elif len(log.labels) == 1:
            losses = of_kind[log.labels[0].kind](outputs, labels[:, 0].clone(), reduction="none")
        else:
            terms = []
            for place, label in enumerate(log.labels):
                of_label = of_kind[label.kind](outputs[:, place].clone(), labels[:, place].clone(), reduction="none")
                terms.append(of_label * self.config.label_weights.get(label.name, 1.0))
            losses = terms[0]
            for term in terms[1:]:
                losses = losses + term
        if log.weight is not None:
            losses = losses * torch.tensor(samples.weights)
        return losses.sum()

    def row_gradients(self, lookups: Lookups, gradient: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per table the rows of a slice and their gradients in it: distinct ids ascending, float32 [ids, W]."""
        result = []
        per_lookup = gradient[lookups.sample, lookups.feature]
        mean = self.pooling[lookups.feature] == "mean"
        per_lookup[mean] = per_lookup[mean] / lookups.count[mean].astype(np.float32)[:, None]
        for number, table in enumerate(self.tables):
            of_table = self.table_of[lookups.feature] == number
            ids, groups = np.unique(lookups.id[of_table], return_inverse=True)
            result.append((ids, sum_in_order(groups, per_lookup[of_table, : table.width], len(ids))))
        return result

    def step(self, number: int, samples: Samples, slices: Sequence[Sequence[int]]) -> float:
        """Train on one step's samples; slices: per lane, their places. Returns the step's loss."""
        total_loss = 0.0
        dense_sum = {name: torch.zeros_like(value) for name, value in self.with_gradients.items()}
        # Of each slice that has samples, per table its rows and their gradients.
        lanes: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for lane, places in enumerate(slices):
            # What an empty slice contributes.
            gradients = {name: torch.zeros_like(value) for name, value in self.with_gradients.items()}
            if places:
                part = samples.take(places)
                lookups = Lookups.of(part)
                block = self.block(lookups, len(part)).requires_grad_()
                self.module.zero_grad(set_to_none=True)
                torch.manual_seed(key(self.config.seed, number, lane) >> 1)
                logits = self.logits(block, part.dense)
                loss = self.loss(logits, part) / len(samples)
                loss.backward()
                total_loss += float(loss.detach())
                gradients.update(
                    {name: value.grad.clone() for name, value in self.with_gradients.items() if value.grad is not None}
                )
                assert block.grad is not None
                lanes.append(self.row_gradients(lookups, block.grad.numpy()))
            for name, value in gradients.items():
                dense_sum[name] = value if lane == 0 else dense_sum[name] + value
        config = self.config
        if config.later is not None and number >= config.later[0]:
            config = config.later[1]
        for number_of_table, table in enumerate(self.tables):
            _, rate, *_ = config.by_table.get(config.log.tables[number_of_table].name, (config.row_optimizer, config.lr))
            table.lr = rate * (1.0 if config.lr_schedule is None else rate_factor(config.lr_schedule, number))
            table.update(*add_lanes([lane[number_of_table] for lane in lanes]), number)
        for name, value in self.with_gradients.items():
            value.grad = dense_sum[name]
        if config.dense_clip is not None:
            clip([value.grad for value in self.with_gradients.values() if value.grad is not None], config.dense_clip)
        for group in self.optimizer.param_groups:
            rate = float(str(config.dense_options["lr"]))
            group["lr"] = rate * (1.0 if config.dense_lr_schedule is None else rate_factor(config.dense_lr_schedule, number))
        self.optimizer.step()
        if config.dense_ema is not None:
            keep, take = np.float32(config.dense_ema), np.float32(1 - config.dense_ema)
            for name, value in self.with_gradients.items():
                self.averages[name] = keep * self.averages[name] + take * value.detach().numpy()
        return total_loss

    def evaluate(self, samples: Samples) -> np.ndarray:
        """Outputs for the evaluation samples, float32 [n] or [n, labels]."""
        result = []
        own = {name: self.parameters[name].data for name in self.averages}
        for name, average in self.averages.items():
            self.parameters[name].data = torch.tensor(average)
        self.module.eval()
        with torch.no_grad():
            for first in range(0, len(samples), self.config.batch_size):
                count = min(self.config.batch_size, len(samples) - first)
                for low, high in slice_bounds(count, self.config.lanes):
                    if high > low:
                        part = samples.take(np.arange(first + low, first + high))
                        result.append(self.logits(self.block(Lookups.of(part), len(part)), part.dense).numpy().copy())
        self.module.train()
        for name, value in own.items():
            self.parameters[name].data = value
        return np.concatenate(result)

    def digest(self) -> str:
        sha = hashlib.sha256(b"foreload digest 1\n")

        def add(name: str, value: torch.Tensor | float) -> None:
            array = np.asarray(value.detach().numpy() if isinstance(value, torch.Tensor) else value)
            sha.update(f"{name}\n{','.join(map(str, array.shape))}\n".encode())
            sha.update(array.astype("<f4").tobytes())

        for name in sorted(self.parameters):
            add(name, self.parameters[name])
        for name in sorted(self.parameters):
            state = dict(self.optimizer.state.get(self.parameters[name], {}))
            if name in self.averages:
                state["ema"] = self.averages[name]
            for entry in sorted(state):
                if state[entry] is not None:
                    add(f"{name}/{entry}", state[entry])
        for described, table in zip(self.config.log.tables, self.tables, strict=True):
            sha.update(f"table {described.name}\n".encode())
            for row in np.flatnonzero(table.used):
                sha.update(np.array(row, "<i8").tobytes())
                sha.update(table.weights[row].astype("<f4").tobytes())
                sha.update(table.state[row].astype("<f4").tobytes())
        return sha.hexdigest()


def add_lanes(lanes: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a step and their gradients: every lane's (distinct ids, gradients [ids, W]) added in lane order."""
    ids = np.unique(np.concatenate([lane_ids for lane_ids, _ in lanes]))
    total = np.zeros((len(ids), lanes[0][1].shape[1]), np.float32)
    begun = np.zeros(len(ids), bool)
    for lane_ids, gradients in lanes:
        at = np.searchsorted(ids, lane_ids)
        total[at] = np.where(begun[at][:, None], total[at] + gradients, gradients)
        begun[at] = True
    return ids, total


def number_metrics(predicted: np.ndarray, numbers: np.ndarray) -> dict[str, float]:
    """Of a label of numbers, in float64."""
    x, y = predicted.astype(np.float64), numbers.astype(np.float64)
    errors = x - y
    return {
        "rmse": float(np.sqrt(np.mean(errors**2))),
        "mae": float(np.mean(np.abs(errors))),
        "predicted_over_observed": float(x.sum() / y.sum()),
    }


def click_metrics(logits: np.ndarray, labels: np.ndarray, groups: np.ndarray | None) -> dict[str, float]:
    """Of a label of clicks, in float64."""
    whole = metrics(logits, labels)
    predicted = 1 / (1 + np.exp(-logits.astype(np.float64)))
    told = {name: getattr(whole, name) for name in ("log_loss", "auc", "normalized_entropy")}
    told["predicted_over_observed"] = float(predicted.sum() / labels.sum()) if labels.any() else float("nan")
    if groups is not None:
        terms = [
            (int((groups == one).sum()), metrics(logits[groups == one], labels[groups == one]).auc) for one in np.unique(groups)
        ]
        terms = [(count, value) for count, value in terms if not np.isnan(value)]
        told["grouped_auc"] = sum(count * value for count, value in terms) / sum(count for count, _ in terms)
    return told


def evaluation_of(config: Config, outputs: np.ndarray, samples: Samples) -> Evaluation:
    """The metrics of all labels, and the mean of what is trained."""
    log, told, columns = config.log, {}, outputs.reshape(samples.labels.shape)
    losses = np.zeros(len(samples))
    for place, label in enumerate(log.labels):
        column, of_label = columns[:, place], samples.labels[:, place]
        x, y = column.astype(np.float64), of_label.astype(np.float64)
        if label.kind == "number":
            told[label.name], term = number_metrics(column, of_label), (x - y) ** 2
        else:
            told[label.name] = click_metrics(column, of_label, samples.groups if log.group else None)
            term = np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))
        losses += config.label_weights.get(label.name, 1.0) * term
    if config.loss is not None:
        losses = config.loss(torch.tensor(outputs), torch.tensor(samples.labels).reshape(outputs.shape)).double().numpy()
    first = next(iter(told.values()))
    log_loss, auc, entropy = (first.get(name, float("nan")) for name in ("log_loss", "auc", "normalized_entropy"))
    return Evaluation(log_loss, auc, entropy, told, float(np.mean(losses * samples.weights)))


def metrics(logits: np.ndarray, labels: np.ndarray) -> Evaluation:
    """Log loss, AUC (ties count half) and log loss over the labels' own entropy, in float64."""
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    log_loss = float(np.mean(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))))
    positive, rate = y == 1, float(y.mean())
    ascending = np.sort(x)
    # The middle of the ranks that equal values share, from 1.
    ranks = (np.searchsorted(ascending, x, "left") + np.searchsorted(ascending, x, "right") + 1) / 2
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return Evaluation(log_loss, float("nan"), float("nan"))
    auc = (ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return Evaluation(log_loss, float(auc), float(log_loss / entropy))


def train(config: Config) -> ReferenceResult:
    """Read, train and evaluate. The caller has applied the numerics settings (foreload.trainer.compute.numerics) to the process."""
    data = load(
        config.log, config.sources, config.evaluation_sources, config.evaluation_fraction, [*config.evaluation_sets.values()]
    )
    evaluated_sets = [data.evaluation.take(np.arange(*of_set)) for of_set in data.sets]
    trainer = Trainer(config, data)
    log_losses: list[float] = []
    evaluations: list[Evaluation] = []
    logits = np.zeros(0, np.float32)
    count = len(data.training)
    placement = Placement(config.lanes, config.placement)
    slices: dict[int, list[list[int]]] = {}  # of the steps of an epoch, by their first samples
    evaluated: list[int] = []
    for epoch in range(config.epochs):
        order = np.arange(count) if config.shuffle_seed is None else shuffled(config.shuffle_seed, epoch, count)
        for first in range(0, count, config.batch_size):
            batch = data.training.take(order[first : first + config.batch_size])
            if epoch == 0 or config.shuffle_seed is not None:
                slices[first] = placement.slices(rows_of(config.log, batch))
            log_losses.append(trainer.step(len(log_losses), batch, slices[first]))
            if config.stop_after == len(log_losses) - 1:
                return ReferenceResult(trainer.digest(), log_losses, evaluations, logits, evaluated)
            place = first // config.batch_size + 1
            at_end = first + config.batch_size >= count
            if len(data.evaluation) and (at_end or (config.eval_every is not None and place % config.eval_every == 0)):
                outputs = [trainer.evaluate(of_set) for of_set in evaluated_sets]
                logits = np.concatenate(outputs)
                for name, of_set, samples in zip(config.evaluation_sets or [""], outputs, evaluated_sets, strict=True):
                    evaluations.append(replace(evaluation_of(config, of_set, samples), set=name))
                    evaluated.append(len(log_losses) - 1)
    return ReferenceResult(trainer.digest(), log_losses, evaluations, logits, evaluated)


def config_of(arguments: Sequence[str] | None) -> tuple[Config, int]:
    """The run that a command line describes, in the words of `foreload prepare` and `foreload train`; and its threads."""
    parser = argparse.ArgumentParser(description="Train in memory and print the digest and the metrics of every epoch.")
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--format", choices=("criteo", "csv", "tsv"), required=True)
    parser.add_argument("--features", type=Path, help="feature file; without one, Criteo's columns")
    parser.add_argument("--eval-source", type=Path, action="append", default=[])
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--placement", choices=("order", "locality"), default="locality")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--shuffle-seed", type=int)
    parser.add_argument("--model", default="dlrm")
    parser.add_argument("--model-options", nargs="*", default=[], metavar="K=V")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--row-optimizer", default="adagrad")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dense-optimizer", default="Adagrad")
    parser.add_argument("--dense-lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    log = read_features(given.features, "\t" if given.format == "tsv" else ",") if given.features else criteo()
    if given.format == "criteo" and not log.columns:
        plain = criteo()
        log = replace(log, columns=plain.columns, delimiter=plain.delimiter, quoting=plain.quoting)
    config = Config(
        log=log,
        sources=tuple(given.sources),
        model=load_model(given.model),
        dim=given.dim,
        batch_size=given.batch_size,
        lanes=given.lanes,
        placement=given.placement,
        epochs=given.epochs,
        seed=given.seed,
        shuffle_seed=given.shuffle_seed,
        evaluation_sources=tuple(given.eval_source),
        evaluation_fraction=given.eval_fraction,
        model_options={name: _value(text) for name, _, text in (item.partition("=") for item in given.model_options)},
        row_optimizer=given.row_optimizer,
        lr=given.lr,
        dense_optimizer=given.dense_optimizer,
        dense_options={"lr": given.dense_lr},
    )
    return config, given.threads


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    config, threads = config_of(arguments)
    numerics.set_up(threads)
    result = train(config)
    for epoch, evaluation in enumerate(result.evaluations):
        print(
            f"epoch {epoch}: log loss {evaluation.log_loss:.6f}, AUC {evaluation.auc:.6f}, normalized entropy {evaluation.normalized_entropy:.6f}"
        )
    print(f"digest {result.digest}")


if __name__ == "__main__":
    main()
