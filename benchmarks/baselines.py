"""The baselines, what a user has without this project: rows in memory, here; fetched on demand or in an LRU cache, in baselines_store. Each is as
fast as its kind can be made.

All train the same steps with the same dense module, dense optimizer and row-wise Adagrad, from the schedule's labels and dense values and
from ids as a user's data have them; none gets the index that the schedule has computed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from foreload.base.memory import zeros_in_huge_pages
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.models.spec import Embeddings
from workload import BATCH, DIM, LR, SEED, events_of

EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Setting:
    """What a baseline is made from.

    schedule: of the steps that it trains; ids: their lookups as Workload.ids has them, int64 [steps, 2,048 * 26]; first: the schedule that filled the
    store; urls: of the store's shards; slots: of an LRU cache; device: of the dense part.
    """

    schedule: Schedule
    ids: np.ndarray
    first: Schedule
    urls: Sequence[str]
    slots: int
    device: str = "cpu"

    @property
    def sizes(self) -> list[int]:
        """Rows of every table."""
        return [table.rows or 0 for table in self.schedule.header.features.tables]


class Rows(ABC):
    """Where the rows of a step come from and go to. parts: seconds that the last step's access took, by what they went to."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @abstractmethod
    def take(self, lookups: np.ndarray) -> Tensor:
        """The embeddings of a step's lookups, int64 [b * F]: a leaf [b, F, D] or what autograd can follow to leaves."""

    def leaves(self, block: Tensor) -> list[Tensor]:
        """What the loss is differentiated by, besides the dense parameters: the block itself where `take` made it a leaf."""
        return [block]

    @abstractmethod
    def give(self, gradients: Sequence[Tensor]) -> None:
        """Update the rows by the gradients of `leaves`."""


def steps(setting: Setting, dense: DenseModel, rows: Rows, skipped: int) -> Iterator[tuple[float, dict[str, float]]]:
    """Train the schedule's steps after the first `skipped`; yields each one's loss and `Rows.parts`."""
    schedule, lookups = setting.schedule, setting.ids
    names = [feature.name for feature in schedule.header.features.features]
    parts = [(("weights", DIM),)] * len(names)
    parameters = list(dense.module.parameters())
    for place, event in enumerate(events_of(schedule)):
        if place < skipped:
            continue
        lane = schedule.lane(event, 0)
        block = rows.take(lookups[place])
        values, labels = torch.empty(lane.dense.shape), torch.empty(len(lane.labels))
        values.numpy()[...], labels.numpy()[...] = lane.dense, lane.labels[:, 0]
        values, labels = values.to(setting.device), labels.to(setting.device)
        logits = dense.module(values, Embeddings.split(block, names, parts))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / BATCH
        leaves = rows.leaves(block)
        gradients = torch.autograd.grad(loss, [*leaves, *parameters])
        for parameter, gradient in zip(parameters, gradients[len(leaves) :], strict=True):
            parameter.grad = gradient
        dense.optimizer.step()
        rows.give(gradients[: len(leaves)])
        yield float(loss.detach()), rows.parts


def adagrad(weights: Tensor, state: Tensor, places: Tensor, total: Tensor) -> None:
    """Row-wise Adagrad of weights [n, D] and state [n] at distinct places by their gradients [m, D]."""
    now = state[places] + total.square().mean(1)
    state[places] = now
    weights.index_add_(0, places, total * (-LR / (now.sqrt() + EPSILON)).unsqueeze(1))


