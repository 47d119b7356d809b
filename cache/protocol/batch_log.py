"""The log of the write-back batch that is not yet released: what a writer will change, held outside it before the first byte leaves.

It also says which batch that is, and with that which markers a store shard may have. So the record of batch n stays whole until that of n + 1 is:
a writer that dies while it writes a record leaves the one before.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from foreload.cache.errors import CacheError
from foreload.pipelines.base.files import persist

_MAGIC = 0x31474F4C4C46  # FLLOG1
_HEADER_BYTES = 64
# The words (int64) of the header; fields, old, new and held (24 bytes a shard) follow it.
_MAGIC_AT, _NUMBER, _COUNT, _ROW_BYTES, _WHOLE, _SHARDS = range(6)


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """A write-back batch: fields uint64 [n], old and new uint8 [n, row_bytes], old all zeros where nothing was stored.

    held: int64 [shards, 3], how many rows and parity rows a store shard has that lacks none: before the batch, with its parity, and with its
    rows. None in a log that an earlier version wrote.
    """

    number: int
    fields: np.ndarray
    old: np.ndarray
    new: np.ndarray
    held: np.ndarray | None = None


class BatchLog(Protocol):
    """Holds, per lane, the last write-back batch until the next replaces it; by then it is released."""

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch; on return it survives the writer."""

    def held(self, lane: int) -> LoggedBatch | None:
        """The batch held for a lane, None if there is none."""


class FileLog:
    """A BatchLog in memory-mapped files, two a lane that are used in turn, which survive the process that writes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[Path, mmap.mmap] = {}

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch. A writer that dies meanwhile leaves the batch before, and no byte of this one has left by then."""
        held = np.zeros((0, 3), np.int64) if batch.held is None else batch.held
        parts = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in (batch.fields, batch.old, batch.new, held)]
        file = self._mapped(self._path(lane, batch.number), _HEADER_BYTES + sum(part.nbytes for part in parts))
        header = np.frombuffer(file, np.int64, _HEADER_BYTES // 8)
        # What a process has stored in a mapped file stays when it is killed, in the order in which it was: a record is whole once it says so.
        header[_WHOLE] = 0
        at = _HEADER_BYTES
        for part in parts:
            np.frombuffer(file, np.uint8, part.nbytes, at)[:] = part
            at += part.nbytes
        header[:_WHOLE] = (_MAGIC, batch.number, len(batch.fields), batch.new.shape[1])
        header[_SHARDS] = len(held)
        header[_WHOLE] = 1

    def held(self, lane: int) -> LoggedBatch | None:
        """The batch held for a lane, None if there is none. Raises CacheError for a file that is not a log."""
        records = [batch for batch in (self._record(self._path(lane, turn)) for turn in range(2)) if batch is not None]
        return max(records, key=lambda batch: batch.number, default=None)

    def _record(self, path: Path) -> LoggedBatch | None:
        if not path.exists():
            return None
        data = path.read_bytes()
        header = np.frombuffer(data, np.int64, _HEADER_BYTES // 8) if len(data) >= _HEADER_BYTES else np.zeros(8, np.int64)
        if not header[_WHOLE]:
            return None
        number, count, row_bytes, shards = (int(header[place]) for place in (_NUMBER, _COUNT, _ROW_BYTES, _SHARDS))
        end = _HEADER_BYTES + count * (8 + 2 * row_bytes)
        if header[_MAGIC_AT] != _MAGIC or len(data) < end + 24 * shards:
            raise CacheError(f"{path}: is not the log of a write-back batch; it belongs to the run and cannot be made anew")
        fields = np.frombuffer(data, np.uint64, count, _HEADER_BYTES)
        rows = np.frombuffer(data, np.uint8, 2 * count * row_bytes, _HEADER_BYTES + 8 * count).reshape(2, count, row_bytes)
        held = np.frombuffer(data[end : end + 24 * shards], np.int64).reshape(shards, 3) if shards else None
        return LoggedBatch(number, fields, rows[0], rows[1], held)

    def close(self) -> None:
        """Let go of the files, which stay."""
        for file in self._maps.values():
            file.close()
        self._maps.clear()

    def _path(self, lane: int, number: int) -> Path:
        return self._directory / f"lane-{lane}-{number % 2}.log"

    def _mapped(self, path: Path, size: int) -> mmap.mmap:
        file = self._maps.get(path)
        if file is not None and len(file) >= size:
            return file
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Room beforehand: a full disk is told here, and waited for, and not later, by a signal.
            size = max(2 * size, os.fstat(descriptor).st_size)
            persist(path, lambda: os.posix_fallocate(descriptor, 0, size))
            self._maps[path] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return self._maps[path]
