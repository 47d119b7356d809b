"""External sort of samples: sort keys, sorted runs, and buckets that are cut from the runs.

A *run* is a piece whose samples are sorted by key, with ties in their previous order. A *bucket* is
what lies between two splitters in all runs. Pieces have names that sort in the order of the
sources, and the runs are numbered in that order, so equal keys keep it. Everything here is a
function of its inputs alone, and holds a bounded number of keys however long the data is.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.compiled import nb
from foreload.base.hashing import key as chain
from foreload.base.hashing import mix

# About how many sampled keys splitters are chosen from, at most. There are more if four for each
# bucket are more.
_MOST_CANDIDATES = 65_536


class Keys(Protocol):
    """The sort keys of a run, ascending.

    They are a NumPy array, an Arrow binary array, or computed on request.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class Runs(Protocol):
    """The keys of the runs, by the number of the run."""

    def __len__(self) -> int: ...

    def __getitem__(self, run: int, /) -> Keys: ...


def stable_order(keys: np.ndarray | pa.Array) -> np.ndarray:
    """Return the places of samples in ascending order of their keys, int64 [n].

    Ties stay in their previous order.
    """
    if isinstance(keys, np.ndarray):
        return np.argsort(keys, kind="stable")
    return np.asarray(pc.array_sort_indices(keys)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Splitter:
    """A place between two samples in the order of all runs.

    All samples before it have a smaller (key, run, row).
    """

    key: Any
    run: int
    row: int


def cut(keys: Keys, run: int, splitter: Splitter) -> int:
    """Return how many samples of run number `run` come before the splitter."""
    if run == splitter.run:
        return splitter.row
    # Of samples with an equal key, those of earlier runs come before the splitter, those of later
    # runs after it.
    side = bisect.bisect_right if run < splitter.run else bisect.bisect_left
    if isinstance(keys, pa.Array):
        return side(range(len(keys)), splitter.key, key=lambda row: keys[row].as_py())
    return side(keys, splitter.key)


def sampled(keys: Keys, run: int, start: int, end: int, stride: int) -> list[Splitter]:
    """Return every stride-th of the rows start .. end - 1 of a run, as candidates for splitters."""
    values = ((row, keys[row]) for row in range(start + stride - 1, end, stride))
    return [Splitter(value.as_py() if isinstance(value, pa.Scalar) else value, run, row) for row, value in values]


def stride_for(total: int, target: int) -> int:
    """Return the number of samples between two candidates.

    Args:
        total: the number of samples to cut into buckets.
        target: about how many samples a bucket is to have.
    """
    return max(1, min(total // _MOST_CANDIDATES, target // 4))


def choose(candidates: list[Splitter], stride: int, target: int) -> list[Splitter]:
    """Choose splitters, in order, between buckets of about `target` samples.

    Args:
        stride: how many samples a candidate stands for.
    """
    ordered = sorted(candidates, key=lambda s: (s.key, s.run, s.row))
    step = max(1, target // stride)
    return ordered[step - 1 :: step]


def buckets(runs: Runs, starts: np.ndarray, ends: np.ndarray, target: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut rows starts[i] .. ends[i] - 1 of each run i into parts, in key order.

    Only a few keys are read, from one run after the other. So runs may be opened on request.

    Args:
        starts: int64 [runs].
        ends: int64 [runs].
        target: a part has at most 2 * target samples.

    Yields:
        The (starts, ends) of each part, int64 [runs] each.
    """
    total = int((ends - starts).sum())
    if total == 0:
        return
    if total <= 2 * target:
        yield starts, ends
        return
    used = np.flatnonzero(ends > starts).tolist()
    for stride in (stride_for(total, target), 1):
        candidates = [s for i in used for s in sampled(runs[i], i, int(starts[i]), int(ends[i]), stride)]
        splitters = choose(candidates, stride, target)
        # Without splitters the runs are too short for this stride: look at every key.
        if splitters:
            break
    stops = np.tile(ends, (len(splitters) + 1, 1))  # (parts, runs)
    for i in used:
        keys = runs[i]
        stops[:-1, i] = [min(max(cut(keys, i, splitter), starts[i]), ends[i]) for splitter in splitters]
    # A part may still be too large, since candidates are only a sample. Cut it again.
    for stop in stops:
        yield from buckets(runs, starts, stop, target)
        starts = stop


def first_rows(runs: Runs, count: int, target: int) -> np.ndarray:
    """Return how many samples of each run are among the first `count` of all samples.

    Args:
        target: about how many keys may be in memory.

    Returns:
        int64 [runs].
    """
    ends = np.array([len(runs[i]) for i in range(len(runs))], np.int64)
    before = 0
    for starts, stops in buckets(runs, np.zeros(len(runs), np.int64), ends, target):
        size = int((stops - starts).sum())
        # Sample number `count` is the first one that is left out. Find it among all keys of the
        # bucket that holds it.
        if before + size > count:
            used = np.flatnonzero(stops > starts).tolist()
            candidates = [s for i in used for s in sampled(runs[i], i, int(starts[i]), int(stops[i]), 1)]
            following = choose(candidates, 1, 1)[count - before]
            starts = starts.copy()
            for i in used:
                starts[i] = min(max(cut(runs[i], i, following), starts[i]), stops[i])
            return starts
        before += size
    return ends


# More than the difference between any 64-bit integer and its float64.
_LONG_REST = 0xFFFF
_NUMBER, _TEXT = b"\x01", b"\x02"  # first byte of a key; the key of a missing value is empty


def order_keys(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return sort keys for the order_by column, large_binary [n].

    Missing values come first. Numbers compare by value, and text by bytes. Integers, floats,
    decimals, booleans, dates and times count as numbers, anything else as text.
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
        except pa.ArrowInvalid:  # There are fractions, or larger numbers.
            return _decimal_keys(column)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _number_keys(column)
    texts = column.cast(pa.large_string()).cast(pa.large_binary())
    first, nothing = pa.scalar(_TEXT, pa.large_binary()), pa.scalar(b"", pa.large_binary())
    return pc.binary_join_element_wise(first, texts, nothing).fill_null(b"")


def _number_keys(column: pa.Array) -> pa.Array:
    """Return the keys of numbers, 11 bytes each.

    A key is a class byte, the number rounded down to float64 as an ordered big-endian integer, and
    what that lacks of an integer (uint16).
    """
    valid = np.asarray(column.is_valid())
    values = np.asarray(column.fill_null(0))
    rest = np.zeros(len(values), np.int64)
    if values.dtype.kind == "u":
        # Drop the lowest bit so that the values fit int64. It is added to the rest again below.
        rounded, half = _rounded_down((values >> np.uint64(1)).astype(np.int64))
        rounded, rest = 2 * rounded, 2 * half + (values & values.dtype.type(1)).astype(np.int64)
        small = values < 1 << 53
        rounded, rest = np.where(small, values.astype(np.float64), rounded), np.where(small, 0, rest)
    elif values.dtype.kind == "i":
        rounded, rest = _rounded_down(values.astype(np.int64))
    else:
        rounded = values.astype(np.float64) + 0.0  # -0.0 becomes 0.0
    # Flip all bits of negative numbers and the sign bit of others: unsigned order is then by value.
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
    """Return keys that compare with those of `_number_keys`, for decimals of any precision.

    Only distinct values are converted.
    """
    encoded = column.dictionary_encode()
    keys = pa.array([_decimal_key(value) for value in encoded.dictionary.to_pylist()], pa.large_binary())
    return keys.take(encoded.indices).fill_null(b"")


def _decimal_key(value: Decimal) -> bytes:
    """Return the key of a decimal.

    It is a class byte, the number rounded down to float64, the difference of its integer part to
    that, and the digits of its fraction.

    Between two neighbouring float64 numbers, all numbers have the same integer part, or the lower
    one is an integer. So the digits order all numbers with the same float64, if a number that is a
    float64 itself has no digits.
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
    """Round integers down to float64.

    Args:
        values: int64 [n].

    Returns:
        The largest float64 not above each integer, and the integer's difference to it (0 .. 1023).
    """
    rounded = values.astype(np.float64)
    above = rounded >= 2.0**63
    above[~above] = rounded[~above].astype(np.int64) > values[~above]
    rounded = np.where(above, np.nextafter(rounded, -np.inf), rounded)
    return rounded, values - rounded.astype(np.int64)


@nb.njit(nogil=True, cache=True)
def _mix_all(seed: np.uint64, numbers: np.ndarray, out: np.ndarray) -> None:
    """Compute the last link of `chain` for many numbers.

    Args:
        seed: the result of the links before.
    """
    for i in range(numbers.size):
        out[i] = mix(seed ^ np.uint64(numbers[i]))


def shuffle_keys(seed: int, epoch: int, numbers: np.ndarray) -> np.ndarray:
    """Return key(seed, epoch, number) of each sample.

    Args:
        numbers: int64 [n].

    Returns:
        uint64 [n].
    """
    out = np.empty(len(numbers), np.uint64)
    _mix_all(np.uint64(chain(seed, epoch)), np.ascontiguousarray(numbers, np.int64), out)
    return out


@dataclass(frozen=True, slots=True)
class ShuffledKeys:
    """The shuffle keys of a run's samples, each computed on request.

    A binary search needs only a few of them.

    Attributes:
        numbers: int64 [n], ascending by shuffle key. `first` is added to each.
    """

    seed: int
    epoch: int
    numbers: np.ndarray
    first: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> int:
        return chain(self.seed, self.epoch, self.first + int(self.numbers[row]))
