"""How far the rows of a lane have moved to other store shards: what each of its hashes says of that, in a field beside the marker."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.resp import MARKER, MIGRATED, hdel
from foreload.cache.client.store import COMMAND_ROWS, Command
from foreload.cache.errors import StoreError
from foreload.cache.parity.stripes import ALL_STRIPES
from foreload.cache.protocol.shards.marker import Marker

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
