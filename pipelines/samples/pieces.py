"""Encoded samples on disk, in pieces, and their global order as ranges of pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from foreload.base.arrays import Int64s
from foreload.base.compiled import nb
from foreload.base.files import replacing
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.external_sort import Keys

_FORMAT = "foreload piece 2"


@dataclass(frozen=True, slots=True)
class Samples:
    """Consecutive encoded samples, in some order.

    Attributes:
        labels: float32 [n, labels].
        dense: float32 [n, dense width].
        ids: int32 or int64 [lookups], ordered by sample, feature and value.
        offsets: int64 [n * F + 1], CSR over (sample, feature) into ids, starting at 0. None if no
            feature is multi-valued. There are n * F lookups then.
        weights: float32 [n], or None without a column of weights.
        groups: int64 [n], or None without a group column.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def slice(self, start: int, end: int) -> Samples:
        """Return samples start .. end - 1 as views, except for the offsets, which start at 0 again.

        Raises:
            ValueError: the range is not within 0 .. len.
        """
        if not 0 <= start <= end <= len(self):
            raise ValueError(f"slice: must lie within 0 .. {len(self)}, not {start} .. {end}")
        features = self._features()
        if self.offsets is None:
            return self._chosen(slice(start, end), self.ids[start * features : end * features], None)
        offsets = self.offsets[start * features : end * features + 1]
        return self._chosen(slice(start, end), self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, places: np.ndarray) -> Samples:
        """Copy the samples at places.

        Args:
            places: int64 [m], each 0 .. len - 1, in any order. Repeats are allowed.
        """
        features = self._features()
        if self.offsets is None:
            ids = self.ids.reshape(len(self), features)[places].reshape(-1)
            return self._chosen(places, ids, None)
        places = np.ascontiguousarray(places, np.int64)
        offsets = np.zeros(len(places) * features + 1, np.int64)
        _take_offsets(self.offsets, places, features, offsets)
        ids = np.empty(offsets[-1], self.ids.dtype)
        _take_ids(self.offsets, self.ids, places, features, offsets, ids)
        return self._chosen(places, ids, offsets)

    def _chosen(self, places: Any, ids: np.ndarray, offsets: np.ndarray | None) -> Samples:
        """Return the samples at places, with their ids and offsets given."""
        weights = None if self.weights is None else self.weights[places]
        groups = None if self.groups is None else self.groups[places]
        return Samples(self.labels[places], self.dense[places], ids, offsets, weights, groups)

    @staticmethod
    def concat(parts: Sequence[Samples]) -> Samples:
        """Concatenate samples.

        Args:
            parts: at least one, all with the same features and dense width.

        Raises:
            ValueError: there are no parts.
        """
        if not parts:
            raise ValueError("concat: needs at least one part")
        if len(parts) == 1:
            return parts[0]
        labels = np.concatenate([p.labels for p in parts])
        dense = np.concatenate([p.dense for p in parts])
        ids = np.concatenate([p.ids for p in parts])
        weights, groups = _together([p.weights for p in parts]), _together([p.groups for p in parts])
        if parts[0].offsets is None:
            return Samples(labels, dense, ids, None, weights, groups)
        bounds = [np.zeros(1, np.int64)]
        lookups = 0
        for part in parts:
            assert part.offsets is not None
            bounds.append(part.offsets[1:] + lookups)
            lookups += len(part.ids)
        return Samples(labels, dense, ids, np.concatenate(bounds), weights, groups)

    def _features(self) -> int:
        """Return F, the number of features.

        Without samples it cannot be known and is not needed, so it is 0.
        """
        lookups = len(self.ids) if self.offsets is None else len(self.offsets) - 1
        return lookups // len(self) if len(self) else 0


