"""Stable 64-bit mixing: the only source of hashes and pseudo-random numbers in the project (docs/definitions.md)."""

from __future__ import annotations

import numba as nb
import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1


@nb.njit(nb.uint64(nb.uint64), inline="always", cache=True)
def mix(x: np.uint64) -> np.uint64:
    """The splitmix64 step (Steele, Lea, Flood 2014): uint64 -> uint64, a bijection. For use inside numba kernels."""
    x = x + _GOLDEN
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def key(*parts: int) -> int:
    """Chain mix over integers, as Python ints: h = mix(a); h = mix(h ^ b); ... Returns 0 .. 2^64 - 1."""
    h = None
    for part in parts:
        x = (part & _MASK) if h is None else h ^ (part & _MASK)
        x = (x + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        h = x ^ (x >> 31)
    if h is None:
        raise ValueError("key: needs at least one part")
    return h


@nb.njit(cache=True, nogil=True)
def _hash_strings(data: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.size):
        start, end = offsets[i], offsets[i + 1]
        h = mix(np.uint64(end - start))
        position = start
        while position < end:
            word = np.uint64(0)
            stop = min(position + 8, end)
            for j in range(stop - 1, position - 1, -1):
                word = (word << np.uint64(8)) | np.uint64(data[j])
            h = mix(h ^ word)
            position = stop
        out[i] = h


def hash_strings(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """hash64 of each string of an Arrow string buffer.

    data: uint8 [bytes]; offsets: int32 or int64 [n + 1] into data. Returns uint64 [n]. (docs/definitions.md, Mixing)
    """
    out = np.empty(len(offsets) - 1, np.uint64)
    _hash_strings(data, offsets, out)
    return out
