"""What a user has without this project: rows in memory, fetched on demand, or in an LRU cache. Each as fast as its kind can be made.

All train the same steps with the same dense module, dense optimizer and row-wise Adagrad, from the schedule's labels and dense values and
from ids as a user's data have them; none gets the index that the schedule has computed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numba as nb
import numpy as np
import redis
import torch
from torch import Tensor, nn

from caches import LruCache
from foreload.cache.client.store import (
    COMMAND_ROWS,
    Read,
    Store,
    Write,
)
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.namespace import lane_key
from foreload.cache.rows.fields import fields
from foreload.cache.rows.initial import initial_weights
from foreload.cache.rows.layout import decode_rows, encode_rows
from foreload.pipelines.base.memory import zeros_in_huge_pages
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.models.spec import Embeddings
from foreload.trainer.run.assembly import DenseModel
from workload import BATCH, DIM, LR, NAMESPACE, SEED, SHARDS, events_of

EPSILON = 1e-8
_KEYS_A_COMMAND = 2048


@dataclass(frozen=True, slots=True)
class Setting:
    """What a baseline is made from: the schedule of its steps and their ids, the one that filled the store, its URLs, slots of a cache."""

    schedule: Schedule
    ids: np.ndarray
    first: Schedule
    urls: Sequence[str]
    slots: int

    @property
    def sizes(self) -> list[int]:
        """Rows of every table."""
        return [table.rows or 0 for table in self.schedule.header.features.tables]


class Rows(ABC):
    """Where the rows of a step come from and go to. parts: what the last step's access took, in seconds, by name."""

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
    """Train the schedule's steps after the first `skipped`: each one's loss, and what its access to rows took."""
    schedule, lookups = setting.schedule, setting.ids
    names = [feature.name for feature in schedule.header.features.features]
    parts = [(("weights", DIM),)] * len(names)
    parameters = list(dense.module.parameters())
    for place, event in enumerate(events_of(schedule)):
        if place < skipped:
            continue
        lane = schedule.lane(event, 0)
        block = rows.take(lookups[place])
        values, labels = torch.empty(lane.dense.shape), torch.empty(lane.labels.shape)
        values.numpy()[...], labels.numpy()[...] = lane.dense, lane.labels
        logits = dense.module(values, Embeddings.split(block, names, parts))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / BATCH
        leaves = rows.leaves(block)
        gradients = torch.autograd.grad(loss, [*leaves, *parameters])
        for parameter, gradient in zip(parameters, gradients[len(leaves) :], strict=True):
            parameter.grad = gradient
        dense.optimizer.step()
        rows.give(gradients[: len(leaves)])
        yield float(loss.detach()), rows.parts


def _adagrad(weights: Tensor, state: Tensor, places: Tensor, total: Tensor) -> None:
    """Row-wise Adagrad of weights [n, D] and state [n] at distinct places by their gradients [m, D]."""
    now = state[places] + total.square().mean(1)
    state[places] = now
    weights.index_add_(0, places, total * (-LR / (now.sqrt() + EPSILON)).unsqueeze(1))