def sum_by_row(gradient: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The sums of gradient [l, D] over groups: order [l] lists the lookups group by group, counts [m] how many are in each.

    embedding_bag does it in a third of the time of index_add_.
    """
    return nn.functional.embedding_bag(order, gradient, torch.cumsum(counts, 0) - counts, mode="sum")


class Floor(Rows):
    """The dense floor: embeddings that are always there and never change, so that what remains is the dense part."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._block = torch.empty(BATCH, len(setting.sizes), DIM, device=setting.device).uniform_(-0.01, 0.01).requires_grad_()

    def take(self, lookups: np.ndarray) -> Tensor:
        return self._block

    def give(self, gradients: Sequence[Tensor]) -> None:
        pass


def _huge_zeros(count: int) -> Tensor:
    """float32 [count] in huge pages where the kernel has them, as a partition's slots are: rows are touched at random."""
    return torch.from_numpy(zeros_in_huge_pages((count,), np.float32))


def _initial_tables(setting: Setting) -> Tensor:
    """The initial weights of all tables, one after the other: [rows, D].

    Rows that no step of the schedule uses stay zeros that were never touched: nothing reads them, and it takes half a minute less.
    """
    sizes = setting.sizes
    whole = _huge_zeros(sum(sizes) * DIM).view(-1, DIM)
    used = np.zeros(len(whole), np.bool_)
    for lookups in setting.ids:
        used[lookups] = True
    base = 0
    for number, size in enumerate(sizes):
        ids = np.flatnonzero(used[base : base + size])
        weights = np.empty((len(ids), DIM), np.float32)
        initial_weights(SEED, RowLayout(number, "", size, (("weights", DIM),)), ids, weights)
        whole.numpy()[base + ids] = weights
        base += size
    return whole


class OneTable(Rows):
    """All rows in memory, in one nn.Embedding.

    Its gradient is never made a sparse tensor, since to coalesce that takes longer than all of this: lookups are sorted as int32.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._embedding = nn.Embedding.from_pretrained(_initial_tables(setting), freeze=False)
        self._state = _huge_zeros(len(self._embedding.weight))
        self._each = torch.arange(BATCH * len(setting.sizes))
        self._lookups = self._each

    def take(self, lookups: np.ndarray) -> Tensor:
        begun = time.perf_counter()
        self._lookups = torch.from_numpy(lookups.astype(np.int64))
        with torch.no_grad():
            # Bags of one lookup: the same rows as F.embedding's, sooner.
            block = nn.functional.embedding_bag(self._lookups, self._embedding.weight, self._each, mode="sum")
        self.parts = {"gather": time.perf_counter() - begun}
        return block.view(BATCH, -1, DIM).requires_grad_()

    def give(self, gradients: Sequence[Tensor]) -> None:
        begun = time.perf_counter()
        ordered, order = torch.sort(self._lookups.int())
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        total = sum_by_row(gradients[0].view(-1, DIM), order, counts)
        summed = time.perf_counter()
        adagrad(self._embedding.weight.data, self._state, rows.long(), total)
        self.parts |= {"gradient by row": summed - begun, "row update": time.perf_counter() - summed}


class Bags(Rows):
    """All rows in memory, in an nn.EmbeddingBag(sparse=True) a table; sparse gradients, coalesced."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        whole = _initial_tables(setting)
        self._bases = torch.tensor(np.cumsum([0, *setting.sizes[:-1]]))
        self._bags = [
            nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True) for table in whole.split(setting.sizes)
        ]
        self._states = list(_huge_zeros(sum(setting.sizes)).split(setting.sizes))
        self._each = torch.arange(BATCH)

    def take(self, lookups: np.ndarray) -> Tensor:
        begun = time.perf_counter()
        by_table = (torch.from_numpy(lookups.astype(np.int64)).view(BATCH, -1) - self._bases).t().contiguous()
        pooled = [bag(own, self._each) for bag, own in zip(self._bags, by_table, strict=True)]
        block = torch.stack(pooled, 1)
        self.parts = {"gather": time.perf_counter() - begun}
        return block

    def leaves(self, block: Tensor) -> list[Tensor]:
        return [bag.weight for bag in self._bags]

    def give(self, gradients: Sequence[Tensor]) -> None:
        begun = time.perf_counter()
        for bag, state, gradient in zip(self._bags, self._states, gradients, strict=True):
            whole = gradient.coalesce()
            adagrad(bag.weight.data, state, whole.indices()[0], whole.values())
        self.parts |= {"row update": time.perf_counter() - begun}
