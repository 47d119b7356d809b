"""A training of one lane whose rows are all in memory: the arithmetic is the trainer's own, so the bits are those of a run with a store.

What a restore from a checkpoint of few bits does to the model is done to the rows in place, by the code that checkpoints round weights with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numba as nb
import numpy as np
import torch
from torch import Tensor

from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.schedule.format import Arrivals, Event, LaneEvent
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources.synthetic import Generator
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.checkpoints.quantisation import decode, encode
from foreload.trainer.compute import dense_optimizers
from foreload.trainer.compute.training_loss import EvaluationSamples
from foreload.trainer.job.job import TrainJob
from foreload.trainer.saved.model_rows import ModelRows
from foreload.trainer.saved.saved_model import Digest
from foreload.trainer.step import slices
from foreload.trainer.step.slices import LocalRows

CHUNK_BATCHES = 64  # whose samples are made at once
CHUNK_ROWS = 1 << 16  # rounded at once, and of a piece of the digest


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples: labels float32 [b, 1]; dense float32 [b, 13], 0 where missing; rows int32 [b * 26], of each lookup its row among all tables'."""

    labels: np.ndarray
    dense: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class Kept:
    """A model after a step, as `MemoryTraining.keep` copies it."""

    step: int
    weights: Tensor
    state: Tensor
    used: np.ndarray
    dense: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def batches(generator: Generator, bases: np.ndarray, first: int, end: int, size: int) -> Iterator[Batch]:
    """Samples first .. end - 1 in batches, the last one as it comes. bases: int64 [26], where each column's rows begin."""
    for start in range(first, end, CHUNK_BATCHES * size):
        labels, dense, ids = generator.rows(start, min(start + CHUNK_BATCHES * size, end))
        values = np.ascontiguousarray(np.nan_to_num(dense.astype(np.float32), nan=0.0).T)
        rows = (ids + bases[:, None]).astype(np.int32).T
        for begin in range(0, len(labels), size):
            own = slice(begin, begin + size)
            yield Batch(labels[own].reshape(-1, 1), values[own], np.ascontiguousarray(rows[own]).reshape(-1))


