"""The fields of a lane's hash that are no rows: the marker, which changes atomically with the rows, and how far rows have migrated."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.resp import MARKER, MIGRATED, hdel
from foreload.cache.client.store import COMMAND_ROWS, Command
from foreload.cache.errors import StoreError
from foreload.cache.parity.stripes import ALL_STRIPES

_AHEAD_BIT, _REBUILDING_BIT = 1 << 62, 1 << 63
_NUMBER = _AHEAD_BIT - 1
_COUNT_BITS = 40


def first_number(term: int) -> int:
    """The number with which an owner of this term begins, that of an empty batch: two owners never give one number to two contents."""
    return term << _COUNT_BITS


def term_of(number: int) -> int:
    """The term whose owner gave a batch its number."""
    return number >> _COUNT_BITS


@dataclass(frozen=True, slots=True)
class Marker:
    """Which write-back batches a store shard has: parity of all up to `parity`, data of all up to `data`, which is the same or one less.

    rebuilding: the shard does not have all of its rows yet. Without parity the two numbers are one. A number is the term of the owner that wrote
    the batch, times 2^40, plus a count; batch n follows n - 1, but for the first of an owner (`first_number`), which follows what it found.
    """

    parity: int
    data: int
    rebuilding: bool = False

    @classmethod
    def parse(cls, stored: bytes | None) -> Marker:
        """The marker that a shard answered with; None, that it has none, stands for batch 0."""
        word = 0 if stored is None else int.from_bytes(stored, "little")
        data = word & _NUMBER
        return cls(data + bool(word & _AHEAD_BIT), data, bool(word & _REBUILDING_BIT))

    def stored(self) -> bytes:
        """The marker as it is stored: data as an integer of 62 bits, whether parity is one ahead, whether the shard is being rebuilt."""
        ahead = _AHEAD_BIT if self.parity > self.data else 0
        return (self.data | ahead | (_REBUILDING_BIT if self.rebuilding else 0)).to_bytes(8, "little")

    def __str__(self) -> str:
        numbers = f"{self.data}" if self.parity == self.data else f"{self.data}, with the parity of {self.parity}"
        return numbers + (", being rebuilt" if self.rebuilding else "")


_LAYOUT = struct.Struct("<qqQQ?qq")
ALL = int(ALL_STRIPES)  # the cursor of a lane of which everything has moved


@dataclass(frozen=True, slots=True)
class Migrated:
    """The last chunk of a move that a lane's hash on a store shard has seen.

    version: of the placement moved to; term: of the owner that made the chunk, or took the lane over as it was then (begin = end); begin, end: the
    cursors (`shard_table.cursor_at`) between which the chunk's stripes lie. copied: the hash has copies of the rows that come to it, and nothing was
    deleted yet; else the chunk is done: what left it is deleted. number: of the lane's last write-back batch then; held: how many rows and parity
    rows the hash has. targets: the shards that got copies.
    """

    version: int
    term: int
    begin: int
    end: int
    copied: bool
    number: int
    held: int
    targets: tuple[int, ...] = ()

    @classmethod
    def parse(cls, stored: bytes | None) -> Migrated | None:
        """What a hash's field says; None where there is none. Raises StoreError for what is none."""
        if stored is None:
            return None
        try:
            version, term, begin, end, copied, number, held = _LAYOUT.unpack_from(stored)
        except struct.error as error:
            raise StoreError("store: what says how far a lane has moved was not written by this program's version") from error
        bits = np.unpackbits(np.frombuffer(stored[_LAYOUT.size :], np.uint8), bitorder="little")
        return cls(version, term, begin, end, copied, number, held, tuple(np.flatnonzero(bits).tolist()))

    @property
    def place(self) -> tuple[int, int]:
        """Which of two is later: an owner of a later term may have undone what one before it did."""
        return self.term, self.end

    def stored(self) -> bytes:
        """The same as it is stored."""
        mask = np.zeros(max(self.targets, default=-1) + 1, np.uint8)
        mask[list(self.targets)] = 1
        head = _LAYOUT.pack(self.version, self.term, self.begin, self.end, self.copied, self.number, self.held)
        return head + np.packbits(mask, bitorder="little").tobytes()


def deletion(key: bytes, names: np.ndarray, marker: Marker | None, migrated: Migrated) -> list[Command]:
    """The transaction that deletes fields (uint64 [n]) of a lane's hash, and records that there.

    marker: as it is, written again: a hash that was emptied meanwhile lacks it, and the answer shows it.
    """
    recorded = (MIGRATED, migrated.stored()) if marker is None else (MARKER, marker.stored(), MIGRATED, migrated.stored())
    parts = [names[first : first + COMMAND_ROWS] for first in range(0, len(names), COMMAND_ROWS)]
    deletions = [hdel(key, part) for part in parts]
    return [("MULTI",), *deletions, ("HSET", key, *recorded), ("EXEC",)]


def changed(answers: list[object]) -> tuple[int, int]:
    """How many fields such a transaction has deleted, and how many of those that record it were new, by its answers."""
    done = answers[-1]
    assert isinstance(done, list)
    return sum(int(str(one)) for one in done[:-1]), int(str(done[-1]))
