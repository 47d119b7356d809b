"""The log of the write-back batch that is not yet released: what a writer will change, held outside it before the first byte leaves.

It also says which batch that is, and which came before, and with that which markers a store shard may have. So the record of batch n stays whole
until the next one's is: a writer that dies while it writes a record leaves the one before. Each term has files of its own, so an owner that does
not know yet that it is none any more changes no record of its successor's.
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from foreload.base.compiled import nb
from foreload.base.files import persist
from foreload.base.hashing import mix
from foreload.cache.errors import CacheError
from foreload.cache.protocol.shards.marker import term_of

_MAGIC = 0x32474F4C4C46  # FLLOG2
_FIRST_MAGIC = 0x31474F4C4C46  # FLLOG1: of earlier versions, which wrote neither the number before nor a checksum
_HEADER_BYTES = 64
# The words (int64) of the header; fields, old, new and held (24 bytes a shard) follow it.
_MAGIC_AT, _NUMBER, _COUNT, _ROW_BYTES, _WHOLE, _SHARDS, _BEFORE, _CHECKSUM = range(8)
_SUMMED = [_MAGIC_AT, _NUMBER, _COUNT, _ROW_BYTES, _SHARDS, _BEFORE]
_NAME = re.compile(r"lane-\d+-(?:term-(\d+)-)?[01]\.log")
_PRIME = np.uint64(0x9E3779B185EBCA87)
_SEEDS = tuple(np.uint64(seed) for seed in (0x60EA27EEADC0B5D6, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5))


@nb.njit(nogil=True, cache=True)
def _checksum(words, tail):  # type: ignore[no-untyped-def]
    """A checksum of words uint64 [n] and of tail uint8 [m]. Four at a time, so that it runs as fast as memory does."""
    a, b, c, d = _SEEDS
    whole = words.size // 4 * 4
    for i in range(0, whole, 4):
        a = (a ^ words[i]) * _PRIME
        b = (b ^ words[i + 1]) * _PRIME
        c = (c ^ words[i + 2]) * _PRIME
        d = (d ^ words[i + 3]) * _PRIME
    for i in range(whole, words.size):
        a = (a ^ words[i]) * _PRIME
    for i in range(tail.size):
        b = (b ^ np.uint64(tail[i])) * _PRIME
    return mix(mix(mix(mix(a) ^ b) ^ c) ^ d)


def checksum(header: np.ndarray, content: np.ndarray) -> np.int64:
    """The checksum of a record: header int64 [8], content uint8 [n], 8-byte-aligned."""
    whole = len(content) // 8 * 8
    of_content = _checksum(content[:whole].view(np.uint64), content[whole:])
    words = np.append(header[_SUMMED].view(np.uint64), np.uint64(of_content))
    return np.uint64(_checksum(words, content[:0])).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """A write-back batch: fields uint64 [n], old and new uint8 [n, row_bytes], old all zeros where nothing was stored.

    held: int64 [shards, 3], how many rows and parity rows a store shard has that lacks none: before the batch, with its parity, and with its
    rows. None in a log that an earlier version wrote. previous: the number of the batch before; None stands for number - 1.
    """

    number: int
    fields: np.ndarray
    old: np.ndarray
    new: np.ndarray
    held: np.ndarray | None = None
    previous: int | None = None

    @classmethod
    def empty(cls, number: int, previous: int, held: np.ndarray | None) -> LoggedBatch:
        """A batch of no rows, with which an owner begins. held: int64 [shards], what the shards have before it, and after."""
        rows = np.empty((0, 4), np.uint8)
        return cls(number, np.empty(0, np.uint64), rows, rows, None if held is None else np.stack([held] * 3, axis=1), previous)

    @property
    def before(self) -> int:
        """The number of the batch before."""
        return self.number - 1 if self.previous is None else self.previous


def _number(path: Path) -> int | None:
    """The number of the record in a file, None if it is not whole."""
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(_HEADER_BYTES).ljust(_HEADER_BYTES, b"\0"), np.int64)
    return int(header[_NUMBER]) if header[_WHOLE] else None


class BatchLog(Protocol):
    """Holds, per lane, the last write-back batch until the next replaces it; by then it is released."""

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch of an owner of the term that its number names; on return it survives the writer."""

    def held(self, lane: int) -> LoggedBatch | None:
        """The batch that is held for a lane: of the highest term that has any, the last; None if there is none."""

    def adopt(self, lane: int, term: int) -> LoggedBatch | None:
        """`held`, and hold it on behalf of an owner of this term: what owners before log from now on counts no more."""


