"""The memory that a hash of rows takes on a server.

The server itself is asked for the size of an entry. The size of the hash table is computed from the
way in which that kind of server grows its tables.
"""

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

KEY_BYTES = 400  # of a hash without entries, about: its key, value and table heads
# With this number of rows, neither Redis' nor Valkey's tables are growing.
_SCRATCH_ROWS = 2800
# The share of a full Redis table's buckets that hold entries. Empty buckets move at no cost.
_NOT_EMPTY = 1 - math.exp(-1)
# Valkey's: a bucket that overflows uses one of its places for the link to the next bucket.
_BUCKET_BYTES, _BUCKET_ENTRIES, _FURTHER_ENTRIES = (
    64,
    7,
    6,
)
_POINTER_BYTES = 8
_TOGETHER_BYTES = 128  # Valkey stores field and value in one piece up to this size
_SPILL_BYTES, _SHORT_SPILL_BYTES, _LONG_SPILL_BYTES = 1.2, 0.5, 1.5  # see `spill_bytes`; measured on Redis and on Valkey
# The latency histogram of a command. Redis 7 and newer, and Valkey, allocate one for each command
# that was ever used.
_HISTOGRAM_BYTES = 24_688
_COMMANDS = frozenset(b"get hget hlen hmget hset info memory|usage multi exec ping rename set unlink watch".split())


