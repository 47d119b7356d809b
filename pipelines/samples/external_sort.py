"""The global order of samples, over piece files on disk: external sort by key, shuffle, cuts. (docs/definitions.md, Order)

Pieces are named so that sorting their names gives the order of the sources. A *run* is a piece whose samples are sorted by key,
ties in the former order; a *bucket* is what lies between two splitters in all runs, small enough to be sorted in memory. Everything
here is a function of its inputs alone, and holds a bounded number of samples whatever the length of the data.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.pipelines.base.hashing import key as chain
from foreload.pipelines.base.hashing import mix
from foreload.pipelines.samples.pieces import Samples, read_piece

_MOST_CANDIDATES = 65_536  # sampled keys from which splitters are chosen, at most (unless that were fewer than four a bucket)


class OrderedSource(Protocol):
    """What a schedule is compiled from: samples in their global order, in chunks of any size."""

    @property
    def training_samples(self) -> int:
        """Samples of one epoch."""

    @property
    def evaluation_samples(self) -> int:
        """Samples of one pass."""

    @property
    def shuffled(self) -> bool:
        """Whether each epoch has an order of its own; otherwise every epoch gives the same arrays."""

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the epoch's training samples in order, each with its samples' numbers (int64)."""

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the evaluation samples in order, each with its samples' numbers (int64), from 0."""


class Keys(Protocol):
    """Sort keys of a run, ascending: a NumPy array, an Arrow binary array, or keys computed when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class Runs(Protocol):
    """The keys of runs, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, run: int, /) -> Keys: ...


# -- Sort keys ---------------------------------------------------------------------------------------------------------------


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


# -- Sorting -----------------------------------------------------------------------------------------------------------------


