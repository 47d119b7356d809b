"""The baselines whose rows live in Redis: fetched and written each step, or kept in an LRU cache (baselines.py has what all train)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import numba as nb
import numpy as np
import redis
import torch
from torch import Tensor, nn

from baselines import EPSILON, Rows, Setting, adagrad, sum_by_row
from caches import LruCache
from foreload.cache.client.store import COMMAND_ROWS, Read, Store, Write
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import shards_of
from foreload.cache.protocol.shards.namespace import lane_key
from foreload.cache.rows.row_bytes import decode_rows, encode_rows, fields
from workload import BATCH, DIM, LR, NAMESPACE, SHARDS

_KEYS_A_COMMAND = 2048


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
        total = sum_by_row(gradients[0].view(-1, DIM), order, counts)
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


class OnDemandByShard(OnDemand):
    """`OnDemand` with redis-py's clients used as its documentation says: a pipeline per shard, one shard after the other."""

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
    """Rows in a cache of as many slots, from which the least recently used leave, over this project's own store client.

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
            self._shard[numbers] = shards_of(placement, 0, batch["table"], batch["ordinal"])
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
        total = sum_by_row(gradients[0].view(-1, DIM), torch.from_numpy(order), torch.from_numpy(counts))
        summed = time.perf_counter()
        adagrad(self._weights, self._state.view(-1), torch.from_numpy(self._slots.astype(np.int64)), total)
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