def _sum_by_row(gradient: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The sums of gradient [l, D] over groups: order [l] lists the lookups group by group, counts [m] how many are in each.

    embedding_bag does it in a third of the time of index_add_.
    """
    return nn.functional.embedding_bag(order, gradient, torch.cumsum(counts, 0) - counts, mode="sum")


class Floor(Rows):
    """Embeddings that are always there: what remains is the dense part."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._block = torch.empty(BATCH, len(setting.sizes), DIM).uniform_(-0.01, 0.01).requires_grad_()

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
        initial_weights(SEED, number, ids, np.float32(1 / np.sqrt(size)), weights, DIM)
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
        total = _sum_by_row(gradients[0].view(-1, DIM), order, counts)
        summed = time.perf_counter()
        _adagrad(self._embedding.weight.data, self._state, rows.long(), total)
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
            _adagrad(bag.weight.data, state, whole.indices()[0], whole.values())
        self.parts |= {"row update": time.perf_counter() - begun}


class OnDemand(Rows):
    """Rows in Redis, fetched and written each step: one key a row, MGET and MSET by redis-py and hiredis.

    Commands are pipelined over all shards at once, for which redis-py's connections are used as they are. A row is 132 bytes: weights and
    state.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._paths = [url.removeprefix("unix://") for url in setting.urls]
        self._connections = [redis.UnixDomainSocketConnection(path=path) for path in self._paths]
        self._keys: list[list[bytes]] = []
        self._order = np.empty(0, np.int64)
        self._rows = torch.empty(0)
        self._index = torch.empty(0)

    def take(self, lookups: np.ndarray) -> Tensor:
        begun = time.perf_counter()
        numbers, index = np.unique(lookups, return_inverse=True)
        shard = numbers % SHARDS
        self._order = np.argsort(shard, kind="stable")
        names = numbers[self._order].astype(">i8").tobytes()
        ends = np.cumsum(np.bincount(shard, minlength=SHARDS)).tolist()
        self._keys = []
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            self._keys.append([names[place : place + 8] for place in range(8 * start, 8 * end, 8)])
        asked = time.perf_counter()
        fetched = np.frombuffer(b"".join(self._mget()), np.float32).reshape(-1, DIM + 1)
        answered = time.perf_counter()
        rows = np.empty_like(fetched)
        rows[self._order] = fetched
        self._rows, self._index = torch.from_numpy(rows), torch.from_numpy(index)
        block = self._rows[:, :DIM].index_select(0, self._index).view(BATCH, -1, DIM).requires_grad_()
        self.parts = {
            "gather": asked - begun + time.perf_counter() - answered,
            "waiting for rows": answered - asked,
        }
        return block

    def give(self, gradients: Sequence[Tensor]) -> None:
        begun = time.perf_counter()
        ordered, order = torch.sort(self._index.int())
        counts = torch.unique_consecutive(ordered, return_counts=True)[1]
        total = _sum_by_row(gradients[0].view(-1, DIM), order, counts)
        summed = time.perf_counter()
        state = self._rows[:, DIM].add_(total.square().mean(1))
        self._rows[:, :DIM].addcmul_(total, (state.sqrt() + EPSILON).reciprocal().unsqueeze(1), value=-LR)
        updated = time.perf_counter()
        width = 4 * (DIM + 1)
        values = self._rows.numpy()[self._order].tobytes()
        self._mset(iter([values[place : place + width] for place in range(0, len(values), width)]))
        self.parts["gradient by row"] = summed - begun
        self.parts["row update"] = updated - summed
        self.parts["waiting for rows"] += time.perf_counter() - updated

    def _commands(self) -> Iterator[tuple[int, list[bytes]]]:
        """Shard and keys of every command."""
        for shard, keys in enumerate(self._keys):
            for start in range(0, len(keys), _KEYS_A_COMMAND):
                yield shard, keys[start : start + _KEYS_A_COMMAND]

    def _mget(self) -> list[bytes]:
        for shard, keys in self._commands():
            self._connections[shard].send_command("MGET", *keys)
        values: list[bytes] = []
        for shard, _ in self._commands():
            values += self._connections[shard].read_response(disable_decoding=True)
        return values

    def _mset(self, values: Iterator[bytes]) -> None:
        for shard, keys in self._commands():
            words = [word for key in keys for word in (key, next(values))]
            self._connections[shard].send_command("MSET", *words)
        for shard, _ in self._commands():
            self._connections[shard].read_response()


class OnDemandInTurn(OnDemand):
    """The same with redis-py's clients as its documentation has them: a pipeline a shard, one shard after the other."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._clients = [redis.Redis(unix_socket_path=path) for path in self._paths]

    def _mget(self) -> list[bytes]:
        values: list[bytes] = []
        for shard, client in enumerate(self._clients):
            pipeline = client.pipeline(transaction=False)
            for of, keys in self._commands():
                if of == shard:
                    pipeline.mget(keys)
            for some in pipeline.execute():
                values += some
        return values

    def _mset(self, values: Iterator[bytes]) -> None:
        for shard, client in enumerate(self._clients):
            pipeline = client.pipeline(transaction=False)
            for of, keys in self._commands():
                if of == shard:
                    pipeline.mset({key: next(values) for key in keys})
            pipeline.execute()


class Lru(Rows):
    """Rows in a cache of the same slots, the least recently used given up, over this project's own store client.

    Nothing is known ahead: what is missing is fetched, and what had to leave for it written, while the step waits. Slots and ordinals are
    found by direct address.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        sizes = setting.sizes
        bases = np.cumsum([0, *sizes])
        self._lru = LruCache(setting.slots, int(bases[-1]))
        self._names = np.zeros(bases[-1], np.uint64)
        self._shard = np.zeros(bases[-1], np.int8)
        placement = Placement.spread(len(setting.urls))
        for batch in setting.first.rows():
            numbers = bases[batch["table"]] + batch["id"]
            self._names[numbers] = fields(batch["table"], batch["ordinal"])
            self._shard[numbers] = placement.shards(0, batch["table"], batch["ordinal"])
        self._table_of = np.repeat(np.arange(len(sizes), dtype=np.int8), sizes)
        self._bases = bases
        self._key = lane_key(NAMESPACE, 0, 0)
        self._store = Store(setting.urls, timedelta(seconds=60))
        self._weights, self._state = torch.zeros(setting.slots, DIM), torch.zeros(setting.slots, 1)
        self._each = torch.arange(BATCH * len(sizes))
        self._step = setting.schedule.header.first_step
        self._slots, self._index = np.empty(0, np.int32), np.empty(0, np.int32)

    def take(self, lookups: np.ndarray) -> Tensor:
        begun = time.perf_counter()
        lookup = self._lru.step(np.ascontiguousarray(lookups))
        looked_up = time.perf_counter()
        targets = lookup.slots[lookup.missing]
        left = lookup.evicted >= 0
        writes = self._writes(lookup.evicted[left], targets[left])
        reads = self._reads(lookup.rows[lookup.missing])
        self._store.exchange([read for read, _ in reads], writes)
        weights, state = self._weights.numpy(), self._state.numpy()
        for read, places in reads:
            count = len(places)
            own, own_state = np.empty((count, DIM), np.float32), np.empty((count, 1), np.float32)
            decode_rows(read.rows, DIM, 1, own, own_state, np.empty(count, np.int64), np.empty(count, np.int32))
            weights[targets[places]], state[targets[places]] = own, own_state
        exchanged = time.perf_counter()
        self._slots, self._index = lookup.slots, lookup.index
        by_lookup = torch.from_numpy(lookup.slots[lookup.index].astype(np.int64))
        block = nn.functional.embedding_bag(by_lookup, self._weights, self._each, mode="sum").view(BATCH, -1, DIM)
        self.parts = {
            "gather": looked_up - begun + time.perf_counter() - exchanged,
            "waiting for rows": exchanged - looked_up,
        }
        return block.requires_grad_()

    def _writes(self, numbers: np.ndarray, slots: np.ndarray) -> list[Write]:
        rows = np.empty((len(numbers), 4 * (DIM + 1) + 12), np.uint8)
        ids = numbers - self._bases[self._table_of[numbers]]
        tags = np.full(len(numbers), self._step, np.int32)
        encode_rows(self._weights.numpy()[slots], self._state.numpy()[slots], ids, tags, DIM, 1, rows)
        writes = []
        for shard, places in self._by_shard(numbers):
            for start in range(0, len(places), COMMAND_ROWS):
                some = places[start : start + COMMAND_ROWS]
                writes.append(Write(shard, self._key, self._names[numbers[some]], rows[some]))
        return writes

    def _reads(self, numbers: np.ndarray) -> list[tuple[Read, np.ndarray]]:
        return [
            (Read(shard, self._key, self._names[numbers[places]], np.empty((len(places), 4 * (DIM + 1) + 12), np.uint8)), places)
            for shard, places in self._by_shard(numbers)
        ]

    def _by_shard(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        shards = self._shard[numbers]
        for shard in range(self._store.shards):
            places = np.flatnonzero(shards == shard)
            if len(places):
                yield shard, places

    def give(self, gradients: Sequence[Tensor]) -> None:
        begun = time.perf_counter()
        order, counts = np.empty(len(self._index), np.int64), np.zeros(len(self._slots), np.int64)
        _group(self._index, order, counts)
        total = _sum_by_row(gradients[0].view(-1, DIM), torch.from_numpy(order), torch.from_numpy(counts))
        summed = time.perf_counter()
        _adagrad(self._weights, self._state.view(-1), torch.from_numpy(self._slots.astype(np.int64)), total)
        self._step += 1
        self.parts |= {"gradient by row": summed - begun, "row update": time.perf_counter() - summed}


@nb.njit(nogil=True, cache=True)
def _group(index: np.ndarray, order: np.ndarray, counts: np.ndarray) -> None:
    """List the lookups by the row that they look up, in their order: a counting sort. counts: int64 [rows], zero before."""
    for l in range(index.size):
        counts[index[l]] += 1
    start = np.cumsum(counts) - counts
    for l in range(index.size):
        order[start[index[l]]] = l
        start[index[l]] += 1