def _together(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate the arrays of all parts. Returns None if no part has one."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known else None


@nb.njit(nogil=True, cache=True)
def _take_offsets(source: np.ndarray, places: np.ndarray, features: int, offsets: np.ndarray) -> None:
    """Fill offsets, CSR over (place, feature), for the samples at places.

    Args:
        source: the offsets of the samples to take from.
    """
    for i in range(len(places)):
        for f in range(features):
            entry = places[i] * features + f
            offsets[i * features + f + 1] = offsets[i * features + f] + source[entry + 1] - source[entry]


@nb.njit(nogil=True, cache=True)
def _take_ids(
    source: np.ndarray, ids: np.ndarray, places: np.ndarray, features: int, offsets: np.ndarray, out: np.ndarray
) -> None:
    """Copy the ids of the samples at places to where the new offsets put them.

    All features of a sample are contiguous, so each sample is one copy.
    """
    for i in range(len(places)):
        start, end = source[places[i] * features], source[(places[i] + 1) * features]
        to = offsets[i * features]
        for j in range(end - start):
            out[to + j] = ids[start + j]


def write_piece(path: str | Path, samples: Samples, keys: np.ndarray | pa.Array | None, meta: Mapping[str, Any]) -> None:
    """Write samples, their order keys and metadata as an Arrow IPC file of one record batch.

    The batch has one row, and each column is a list. So arrays of different lengths share one file,
    without padding, and can be memory-mapped. The bytes are a function of the arguments alone. The
    file is written under a temporary name and renamed, so it appears whole. Writing it twice, even
    at the same time, does no harm.

    Args:
        keys: the order keys [n], or None.
        meta: JSON values.
    """
    columns: dict[str, pa.Array] = {
        "labels": _listed(samples.labels.reshape(-1), np.float32),
        "dense": _listed(samples.dense.reshape(-1), np.float32),
        "ids": _listed(samples.ids, samples.ids.dtype),
    }
    if samples.offsets is not None:
        columns["offsets"] = _listed(samples.offsets, np.int64)
    if samples.weights is not None:
        columns["weights"] = _listed(samples.weights, np.float32)
    if samples.groups is not None:
        columns["groups"] = _listed(samples.groups, np.int64)
    if keys is not None:
        values = keys if isinstance(keys, pa.Array) else pa.array(keys)
        columns["keys"] = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
    header = {"labels": samples.labels.shape, "dense": samples.dense.shape, "meta": dict(meta)}
    batch = pa.record_batch(columns).replace_schema_metadata({"format": _FORMAT, "header": json.dumps(header, sort_keys=True)})
    path = Path(path)
    with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def read_piece(path: str | Path) -> tuple[Samples, pa.Array | None, dict[str, Any]]:
    """Return the samples, keys and metadata of a piece.

    The arrays are read-only views of the memory-mapped file. Their pages are read when they are
    used.

    Raises:
        ScheduleError: the file is not a piece.
    """
    try:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        metadata = batch.schema.metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise ScheduleError(f"{path}: not a readable piece of samples ({error}); prepare the schedule again") from error
    if metadata.get(b"format") != _FORMAT.encode():
        raise ScheduleError(f"{path}: not a piece of samples of this version; prepare the schedule again")
    header = json.loads(metadata[b"header"])
    labels, dense = (_values(batch, name).to_numpy().reshape(header[name]) for name in ("labels", "dense"))
    names = batch.schema.names
    offsets, weights, groups = (
        _values(batch, name).to_numpy() if name in names else None for name in ("offsets", "weights", "groups")
    )
    keys = _values(batch, "keys") if "keys" in names else None
    return Samples(labels, dense, _values(batch, "ids").to_numpy(), offsets, weights, groups), keys, header["meta"]


def _listed(values: np.ndarray, dtype: np.dtype | type) -> pa.Array:
    array = pa.array(np.ascontiguousarray(values, dtype))
    return pa.LargeListArray.from_arrays(pa.array([0, len(array)], pa.int64()), array)


def _values(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(name).flatten()


def batches(
    chunks: Iterator[tuple[Samples, np.ndarray]], size: int, sets: Sequence[int] = ()
) -> Iterator[tuple[Samples, np.ndarray]]:
    """Cut chunks of any size into batches of `size` samples. The last batch may be shorter.

    Args:
        chunks: samples with their numbers, in order.
        sets: if the samples form several sets, the number of samples in each, at least 1. The last
            batch of each set may then be shorter.

    Yields:
        The samples of each batch with their numbers.
    """
    sizes = _sizes(size, sets)
    wanted = next(sizes)
    held: list[tuple[Samples, np.ndarray]] = []
    count = 0
    for samples, numbers in chunks:
        start = 0
        # `held` has `count` samples, fewer than the next batch needs.
        while count + len(samples) - start >= wanted:
            stop = start + wanted - count
            held.append((samples.slice(start, stop), numbers[start:stop]))
            yield _join(held)
            held, count, start, wanted = [], 0, stop, next(sizes)
        if start < len(samples):
            held.append((samples.slice(start, len(samples)), numbers[start:]))
            count += len(samples) - start
    if held:
        yield _join(held)


def _sizes(size: int, sets: Sequence[int]) -> Iterator[int]:
    """Yield the size of each batch, without end."""
    for samples in sets:
        yield from (min(size, samples - first) for first in range(0, samples, size))
    yield from repeat(size)


def _join(parts: list[tuple[Samples, np.ndarray]]) -> tuple[Samples, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    return Samples.concat([samples for samples, _ in parts]), np.concatenate([numbers for _, numbers in parts])


class Abandoned(Exception):
    """A growing source will not become whole, because reading it failed or was stopped.

    The code that failed or stopped the reading reports the reason.
    """


class OrderedSource(Protocol):
    """The input of schedule compilation: samples in their global order, in chunks of any size.

    A source may still be growing. Chunks then arrive as they are read. A caller that asks for a
    number of samples that is not known yet waits for it.
    """

    @property
    def expected_samples(self) -> int:
        """About how many samples an epoch has. It is known from the beginning."""

    @property
    def training_samples(self) -> int:
        """The number of samples of one epoch."""

    @property
    def evaluation_samples(self) -> int:
        """The number of samples of one evaluation pass."""

    @property
    def evaluation_sets(self) -> tuple[int, ...]:
        """The number of samples in each evaluation set, in the order of the evaluation samples.

        Empty if all of them are one set without a name.
        """

    @property
    def shuffled(self) -> bool:
        """Whether each epoch has its own order. If not, every epoch yields the same arrays."""

    @property
    def slices(self) -> Path | None:
        """A file with the lane that took each sample, if the samples were trained before.

        They were then trained in this order. See `compiler/serial_reader`. If None, the lanes are
        yet to be decided.
        """

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """Yield chunks of an epoch's training samples in order, with their numbers (int64)."""

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Yield chunks of the evaluation samples in order, with their numbers (int64) from 0."""


@dataclass(frozen=True)
class PieceOrder:
    """An order of samples, as ranges of pieces: rows starts[i] .. ends[i] - 1 of piece names[i].

    Attributes:
        starts: int64 [pieces].
        ends: int64 [pieces].
    """

    names: tuple[str, ...]
    starts: Int64s
    ends: Int64s

    @classmethod
    def whole(cls, pieces: Sequence[tuple[str, int]]) -> PieceOrder:
        """Return the order of all rows of pieces, given as (name, rows)."""
        rows = np.array([rows for _, rows in pieces], np.int64)
        return cls(tuple(name for name, _ in pieces), np.zeros(len(rows), np.int64), rows)

    @classmethod
    def joined(cls, orders: Sequence[PieceOrder]) -> PieceOrder:
        """Concatenate orders, at least one."""
        return cls(
            tuple(name for order in orders for name in order.names),
            np.concatenate([order.starts for order in orders]),
            np.concatenate([order.ends for order in orders]),
        )

    @property
    def rows(self) -> int:
        """The number of samples in all ranges."""
        return int((self.ends - self.starts).sum())

    def slice(self, first: int, last: int) -> PieceOrder:
        """Return samples first .. last - 1 of this order.

        Pieces without any of these samples are left out.
        """
        before = np.concatenate(([0], np.cumsum(self.ends - self.starts)))  # samples before each range
        starts = self.starts + np.clip(first - before[:-1], 0, self.ends - self.starts)
        ends = self.starts + np.clip(last - before[:-1], 0, self.ends - self.starts)
        kept = np.flatnonzero(ends > starts)
        return PieceOrder(tuple(self.names[i] for i in kept), starts[kept], ends[kept])

    def range(self, place: int) -> PieceOrder:
        """Return one of the ranges as an order of its own."""
        return PieceOrder(self.names[place : place + 1], self.starts[place : place + 1], self.ends[place : place + 1])


def held_out(rows: int, fraction: float) -> int:
    """Return how many samples at the end of an order of `rows` are held out for evaluation."""
    return math.floor(fraction * rows)


@dataclass(frozen=True, slots=True)
class PieceRuns:
    """The keys of the runs in a folder.

    Each run is opened on request, since there may be more runs than files that can be open at once.
    """

    folder: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, run: int) -> Keys:
        keys = read_piece(self.folder / self.names[run])[1]
        assert keys is not None, "a run has keys"
        return keys


def gather(folder: Path, order: PieceOrder) -> tuple[Samples, pa.Array]:
    """Copy the samples and keys of all ranges of an order, concatenated.

    Args:
        folder: the folder of the pieces.
        order: at least one range.
    """
    parts, keys = [], []
    for name, start, end in zip(order.names, order.starts.tolist(), order.ends.tolist(), strict=True):
        samples, column, _ = read_piece(folder / name)
        assert column is not None, "a run has keys"
        places = np.arange(start, end)
        # Copy the samples, so that this file is closed before the next one is opened.
        parts.append(samples.take(places))
        keys.append(column.take(pa.array(places)))
    return Samples.concat(parts), pa.concat_arrays(keys)


def read_order(folder: Path, order: PieceOrder) -> Iterator[tuple[Samples, pa.Array | None]]:
    """Yield the samples and keys of an order, range by range, as views of the mapped pieces."""
    for name, start, end in zip(order.names, order.starts.tolist(), order.ends.tolist(), strict=True):
        samples, keys, _ = read_piece(folder / name)
        yield samples.slice(start, end), None if keys is None else keys.slice(start, end - start)


@dataclass(frozen=True)
class PieceSource:
    """An `OrderedSource` of pieces in a folder.

    Attributes:
        epochs: the order of pieces of each epoch, whose keys are sample numbers. Empty without a
            shuffle.
        slices: see `OrderedSource`.
        evaluation_sets: see `OrderedSource`.
    """

    folder: Path
    training_order: PieceOrder
    evaluation_order: PieceOrder
    epochs: tuple[PieceOrder, ...] = ()
    slices: Path | None = None
    evaluation_sets: tuple[int, ...] = ()

    @property
    def expected_samples(self) -> int:
        """The number of samples of one epoch."""
        return self.training_samples

    @property
    def training_samples(self) -> int:
        """The number of samples of one epoch."""
        return self.training_order.rows

    @property
    def evaluation_samples(self) -> int:
        """The number of samples of one evaluation pass."""
        return self.evaluation_order.rows

    @property
    def shuffled(self) -> bool:
        """Whether each epoch has its own order."""
        return bool(self.epochs)

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """Yield chunks of an epoch's training samples in order, with their numbers.

        Numbers count from 0 in the order without a shuffle.
        """
        if not self.epochs:
            yield from self._counted(self.training_order)
            return
        for samples, numbers in read_order(self.folder, self.epochs[epoch]):
            assert numbers is not None
            yield samples, numbers.to_numpy()

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Yield chunks of the evaluation samples in order, with their numbers from 0."""
        yield from self._counted(self.evaluation_order)

    def _counted(self, order: PieceOrder) -> Iterator[tuple[Samples, np.ndarray]]:
        number = 0
        for samples, _ in read_order(self.folder, order):
            yield samples, np.arange(number, number + len(samples), dtype=np.int64)
            number += len(samples)