@dataclass(frozen=True, slots=True)
class Growth:
    """How a kind of server grows the tables of hashes.

    Attributes:
        buckets: if True, Valkey's tables, whose buckets hold several entries each. If False, Redis'
            tables of pointers to lists.
        steps: how many buckets an insertion moves while there are two tables. Any other command on
            a hash moves one.
    """

    buckets: bool
    steps: int

    @classmethod
    def of(cls, version: str) -> Growth:
        """Return the growth of a server's tables.

        Args:
            version: kind and version, as `server_version` returns them. Unknown kinds count as
                Redis.
        """
        kind, _, number = version.partition(" ")
        parts = tuple(int(part) for part in re.findall(r"\d+", number)[:2])
        if kind == "valkey" and parts >= (8, 1):
            return cls(True, 1)
        return cls(False, 1 if kind == "valkey" or parts >= (7, 2) else 2)

    def size(self, entries: np.ndarray) -> np.ndarray:
        """Return the number of buckets in the newest table of hashes that have grown.

        Args:
            entries: the entries of each hash, at least 1.

        Returns:
            int64, of the shape of entries.
        """
        least = -(-entries // _BUCKET_ENTRIES) if self.buckets else np.maximum(entries, 4)
        sizes: np.ndarray = 1 << np.ceil(np.log2(np.maximum(least, 1))).astype(np.int64)
        return sizes

    def moving(self, size: np.ndarray) -> np.ndarray:
        """Return how many buckets the server moves before it frees the previous table.

        Args:
            size: the buckets of the newest table.
        """
        moves: np.ndarray = size / 2 if self.buckets else _NOT_EMPTY * size / 2
        return moves

    def table_bytes(self, entries: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """Return the bytes of hashes' tables: float64.

        Args:
            entries: the entries of each hash, at least 1.
            moved: the share of the previous table that has been moved. From 1 on, that table is
                freed.
        """
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
    """Return the mean number of overflow buckets that a bucket needs.

    Args:
        load: the mean number of entries per bucket; the entries are Poisson distributed.
    """
    total = np.zeros_like(load, dtype=float)
    for entries in range(_BUCKET_ENTRIES + 1, 40):
        chance = np.exp(entries * np.log(np.maximum(load, 1e-9)) - load - math.lgamma(entries + 1))
        total += chance * -(-(entries - _BUCKET_ENTRIES) // _FURTHER_ENTRIES)
    return total


@dataclass(frozen=True, slots=True)
class HashMemory:
    """The memory that hashes of rows take on one server.

    Attributes:
        entry_bytes: bytes of a row -> bytes of its entry, without the table.
        measured: whether the server reported these sizes.
    """

    growth: Growth
    entry_bytes: Mapping[int, float]
    measured: bool

    @classmethod
    def known(cls, info: Mapping[str, str], row_bytes: Iterable[int]) -> HashMemory:
        """Compute the sizes from the server's INFO alone: kind, version and allocator."""
        growth = Growth.of(server_version(info))
        allocator = info.get("mem_allocator", "")
        entries = {size: _entry_bytes(growth, allocator, size) + spill_bytes(growth, allocator, size) for size in row_bytes}
        return cls(growth, entries, False)

    @classmethod
    def ask(cls, store: Store, shard: int, namespace: str, row_bytes: Iterable[int], info: Mapping[str, str]) -> HashMemory:
        """Measure the sizes on a server.

        A rehearsal writes some thousand rows of each size to a hash of the namespace, and deletes
        it again. Sizes that cannot be measured, because MEMORY USAGE is not permitted or there is
        no room, are computed as in `known`.
        """
        known = cls.known(info, row_bytes)
        measured = {}
        for size in known.entry_bytes:
            with contextlib.suppress(CacheError):
                bytes_there = _rehearsed(store, shard, namespace, size)
                entries = np.array([_SCRATCH_ROWS])
                entry = (bytes_there - float(known.growth.table_bytes(entries, np.ones(1))[0])) / _SCRATCH_ROWS
                # An implausible answer, of a server that counts otherwise, is ignored.
                if size < entry < 2 * size + 200:
                    measured[size] = entry + spill_bytes(known.growth, info.get("mem_allocator", ""), size)
        return cls(known.growth, {**known.entry_bytes, **measured}, len(measured) == len(known.entry_bytes))

    def fitted(self, entries: float, table_bytes: float, row_bytes: Mapping[int, float], all_bytes: float) -> HashMemory:
        """Return these sizes scaled so that existing hashes have the size that the server reports.

        Args:
            entries: the number of entries in the hashes.
            table_bytes: the bytes of their tables and keys.
            row_bytes: bytes of a row -> the share of rows of that size.
            all_bytes: the bytes that the server reports for the hashes, with tables and keys.
        """
        expected = entries * sum(share * self.entry_bytes[size] for size, share in row_bytes.items())
        factor = (all_bytes - table_bytes) / expected if expected else 1.0
        return HashMemory(self.growth, {size: factor * own for size, own in self.entry_bytes.items()}, bool(expected))


def statistics_bytes(store: Store, shard: int, info: Mapping[str, str]) -> int:
    """Return the bytes that a server will take for statistics of commands.

    These are statistics of commands that training uses and that no client has used on that server
    yet. Raises CacheError.
    """
    kind, _, number = server_version(info).partition(" ")
    if kind == "redis" and int(number.partition(".")[0] or 0) < 7:
        return 0
    answer = store.command(shard, "INFO", "commandstats")
    used = set(re.findall(rb"cmdstat_([^:]+):", answer)) if isinstance(answer, bytes) else set()
    return _HISTOGRAM_BYTES * len(_COMMANDS - used)


def _rehearsed(store: Store, shard: int, namespace: str, row_bytes: int) -> int:
    """Return the bytes of a hash of _SCRATCH_ROWS rows on a shard. Raises CacheError."""
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
    """Return the bytes of an allocation: jemalloc's size classes, else glibc's."""
    if not allocator.startswith("jemalloc"):
        return max((size + 8 + 15) // 16 * 16 - 8, 24)
    if size <= 128:
        return -(-size // 16) * 16 if size > 32 else -(-size // 8) * 8
    spacing = 1 << (math.ceil(math.log2(size)) - 3)  # four classes between powers of two
    return -(-size // spacing) * spacing


def _strings(row_bytes: int) -> tuple[int, int]:
    """Return the bytes of a field and of its value as strings.

    The field has 8 bytes and the value is a row. Each string has a header and a closing zero.
    """
    return 3 + 8 + 1, (3 if row_bytes < 252 else 5) + row_bytes + 1


def spill_bytes(growth: Growth, allocator: str, row_bytes: int) -> float:
    """Return the mean bytes that an entry takes beyond `_entry_bytes` on a busy server.

    Buffers are allocated and freed between entries. If the rest of a free piece is too small to be
    a piece of its own, glibc adds it to the allocation. A rehearsal on an idle server does not show
    this.
    """
    if allocator.startswith("jemalloc"):
        return 0.0
    if not growth.buckets:
        return _SPILL_BYTES
    return _SHORT_SPILL_BYTES if sum(_strings(row_bytes)) <= _TOGETHER_BYTES else _LONG_SPILL_BYTES


def _entry_bytes(growth: Growth, allocator: str, row_bytes: int) -> int:
    """Return the bytes of an entry of a hash: a field of 8 bytes, and a row as its value."""
    field, value = _strings(row_bytes)
    if not growth.buckets:
        return _allocated(allocator, 3 * _POINTER_BYTES) + _allocated(allocator, field) + _allocated(allocator, value)
    if field + value <= _TOGETHER_BYTES:
        return _allocated(allocator, field + value)
    return _allocated(allocator, _POINTER_BYTES + field) + _allocated(allocator, value)
