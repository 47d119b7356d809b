"""The plain trainer's model and rows: a step on a global batch, outputs for evaluation, and the digest."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from reference_config import Config
from reference_data import Data, Samples, key, slice_bounds
from reference_rates import rate_factor
from reference_sums import add_lanes, clip, sum_in_order
from reference_tables import Table
from torch import nn

from foreload.trainer.models.layers import connect
from foreload.trainer.models.spec import Embeddings, ModelSpec


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
        ids = np.concatenate([np.empty(0, np.int64), *bags])
        # Without features there are no bags.
        return cls(bag // max(features, 1), bag % max(features, 1), place, counts[bag], ids)


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
            name, lr, options = (*optimizer, {})[:3]
            initial = config.initial_by_table.get(described.name, described.initial or config.row_initial)
            penalties = config.penalties_by_table.get(described.name, config.penalties)
            self.tables.append(Table(rows, [dimension, *further.values()], name, lr, options, initial, penalties))
        for number, table in enumerate(self.tables):
            features = [f for f, feature in enumerate(log.features) if feature.table == number]
            bags = [sample[f] for samples in (data.training, data.evaluation) for sample in samples.bags for f in features]
            table.initialise(config.seed, number, np.unique(np.concatenate(bags)))

        self.table_of = np.array([feature.table for feature in log.features])
        self.pooling = np.array([feature.pooling for feature in log.features])
        self.width = max((table.width for table in self.tables), default=0)
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
        random.seed(config.seed)
        np.random.mtrand._rand.seed(config.seed % 2**32)
        self.module = connect(config.model(spec, **config.model_options))
        self.takes_step = "step" in inspect.signature(self.module.forward).parameters
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

    def forward(self, block: torch.Tensor, dense: np.ndarray, steps_done: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs, and the module's own loss of each sample, if it has one."""
        embeddings = Embeddings({name: block[:, f, columns] for name, f, columns in self.views}, block)
        given = {"step": steps_done} if self.takes_step else {}
        result = self.module(torch.tensor(dense), embeddings, **given)
        return result if isinstance(result, tuple) else (result, None)

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
                logits, own = self.forward(block, part.dense, number)
                loss = self.loss(logits, part)
                if own is not None:
                    loss = loss + own.sum()
                loss = loss / len(samples)
                penalty: Callable[[], torch.Tensor] | None = getattr(self.module, "penalty", None)
                if not lanes and penalty is not None:
                    loss = loss + penalty()
                loss.backward()
                total_loss += float(loss.detach())
                gradients.update(
                    {name: value.grad.clone() for name, value in self.with_gradients.items() if value.grad is not None}
                )
                of_block = torch.zeros_like(block) if block.grad is None else block.grad
                lanes.append(self.row_gradients(lookups, of_block.numpy()))
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

    def evaluate(self, samples: Samples, steps_done: int) -> np.ndarray:
        """Outputs for the evaluation samples after so many training steps, float32 [n] or [n, labels]."""
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
                        result.append(self.in_tiles(part, steps_done))
        self.module.train()
        for name, value in own.items():
            self.parameters[name].data = value
        return np.concatenate(result)

    def in_tiles(self, samples: Samples, steps_done: int) -> np.ndarray:
        """Outputs of a slice, 256 samples at a time; the last one stands in for what is missing to that. A model that mixes samples gets all."""
        whole = getattr(type(self.module), "mixes_samples", False)
        size = len(samples) if whole else 256
        result = []
        for first in range(0, len(samples), size):
            last = min(first + size, len(samples)) - 1
            part = samples.take(np.minimum(np.arange(first, first + size), last))
            outputs, _ = self.forward(self.block(Lookups.of(part), len(part)), part.dense, steps_done)
            result.append(outputs.numpy()[: last + 1 - first].copy())
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
