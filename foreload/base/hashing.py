"""Stable 64-bit mixing: the only source of hashes and pseudo-random numbers in the project.

See docs/definitions.md, Mixing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from foreload.base.compiled import nb

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1


@nb.njit(nb.uint64(nb.uint64), inline="always", cache=True)
def mix(x: np.uint64) -> np.uint64:
    """Apply the splitmix64 step (Steele, Lea, Flood 2014): uint64 -> uint64, a bijection.

    For use inside numba kernels.
    """
    x = x + _GOLDEN
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def key(*parts: int) -> int:
    """Chain `mix` over integers: h = mix(a); h = mix(h ^ b); ...

    Args:
        parts: at least one integer. Negative ones are taken in two's complement.

    Returns:
        A Python int in 0 .. 2^64 - 1.

    Raises:
        ValueError: there are no parts.
    """
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


def _word_pointer(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(cgutils.gep_inbounds(builder, data, place), ir.IntType(64).as_pointer())


@intrinsic
def load_word(typing: Any, data: Any, place: Any) -> Any:
    """Return the 8 bytes data[place : place + 8] as uint64. For use inside numba kernels.

    Args:
        data: uint8. The 8 bytes must be in bounds, and may be at any address.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_word_pointer(context, builder, signature.args[0], *arguments), align=1)

    return nb.uint64(data, nb.int64), generate


@intrinsic
def store_word(typing: Any, data: Any, place: Any, word: Any) -> Any:
    """Write the bytes of a uint64 to data[place : place + 8]. For use inside numba kernels.

    Args:
        data: uint8. The 8 bytes must be in bounds, and may be at any address.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, value = arguments
        builder.store(value, _word_pointer(context, builder, signature.args[0], array, at), align=1)
        return context.get_dummy_value()

    return nb.void(data, nb.int64, nb.uint64), generate


@intrinsic
def high_product(typing: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of the product of two uint64. For use inside numba kernels."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return nb.uint64(nb.uint64, nb.uint64), generate


@intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """Return the place of the lowest bit set in a uint64, 0 .. 63, or 64 for 0.

    For use inside numba kernels.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return nb.int64(nb.uint64), generate


@nb.njit(nogil=True, cache=True)
def hash_bytes(data: np.ndarray, start: int, end: int) -> np.uint64:
    """Return hash64 of data[start:end], where data is uint8. For use inside numba kernels."""
    h = mix(np.uint64(end - start))
    position = start
    while position < end:
        left = end - position
        # Load 8 bytes at once, and clear those behind the end of the text. Near the end of the
        # data, load single bytes instead, so that nothing behind it is read.
        if position + 8 <= len(data):
            word = load_word(data, position)
            if left < 8:
                word &= (np.uint64(1) << np.uint64(8 * left)) - np.uint64(1)
        else:
            word = np.uint64(0)
            for j in range(end - 1, position - 1, -1):
                word = (word << np.uint64(8)) | np.uint64(data[j])
        h = mix(h ^ word)
        position += 8
    return h


@nb.njit(cache=True, nogil=True)
def _hash_strings(data: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.size):
        out[i] = hash_bytes(data, np.int64(offsets[i]), np.int64(offsets[i + 1]))


def hash_strings(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return hash64 of each string of an Arrow string buffer (docs/definitions.md, Mixing).

    Args:
        data: uint8 [bytes].
        offsets: int32 or int64 [n + 1] into data.

    Returns:
        uint64 [n].
    """
    out = np.empty(len(offsets) - 1, np.uint64)
    _hash_strings(data, offsets, out)
    return out