class MemoryTraining:
    """The model of a job, trained on the features of a schedule, whose tables are each one column's, looked up by id.

    step: the last one trained; bases: int64 [tables], the first row of each table among all.
    """

    def __init__(self, job: TrainJob, schedule: Schedule) -> None:
        dense = DenseModel.build(job, schedule)
        self._parts = dense.parts(job, schedule)
        self._names = [table.name for table in schedule.header.features.tables]
        rules, sizes = self._parts.rules, [layout.rows for layout in self._parts.layouts]
        ends = np.cumsum(sizes)
        self.bases = ends - sizes
        self._bounds = np.append(self.bases, ends[-1])
        total = int(ends[-1])
        self._weights = torch.zeros((total, rules.width))
        self._state = torch.zeros((total, rules.state_width))
        self._used = np.zeros(total, bool)
        self._table = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
        for number, layout in enumerate(self._parts.layouts):
            own = self._weights.numpy()[self.bases[number] : ends[number]]
            initial_weights(job.seed, layout, np.arange(layout.rows), own)
        self._place, self._distinct = np.full(total, -1, np.int32), np.empty(total, np.int32)
        self.step = -1

    def _local(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the distinct rows of a batch's lookups, in the order of their first, int32; the place of each lookup's row among them, int32)."""
        index = np.empty(len(rows), np.int32)
        count = _distinct_rows(rows, self._place, self._distinct, index)
        return self._distinct[:count].copy(), index

    def train(self, batch: Batch) -> None:
        """A step."""
        self.step += 1
        rows, index = self._local(batch.rows)
        event = Event("train", self.step, len(batch.labels), self.step, 0, 0, self.step)
        local = LocalRows(self._weights, rows)
        gradients = slices.learn(self._parts, event, 0, _moves(batch, index), local, True)
        self._used[rows] = True
        parts = self._parts
        parts.kernels.apply(self._weights, self._state, rows, self._table[rows], gradients.rows, parts.rules)
        for parameter, gradient in zip(parts.parameters, gradients.dense, strict=True):
            parameter.grad = gradient
        dense_optimizers.step(parts.optimizer)

    def evaluate(self, samples: Iterator[Batch]) -> tuple[float, float]:
        """Log loss and AUC of samples; changes nothing."""
        evaluated = EvaluationSamples(("click",))
        self._parts.module.eval()
        with torch.no_grad():
            for batch in samples:
                rows, index = self._local(batch.rows)
                local = LocalRows(self._weights, rows)
                logits = slices.evaluate(self._parts, _moves(batch, index), local, self.step + 1)
                evaluated.add(logits.numpy(), batch.labels)
        metrics = evaluated.metrics()[0]
        assert metrics.log_loss is not None
        assert metrics.auc is not None
        return metrics.log_loss, metrics.auc

    def restore(self, bits: int) -> None:
        """Go on as from a checkpoint with weights of so many bits: those of all rows ever trained are rounded."""
        weights = self._weights.numpy()
        for first, end in pairwise(self._bounds.tolist()):
            columns = [count for _, count in self._parts.layouts[self._table[first]].parts]
            used = first + np.flatnonzero(self._used[first:end])
            for begin in range(0, len(used), CHUNK_ROWS):
                some = used[begin : begin + CHUNK_ROWS]
                weights[some, : sum(columns)] = decode(encode(weights[some, : sum(columns)], columns, bits), columns)

    def keep(self) -> Kept:
        """A copy of the model as it is now."""
        module, optimizer = self._parts.module, self._parts.optimizer
        dense = {name: value.clone() for name, value in module.state_dict().items()}
        state = dense_optimizers.optimizer_state(module, optimizer)
        return Kept(self.step, self._weights.clone(), self._state.clone(), self._used.copy(), dense, state)

    def go_back(self, kept: Kept) -> None:
        """Go on from a copy."""
        self.step = kept.step
        self._weights.copy_(kept.weights)
        self._state.copy_(kept.state)
        self._used[:] = kept.used
        self._parts.module.load_state_dict(kept.dense)
        dense_optimizers.load_optimizer_state(self._parts.module, self._parts.optimizer, kept.optimizer)

    def digest(self) -> str:
        """The fingerprint of the model (docs/definitions.md)."""
        module = self._parts.module
        state = dense_optimizers.optimizer_state(module, self._parts.optimizer)
        parameters, others = (
            {name: value.detach().numpy() for name, value in part} for part in (module.named_parameters(), state.items())
        )
        return Digest().model((parameters, others), self._names, self._rows())

    def _rows(self) -> Iterator[ModelRows]:
        for table, layout in enumerate(self._parts.layouts):
            first, end = self._bounds[table : table + 2]
            used = first + np.flatnonzero(self._used[first:end])
            for begin in range(0, len(used), CHUNK_ROWS):
                some = used[begin : begin + CHUNK_ROWS]
                weights, state = self._weights.numpy()[some], self._state.numpy()[some]
                yield ModelRows(
                    table, some - first, np.zeros(len(some), np.int32), weights[:, : layout.width], state[:, : layout.state_width]
                )


def _moves(batch: Batch, index: np.ndarray) -> LaneEvent:
    """What forward and backward read of a lane's event; nothing moves."""
    no = np.zeros(0, np.int32)
    arrivals = Arrivals(table=no, ordinal=no, id=no, tag=no, slot=no, after=no)
    return LaneEvent(
        labels=batch.labels, dense=batch.dense, index=index, offsets=None,
        numbers=no, slots=no, users=no, early=no, next_users=no, ends=no, arrivals=arrivals,
    )  # fmt: skip


@nb.njit(cache=True)
def _distinct_rows(rows: np.ndarray, place: np.ndarray, distinct: np.ndarray, index: np.ndarray) -> int:
    """Fill index, and distinct from its beginning; place is -1 for all rows before and after."""
    count = 0
    for l in range(rows.size):
        row = rows[l]
        if place[row] < 0:
            place[row] = count
            distinct[count] = row
            count += 1
        index[l] = place[row]
    for l in range(count):
        place[distinct[l]] = -1
    return count
