"""The fields of a lane's hash that are not rows: the marker and the migration record.

The marker changes atomically with the rows. The migration record says how far the lane's rows have
migrated.
"""

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
    """Return the number of an owner's first batch, which is empty.

    Numbers contain the term, so two owners never give the same number to different batches.
    """
    return term << _COUNT_BITS


def term_of(number: int) -> int:
    """Return the term of the owner that numbered a batch."""
    return number >> _COUNT_BITS


@dataclass(frozen=True, slots=True)
class Marker:
    """The write-back batches that a store shard has.

    A number is the term of the owner that wrote the batch, times 2^40, plus a count. Batch n
    follows n - 1, except for an owner's first batch (`first_number`), which follows the last batch
    that the owner found. Without parity the two numbers are equal.

    Attributes:
        parity: The shard has the parity rows of all batches up to this one.
        data: The shard has the rows of all batches up to this one, which is `parity` or the batch
            before.
        rebuilding: Whether the shard does not have all of its rows yet.
    """

    parity: int
    data: int
    rebuilding: bool = False

    @classmethod
    def parse(cls, stored: bytes | None) -> Marker:
        """Parse a shard's answer.

        If it is None, the shard has no marker, which stands for batch 0.
        """
        word = 0 if stored is None else int.from_bytes(stored, "little")
        data = word & _NUMBER
        return cls(data + bool(word & _AHEAD_BIT), data, bool(word & _REBUILDING_BIT))

    def stored(self) -> bytes:
        """Encode the marker in 8 bytes, little-endian.

        The lower 62 bits are `data`. Bit 62 says that parity is one batch ahead, bit 63 that the
        shard is being rebuilt.
        """
        ahead = _AHEAD_BIT if self.parity > self.data else 0
        return (self.data | ahead | (_REBUILDING_BIT if self.rebuilding else 0)).to_bytes(8, "little")

    def __str__(self) -> str:
        numbers = f"{self.data}" if self.parity == self.data else f"{self.data}, with the parity of {self.parity}"
        return numbers + (", being rebuilt" if self.rebuilding else "")


_LAYOUT = struct.Struct("<qqQQ?qq")
# The cursor of a lane whose stripes have all migrated.
ALL = int(ALL_STRIPES)


@dataclass(frozen=True, slots=True)
class Migrated:
    """The migration record of a lane's hash on a store shard.

    It describes the last chunk of a migration that the hash has seen.

    Attributes:
        version: The version of the placement that rows migrate to.
        term: The term of the owner that migrated the chunk. If begin = end, of an owner that took
            the lane over at this cursor.
        begin: The cursor (`shard_table.cursor_at`) at which the chunk's stripes begin.
        end: The cursor at which they end.
        copied: If True, the hash has copies of the rows that migrate to it, and nothing has been
            deleted. If False, the chunk is done: the rows that left the hash are deleted.
        number: The number of the lane's last write-back batch at that time.
        held: The number of rows and parity rows in the hash.
        targets: The shards that received copies.
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
        """Parse the field of a hash, or return None if the hash has no such field.

        Raises:
            StoreError: The field is no migration record.
        """
        if stored is None:
            return None
        try:
            version, term, begin, end, copied, number, held = _LAYOUT.unpack_from(stored)
        except struct.error as error:
            raise StoreError("store: the record of a lane's migration was written by another version of this program") from error
        bits = np.unpackbits(np.frombuffer(stored[_LAYOUT.size :], np.uint8), bitorder="little")
        return cls(version, term, begin, end, copied, number, held, tuple(np.flatnonzero(bits).tolist()))

    @property
    def place(self) -> tuple[int, int]:
        """The key by which records are ordered in time: (term, end).

        The term comes first, because an owner of a later term may have undone a chunk of the owner
        before.
        """
        return self.term, self.end

    def stored(self) -> bytes:
        """Encode the record as `parse` reads it."""
        # The targets are stored as a bit mask over the shards' numbers.
        mask = np.zeros(max(self.targets, default=-1) + 1, np.uint8)
        mask[list(self.targets)] = 1
        head = _LAYOUT.pack(self.version, self.term, self.begin, self.end, self.copied, self.number, self.held)
        return head + np.packbits(mask, bitorder="little").tobytes()


def deletion(key: bytes, names: np.ndarray, marker: Marker | None, migrated: Migrated) -> list[Command]:
    """Return the transaction that deletes fields of a lane's hash and writes its migration record.

    Args:
        names: uint64 [n], the fields to delete.
        marker: The hash's marker, written again unchanged, or None. If the hash has lost its marker
            meanwhile, the server's answer shows that the field was new.
    """
    recorded = (MIGRATED, migrated.stored()) if marker is None else (MARKER, marker.stored(), MIGRATED, migrated.stored())
    # One transaction: the rows and the record of their deletion change together.
    parts = [names[first : first + COMMAND_ROWS] for first in range(0, len(names), COMMAND_ROWS)]
    deletions = [hdel(key, part) for part in parts]
    return [("MULTI",), *deletions, ("HSET", key, *recorded), ("EXEC",)]


def changed(answers: list[object]) -> tuple[int, int]:
    """Count what a transaction of `deletion` changed, by its answers.

    Returns:
        The number of fields deleted, and the number of fields (marker and migration record) that
        were new to the hash.
    """
    # The answer to EXEC: one count per HDEL, then the count of HSET.
    done = answers[-1]
    assert isinstance(done, list)
    return sum(int(str(one)) for one in done[:-1]), int(str(done[-1]))
