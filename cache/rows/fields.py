"""The fields of the store's hashes: a row's is table << 48 | ordinal, a parity row's has the top bit as well, and its stripe's number.

They are sent as 8 bytes, big-endian. Cursors over stripes (by table, then number) are packed in the same way.
"""

from __future__ import annotations

import numpy as np

from foreload.base.compiled import nb

NUMBER_BITS = 48  # the 15 above are the table's
PARITY_BIT = np.uint64(1 << 63)  # of the field of a parity row: above the table's bits
_SHIFT, _NUMBER = np.uint64(NUMBER_BITS), np.uint64((1 << NUMBER_BITS) - 1)


@nb.njit(nogil=True, cache=True)
def pack(table, number):  # type: ignore[no-untyped-def]
    """table << 48 | number, uint64, for kernels: the field of a row (number: its ordinal), or the name of a stripe (number: the stripe's)."""
    return (np.uint64(table) << _SHIFT) | np.uint64(number)


def fields(table: np.ndarray | int, number: np.ndarray) -> np.ndarray:
    """The fields of rows: uint64 [n].

    table: integers [n], or one for all, 0 .. 2^15 - 1; number: int64 [n], their ordinals, 0 .. 2^48 - 1.
    """
    tables = np.asarray(table).astype(np.uint64)
    packed: np.ndarray = (tables << _SHIFT) | number.astype(np.uint64)
    return packed


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tables int16 [n], and numbers int64 [n]: ordinals of rows, or stripes of parity rows, of fields uint64 [n]."""
    return ((packed & ~PARITY_BIT) >> _SHIFT).astype(np.int16), (packed & _NUMBER).astype(np.int64)


def words(packed: np.ndarray) -> list[bytes]:
    """Fields (uint64 [n]) as the store has them, for commands made in Python: 8 bytes each, big-endian."""
    swapped = packed.astype(">u8").tobytes()
    return [swapped[first : first + 8] for first in range(0, len(swapped), 8)]
