"""What a hash of rows takes of a server's memory: its entries, asked of the server itself, and its table, by how that server's tables grow."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.store import Store, Write, server_version
from foreload.cache.errors import CacheError
from foreload.cache.rows.row_bytes import fields

KEY_BYTES = 400  # of a hash without entries: its key, value and table heads, about
_SCRATCH_ROWS = 2800  # where neither Redis' tables nor Valkey's are on their way to a larger one
_NOT_EMPTY = 1 - math.exp(-1)  # the share of a full Redis table's buckets that are not empty: the empty ones move at no cost
_BUCKET_BYTES, _BUCKET_ENTRIES, _FURTHER_ENTRIES = (
    64,
    7,
    6,
)  # of Valkey's: a bucket that overflows gives a place up for the way to the next
_POINTER_BYTES = 8
_TOGETHER_BYTES = 128  # Valkey keeps field and value of up to so many in one piece
_SPILL_BYTES, _SHORT_SPILL_BYTES, _LONG_SPILL_BYTES = 1.2, 0.5, 1.5  # see `spill_bytes`; measured: Redis', Valkey's
_HISTOGRAM_BYTES = 24_688  # of how long a command takes: Redis 7 and newer, and Valkey, have one for each that was ever used
_COMMANDS = frozenset(b"exists get hget hlen hmget hset info memory|usage multi exec ping rename set unlink watch".split())


@dataclass(frozen=True, slots=True)
class Growth:
    """How a kind of server grows the tables of hashes.

    buckets: whether these are Valkey's, of several entries each; else Redis', of pointers to lists. steps: how many buckets an insertion moves while
    there are two tables; whatever else is done to a hash moves one.
    """

    buckets: bool
    steps: int

    @classmethod
    def of(cls, version: str) -> Growth:
        """Of a server's kind and version, as `server_version` returns them. Others are taken for a Redis."""
        kind, _, number = version.partition(" ")
        parts = tuple(int(part) for part in re.findall(r"\d+", number)[:2])
        if kind == "valkey" and parts >= (8, 1):
            return cls(True, 1)
        return cls(False, 1 if kind == "valkey" or parts >= (7, 2) else 2)

    def size(self, entries: np.ndarray) -> np.ndarray:
        """Buckets of the newest table of hashes that grew to so many entries, 1 or more: int64, as entries."""
        least = -(-entries // _BUCKET_ENTRIES) if self.buckets else np.maximum(entries, 4)
        sizes: np.ndarray = 1 << np.ceil(np.log2(np.maximum(least, 1))).astype(np.int64)
        return sizes

    def moving(self, size: np.ndarray) -> np.ndarray:
        """How many buckets must be moved, one after the other, before the table that was there before one of this size goes."""
        moves: np.ndarray = size / 2 if self.buckets else _NOT_EMPTY * size / 2
        return moves

    def table_bytes(self, entries: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """Tables of hashes: float64. entries: 1 or more; moved: what has been moved of the table before, 0 .. 1; from 1 on it is gone."""
        size = self.size(entries)
        two = (moved < 1) & (size > (1 if self.buckets else 4))
        if not self.buckets:
            pointers: np.ndarray = _POINTER_BYTES * (size + np.where(two, size / 2, 0.0))
            return pointers
        full, left = _further_buckets(np.array([_BUCKET_ENTRIES], float))[0], np.clip(1 - moved, 0, 1)
        further = np.where(two, left * full * size / 2 + (1 - left) * size * _further_buckets(entries / size), 0.0)
        further = np.where(two, further, size * _further_buckets(entries / size))
        buckets: np.ndarray = _BUCKET_BYTES * (size + np.where(two, size / 2, 0.0) + further)
        return buckets


def _further_buckets(load: np.ndarray) -> np.ndarray:
    """Of a bucket into which `load` entries fall on average: how many further ones it needs, on average."""
    total = np.zeros_like(load, dtype=float)
    for entries in range(_BUCKET_ENTRIES + 1, 40):
        chance = np.exp(entries * np.log(np.maximum(load, 1e-9)) - load - math.lgamma(entries + 1))
        total += chance * -(-(entries - _BUCKET_ENTRIES) // _FURTHER_ENTRIES)
    return total


@dataclass(frozen=True, slots=True)
class HashMemory:
    """What hashes of rows take on one server. entry_bytes: of an entry without its table, by the bytes of its row; measured: whether it said so."""

    growth: Growth
    entry_bytes: Mapping[int, float]
    measured: bool

    @classmethod
    def known(cls, info: Mapping[str, str], row_bytes: Iterable[int]) -> HashMemory:
        """From what INFO says of the server alone: kind, version, allocator."""
        growth = Growth.of(server_version(info))
        allocator = info.get("mem_allocator", "")
        entries = {size: _entry_bytes(growth, allocator, size) + spill_bytes(growth, allocator, size) for size in row_bytes}
        return cls(growth, entries, False)

    @classmethod
    def ask(cls, store: Store, shard: int, namespace: str, row_bytes: Iterable[int], info: Mapping[str, str]) -> HashMemory:
        """Of a server, as a rehearsal shows: some thousand rows of each size in a hash of the namespace, which is then removed.

        What it does not say (no right to MEMORY USAGE, no room) is reckoned as `known` does.
        """
        known = cls.known(info, row_bytes)
        measured = {}
        for size in known.entry_bytes:
            with contextlib.suppress(CacheError):
                bytes_there = _rehearsed(store, shard, namespace, size)
                entries = np.array([_SCRATCH_ROWS])
                entry = (bytes_there - float(known.growth.table_bytes(entries, np.ones(1))[0])) / _SCRATCH_ROWS
                # An answer that cannot be (of a server that counts otherwise) is none.
                if size < entry < 2 * size + 200:
                    measured[size] = entry + spill_bytes(known.growth, info.get("mem_allocator", ""), size)
        return cls(known.growth, {**known.entry_bytes, **measured}, len(measured) == len(known.entry_bytes))

    def fitted(self, entries: float, table_bytes: float, row_bytes: Mapping[int, float], all_bytes: float) -> HashMemory:
        """The same for hashes that are there. entries: in them; row_bytes: the share of each size among rows; all_bytes: what the server says that
        they take, their tables and keys among it, which are table_bytes.
        """
        expected = entries * sum(share * self.entry_bytes[size] for size, share in row_bytes.items())
        factor = (all_bytes - table_bytes) / expected if expected else 1.0
        return HashMemory(self.growth, {size: factor * own for size, own in self.entry_bytes.items()}, bool(expected))


def statistics_bytes(store: Store, shard: int, info: Mapping[str, str]) -> int:
    """What a server will take for its statistics of the commands that training uses, and that nobody has used there yet. Raises CacheError."""
    kind, _, number = server_version(info).partition(" ")
    if kind == "redis" and int(number.partition(".")[0] or 0) < 7:
        return 0
    answer = store.command(shard, "INFO", "commandstats")
    used = set(re.findall(rb"cmdstat_([^:]+):", answer)) if isinstance(answer, bytes) else set()
    return _HISTOGRAM_BYTES * len(_COMMANDS - used)


def _rehearsed(store: Store, shard: int, namespace: str, row_bytes: int) -> int:
    """Bytes of a hash of _SCRATCH_ROWS rows on a shard. Raises CacheError."""
    key = b"{%b:rehearsal}:%d" % (namespace.encode(), os.getpid())
    half = _SCRATCH_ROWS // 2
    rows = np.zeros((half, row_bytes), np.uint8)
    try:
        for first in (0, half):
            store.exchange([], [Write(shard, key, fields(0, np.arange(first, first + half)), rows)])
        answer = store.command(shard, "MEMORY", "USAGE", key, "SAMPLES", 0)
    finally:
        store.command(shard, "UNLINK", key)
    return answer if isinstance(answer, int) else 0


def _allocated(allocator: str, size: int) -> int:
    """Bytes of an allocation: jemalloc's size classes, or else glibc's."""
    if not allocator.startswith("jemalloc"):
        return max((size + 8 + 15) // 16 * 16 - 8, 24)
    if size <= 128:
        return -(-size // 16) * 16 if size > 32 else -(-size // 8) * 8
    spacing = 1 << (math.ceil(math.log2(size)) - 3)  # four classes between powers of two
    return -(-size // spacing) * spacing


def _strings(row_bytes: int) -> tuple[int, int]:
    """Bytes of a field and of its value as strings: 8 and a row, each with its head and a closing zero."""
    return 3 + 8 + 1, (3 if row_bytes < 252 else 5) + row_bytes + 1


def spill_bytes(growth: Growth, allocator: str, row_bytes: int) -> float:
    """What an entry takes beyond `_entry_bytes`, on average, while buffers come and go between entries: glibc gives what is left of a piece along
    with an allocation where it is too small to be one of its own. A rehearsal on a server at rest does not show it.
    """
    if allocator.startswith("jemalloc"):
        return 0.0
    if not growth.buckets:
        return _SPILL_BYTES
    return _SHORT_SPILL_BYTES if sum(_strings(row_bytes)) <= _TOGETHER_BYTES else _LONG_SPILL_BYTES


def _entry_bytes(growth: Growth, allocator: str, row_bytes: int) -> int:
    """An entry of a hash: field of 8 bytes and value."""
    field, value = _strings(row_bytes)
    if not growth.buckets:
        return _allocated(allocator, 3 * _POINTER_BYTES) + _allocated(allocator, field) + _allocated(allocator, value)
    if field + value <= _TOGETHER_BYTES:
        return _allocated(allocator, field + value)
    return _allocated(allocator, _POINTER_BYTES + field) + _allocated(allocator, value)