def stable_order(keys: np.ndarray | pa.Array) -> np.ndarray:
    """int64 [n]: the places of the samples in ascending order of their keys, ties in their former order."""
    if isinstance(keys, np.ndarray):
        return np.argsort(keys, kind="stable")
    return np.asarray(pc.array_sort_indices(keys)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Splitter:
    """A place between two samples in the order of all runs: all before have a smaller (key, run, row)."""

    key: Any
    run: int
    row: int


def cut(keys: Keys, run: int, splitter: Splitter) -> int:
    """How many samples of run number `run` come before the splitter."""
    if run == splitter.run:
        return splitter.row
    # equal keys: those of earlier runs come before, those of later ones after
    side = bisect.bisect_right if run < splitter.run else bisect.bisect_left
    if isinstance(keys, pa.Array):
        return side(range(len(keys)), splitter.key, key=lambda row: keys[row].as_py())
    return side(keys, splitter.key)


def sampled(keys: Keys, run: int, start: int, end: int, stride: int) -> list[Splitter]:
    """Every stride-th sample of rows start .. end - 1 of a run, as candidates for splitters."""
    values = ((row, keys[row]) for row in range(start + stride - 1, end, stride))
    return [Splitter(value.as_py() if isinstance(value, pa.Scalar) else value, run, row) for row, value in values]


def stride_for(total: int, target: int) -> int:
    """Samples between two candidates, for buckets of about `target` of `total` samples."""
    return max(1, min(total // _MOST_CANDIDATES, target // 4))


def choose(candidates: list[Splitter], stride: int, target: int) -> list[Splitter]:
    """Splitters, in order, between buckets of about `target` samples; candidates stand for `stride` samples each."""
    ordered = sorted(candidates, key=lambda s: (s.key, s.run, s.row))
    step = max(1, target // stride)
    return ordered[step - 1 :: step]


def buckets(runs: Runs, starts: np.ndarray, ends: np.ndarray, target: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut rows starts[i] .. ends[i] - 1 of each run i into parts in key order, each of at most 2 * target samples.

    Yields (starts, ends), int64 [runs] each. A few keys are looked at, of one run after the other, so that runs may be opened when
    they are asked for.
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
        if splitters:
            break
    stops = np.tile(ends, (len(splitters) + 1, 1))  # (parts, runs)
    for i in used:
        keys = runs[i]
        stops[:-1, i] = [min(max(cut(keys, i, splitter), starts[i]), ends[i]) for splitter in splitters]
    for stop in stops:
        yield from buckets(runs, starts, stop, target)
        starts = stop


def first_rows(runs: Runs, count: int, target: int) -> np.ndarray:
    """How many samples of each run are among the first `count` of all, int64 [runs]; about `target` keys are held in memory."""
    ends = np.array([len(runs[i]) for i in range(len(runs))], np.int64)
    before = 0
    for starts, stops in buckets(runs, np.zeros(len(runs), np.int64), ends, target):
        size = int((stops - starts).sum())
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


# -- Pieces in order ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PieceOrder:
    """Samples as ranges of pieces, in order: rows starts[i] .. ends[i] - 1 of piece names[i]. starts, ends: int64 [pieces]."""

    names: tuple[str, ...]
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def whole(cls, pieces: Sequence[tuple[str, int]]) -> PieceOrder:
        """All rows of pieces given as (name, rows)."""
        rows = np.array([rows for _, rows in pieces], np.int64)
        return cls(tuple(name for name, _ in pieces), np.zeros(len(rows), np.int64), rows)

    @property
    def rows(self) -> int:
        """Samples in all."""
        return int((self.ends - self.starts).sum())

    def slice(self, first: int, last: int) -> PieceOrder:
        """Samples first .. last - 1 of this order; pieces that have none of them are left out."""
        before = np.concatenate(([0], np.cumsum(self.ends - self.starts)))  # samples before each range
        starts = self.starts + np.clip(first - before[:-1], 0, self.ends - self.starts)
        ends = self.starts + np.clip(last - before[:-1], 0, self.ends - self.starts)
        kept = np.flatnonzero(ends > starts)
        return PieceOrder(tuple(self.names[i] for i in kept), starts[kept], ends[kept])

    def range(self, place: int) -> PieceOrder:
        """One of the ranges as an order of its own."""
        return PieceOrder(self.names[place : place + 1], self.starts[place : place + 1], self.ends[place : place + 1])

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"names": list(self.names), "starts": self.starts.tolist(), "ends": self.ends.tolist()}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> PieceOrder:
        """Inverse of to_dict."""
        return cls(tuple(value["names"]), np.array(value["starts"], np.int64), np.array(value["ends"], np.int64))


def held_out(rows: int, fraction: float) -> int:
    """How many samples at the end of an order of `rows` are held out for evaluation."""
    return math.floor(fraction * rows)


@dataclass(frozen=True, slots=True)
class PieceRuns:
    """The keys of runs in a folder, each opened when it is asked for: there may be more runs than files that can be open."""

    folder: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, run: int) -> Keys:
        keys = read_piece(self.folder / self.names[run])[1]
        assert keys is not None, "a run has keys"
        return keys


def gather(folder: Path, order: PieceOrder) -> tuple[Samples, pa.Array]:
    """The samples and keys of all ranges of an order (at least one), copied, one after the other."""
    parts, keys = [], []
    for name, start, end in zip(order.names, order.starts.tolist(), order.ends.tolist(), strict=True):
        samples, column, _ = read_piece(folder / name)
        assert column is not None, "a run has keys"
        places = np.arange(start, end)
        parts.append(samples.take(places))  # a copy, so that the file is closed before the next one is opened
        keys.append(column.take(pa.array(places)))
    return Samples.concat(parts), pa.concat_arrays(keys)


def read_order(folder: Path, order: PieceOrder) -> Iterator[tuple[Samples, pa.Array | None]]:
    """The samples and keys of an order, range by range; views of the mapped pieces."""
    for name, start, end in zip(order.names, order.starts.tolist(), order.ends.tolist(), strict=True):
        samples, keys, _ = read_piece(folder / name)
        yield samples.slice(start, end), None if keys is None else keys.slice(start, end - start)


@dataclass(frozen=True)
class PieceSource:
    """An OrderedSource of pieces in a folder. epochs: empty, or each epoch's order of pieces, whose keys are sample numbers."""

    folder: Path
    training_order: PieceOrder
    evaluation_order: PieceOrder
    epochs: tuple[PieceOrder, ...] = ()

    @property
    def training_samples(self) -> int:
        """Samples of one epoch."""
        return self.training_order.rows

    @property
    def evaluation_samples(self) -> int:
        """Samples of one pass."""
        return self.evaluation_order.rows

    @property
    def shuffled(self) -> bool:
        """Whether each epoch has an order of its own."""
        return bool(self.epochs)

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the epoch's training samples in order, with their numbers, from 0 in the order without a shuffle."""
        if not self.epochs:
            yield from self._counted(self.training_order)
            return
        for samples, numbers in read_order(self.folder, self.epochs[epoch]):
            assert numbers is not None
            yield samples, numbers.to_numpy()

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the evaluation samples in order, with their numbers, from 0."""
        yield from self._counted(self.evaluation_order)

    def _counted(self, order: PieceOrder) -> Iterator[tuple[Samples, np.ndarray]]:
        number = 0
        for samples, _ in read_order(self.folder, order):
            yield samples, np.arange(number, number + len(samples), dtype=np.int64)
            number += len(samples)
