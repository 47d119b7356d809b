"""What samples are ordered by: a column's values as bytes that compare as they do, or a shuffle's hash. (docs/definitions.md, Order)"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.compiled import nb
from foreload.base.hashing import key as chain
from foreload.base.hashing import mix

_LONG_REST = 0xFFFF  # more than any integer of 64 bits is above its float64
_NUMBER, _TEXT = b"\x01", b"\x02"  # the first byte of a key; that of a missing value is empty


def order_keys(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Sort keys of the column that order_by names, large_binary [n]: missing values first, numbers by value, text by bytes.

    column: integers, floats, decimals, booleans, dates and times count as numbers, all else as text.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        column = column.cast(pa.int32()).cast(pa.int64())
    elif pa.types.is_temporal(kind) or pa.types.is_boolean(kind):
        column = column.cast(pa.int64())
    elif pa.types.is_decimal(kind):
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid:  # there are fractions, or larger numbers
            return _decimal_keys(column)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _number_keys(column)
    texts = column.cast(pa.large_string()).cast(pa.large_binary())
    first, nothing = pa.scalar(_TEXT, pa.large_binary()), pa.scalar(b"", pa.large_binary())
    return pc.binary_join_element_wise(first, texts, nothing).fill_null(b"")


def _number_keys(column: pa.Array) -> pa.Array:
    """A class byte, float64 rounded down as an ordered big-endian integer, and what it lacks of an integer (uint16)."""
    valid = np.asarray(column.is_valid())
    values = np.asarray(column.fill_null(0))
    rest = np.zeros(len(values), np.int64)
    if values.dtype.kind == "u":
        # one bit less, so that they fit int64; the last bit goes back into the rest
        rounded, half = _rounded_down((values >> np.uint64(1)).astype(np.int64))
        rounded, rest = 2 * rounded, 2 * half + (values & values.dtype.type(1)).astype(np.int64)
        small = values < 1 << 53
        rounded, rest = np.where(small, values.astype(np.float64), rounded), np.where(small, 0, rest)
    elif values.dtype.kind == "i":
        rounded, rest = _rounded_down(values.astype(np.int64))
    else:
        rounded = values.astype(np.float64) + 0.0  # -0.0 becomes 0.0
    bits = rounded.view(np.uint64)
    bits = np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))
    keys = np.empty((len(values), 11), np.uint8)
    keys[:, 0] = _NUMBER[0]
    keys[:, 1:9] = bits.astype(">u8").view(np.uint8).reshape(-1, 8)
    keys[:, 9:] = rest.astype(">u2").view(np.uint8).reshape(-1, 2)
    offsets = np.concatenate(([0], np.cumsum(np.where(valid, 11, 0)))).astype(np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(keys[valid].tobytes())]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _decimal_keys(column: pa.Array) -> pa.Array:
    """As _number_keys has them, whatever the precision and scale. Only distinct values are looked at."""
    encoded = column.dictionary_encode()
    keys = pa.array([_decimal_key(value) for value in encoded.dictionary.to_pylist()], pa.large_binary())
    return keys.take(encoded.indices).fill_null(b"")


def _decimal_key(value: Decimal) -> bytes:
    """A class byte, the number rounded down to float64, what its integer part is above that, and the digits of its fraction.

    Between two neighbouring float64 numbers, all have the same integer part, or the lower one is an integer. So the digits put all that
    have the same float64 in order, if a number that is a float64 itself has none.
    """
    numerator, denominator = value.as_integer_ratio()
    whole, fraction = divmod(numerator, denominator)
    rounded = numerator / denominator  # to the nearest
    if Fraction(rounded) * denominator > numerator:
        rounded = math.nextafter(rounded, -math.inf)
    digits = b""
    if fraction and Fraction(rounded) * denominator != numerator:
        places = -int(value.as_tuple().exponent)
        digits = str(fraction * 10**places // denominator).zfill(places).rstrip("0").encode()
    rest = whole - math.floor(rounded)
    two_bytes = rest.to_bytes(2) if rest < _LONG_REST else _LONG_REST.to_bytes(2) + rest.to_bytes(32)
    bits = int.from_bytes(struct.pack(">d", rounded))
    bits = bits ^ ((1 << 64) - 1) if bits >> 63 else bits | 1 << 63
    return _NUMBER + bits.to_bytes(8) + two_bytes + digits


def _rounded_down(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest float64 not above each integer (int64 [n]), and what is missing to it (0 .. 1023)."""
    rounded = values.astype(np.float64)
    above = rounded >= 2.0**63
    above[~above] = rounded[~above].astype(np.int64) > values[~above]
    rounded = np.where(above, np.nextafter(rounded, -np.inf), rounded)
    return rounded, values - rounded.astype(np.int64)


@nb.njit(nogil=True, cache=True)
def _mix_all(seed: np.uint64, numbers: np.ndarray, out: np.ndarray) -> None:
    """The last link of `chain` for many numbers; seed: the links before."""
    for i in range(numbers.size):
        out[i] = mix(seed ^ np.uint64(numbers[i]))


def shuffle_keys(seed: int, epoch: int, numbers: np.ndarray) -> np.ndarray:
    """key(seed, epoch, number) of each sample: int64 [n] -> uint64 [n]."""
    out = np.empty(len(numbers), np.uint64)
    _mix_all(np.uint64(chain(seed, epoch)), np.ascontiguousarray(numbers, np.int64), out)
    return out


@dataclass(frozen=True, slots=True)
class ShuffledKeys:
    """The shuffle keys of numbers, int64 [n], each `first` too small; computed one by one, since a binary search asks for a few."""

    seed: int
    epoch: int
    numbers: np.ndarray
    first: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> int:
        return chain(self.seed, self.epoch, self.first + int(self.numbers[row]))