class FileLog:
    """A BatchLog in memory-mapped files, two a lane and term that are used in turn, which survive the process that writes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[Path, mmap.mmap] = {}
        self._begun: set[tuple[int, int]] = set()  # lanes and terms that this one has held a batch of

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch. A writer that dies meanwhile leaves the batch before, and no byte of this one has left by then."""
        self._hold(lane, batch, term_of(batch.number))

    def _hold(self, lane: int, batch: LoggedBatch, term: int) -> None:
        held = np.zeros((0, 3), np.int64) if batch.held is None else batch.held
        parts = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in (batch.fields, batch.old, batch.new, held)]
        file = self._mapped(self._turn(lane, term), _HEADER_BYTES + sum(part.nbytes for part in parts))
        header = np.frombuffer(file, np.int64, _HEADER_BYTES // 8)
        # What a process has stored in a mapped file stays when it is killed, in the order in which it was: a record is whole once it says so. (Not
        # so when the host loses power: then the checksum shows it.)
        header[_WHOLE] = 0
        at = _HEADER_BYTES
        for part in parts:
            np.frombuffer(file, np.uint8, part.nbytes, at)[:] = part
            at += part.nbytes
        header[:_WHOLE] = (_MAGIC, batch.number, len(batch.fields), batch.new.shape[1])
        header[_SHARDS], header[_BEFORE] = len(held), batch.before
        header[_CHECKSUM] = checksum(header, np.frombuffer(file, np.uint8, at - _HEADER_BYTES, _HEADER_BYTES))
        header[_WHOLE] = 1
        if (lane, term) not in self._begun:
            self._begun.add((lane, term))
            for earlier, path in self._files(lane):
                if earlier < term:
                    path.unlink(missing_ok=True)  # no record there will count again

    def held(self, lane: int) -> LoggedBatch | None:
        """The newest whole record of a lane, of the highest term that has one; None if there is none. Raises CacheError for a file that is no log."""
        return self._held(lane)[1]

    def adopt(self, lane: int, term: int) -> LoggedBatch | None:
        """`held`, of which the files of this term then have a copy."""
        found, record = self._held(lane)
        if record is not None and found < term:
            self._hold(lane, record, term)
        return record

    def _held(self, lane: int) -> tuple[int, LoggedBatch | None]:
        """The term in whose files it is, and the record."""
        while True:
            try:
                places = [(term, number, path) for term, path in self._files(lane) if (number := _number(path)) is not None]
                for term, _, path in sorted(places, reverse=True):
                    record = self._record(path)
                    if record is not None:
                        return term, record
                return 0, None
            except FileNotFoundError:
                continue  # of a term that has just passed: there is a later one

    def _files(self, lane: int) -> list[tuple[int, Path]]:
        """All files of a lane, with their terms."""
        named = ((_NAME.fullmatch(path.name), path) for path in self._directory.glob(f"lane-{lane}-*.log"))
        return [(int(name[1] or 0), path) for name, path in named if name is not None]

    def _record(self, path: Path) -> LoggedBatch | None:
        # An array that may be written, as those that are summed when a record is held: `_checksum` is compiled for these.
        data = np.fromfile(path, np.uint8)
        header = np.frombuffer(data, np.int64, _HEADER_BYTES // 8)
        number, count, row_bytes, shards = (int(header[place]) for place in (_NUMBER, _COUNT, _ROW_BYTES, _SHARDS))
        end = _HEADER_BYTES + count * (8 + 2 * row_bytes)
        if header[_MAGIC_AT] not in (_MAGIC, _FIRST_MAGIC) or len(data) < end + 24 * shards:
            raise CacheError(f"{path}: is not the log of a write-back batch; it belongs to the run and cannot be made anew")
        previous = None
        if header[_MAGIC_AT] == _MAGIC:
            if header[_CHECKSUM] != checksum(
                header, np.frombuffer(data, np.uint8, end + 24 * shards - _HEADER_BYTES, _HEADER_BYTES)
            ):
                return None
            previous = int(header[_BEFORE])
        fields = np.frombuffer(data, np.uint64, count, _HEADER_BYTES)
        rows = np.frombuffer(data, np.uint8, 2 * count * row_bytes, _HEADER_BYTES + 8 * count).reshape(2, count, row_bytes)
        held = np.frombuffer(data[end : end + 24 * shards], np.int64).reshape(shards, 3) if shards else None
        return LoggedBatch(number, fields, rows[0], rows[1], held, previous)

    def close(self) -> None:
        """Let go of the files, which stay."""
        for file in self._maps.values():
            file.close()
        self._maps.clear()

    def _turn(self, lane: int, term: int) -> Path:
        """The file whose turn it is: not that of the record that counts."""
        paths = [self._directory / f"lane-{lane}-term-{term}-{turn}.log" for turn in range(2)]
        numbers = []
        for path in paths:
            number, file = None, self._maps.get(path)
            if file is not None:
                header = np.frombuffer(file, np.int64, _HEADER_BYTES // 8)
                number = int(header[_NUMBER]) if header[_WHOLE] else None
            elif path.exists() and _number(path) is not None and (record := self._record(path)) is not None:
                # An owner before this one left it, who may have died with its host: what is not what was written does not count.
                number = record.number
            numbers.append(-1 if number is None else number)
        return paths[0] if numbers[0] <= numbers[1] else paths[1]

    def _mapped(self, path: Path, size: int) -> mmap.mmap:
        file = self._maps.get(path)
        if file is not None and len(file) >= size:
            return file
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Room beforehand: a full disk is noticed here, and waited for, and not later, by a signal.
            size = max(2 * size, os.fstat(descriptor).st_size)
            persist(path, lambda: os.posix_fallocate(descriptor, 0, size))
            self._maps[path] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return self._maps[path]
