"""Encoded samples on disk, in pieces; and their global order, as ranges of pieces."""

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
    """Consecutive samples in some order, encoded.

    labels: float32 [n, labels]. dense: float32 [n, dense width]. ids: int32, or int64, [lookups], in order sample, feature, value.
    offsets: int64 [n * F + 1], CSR over (sample, feature) into ids, from 0; None where no feature is multi-valued (then there
    are n * F lookups). weights: float32 [n]; groups: int64 [n]; None where there is no column of them.
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
        """Samples start .. end - 1, 0 <= start <= end <= len: views, but for the offsets, which begin at 0 again."""
        if not 0 <= start <= end <= len(self):
            raise ValueError(f"slice: must lie within 0 .. {len(self)}, not {start} .. {end}")
        features = self._features()
        if self.offsets is None:
            return self._chosen(slice(start, end), self.ids[start * features : end * features], None)
        offsets = self.offsets[start * features : end * features + 1]
        return self._chosen(slice(start, end), self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, places: np.ndarray) -> Samples:
        """The samples at places (int64 [m], each 0 .. len - 1, in any order, repeats allowed), copied."""
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
        """The samples at places, whose ids and offsets are given."""
        weights = None if self.weights is None else self.weights[places]
        groups = None if self.groups is None else self.groups[places]
        return Samples(self.labels[places], self.dense[places], ids, offsets, weights, groups)

    @staticmethod
    def concat(parts: Sequence[Samples]) -> Samples:
        """All samples of parts (at least one, of the same features and dense width), one after the other."""
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
        """F; 0 where there are no samples, when it cannot be known and is not needed."""
        lookups = len(self.ids) if self.offsets is None else len(self.offsets) - 1
        return lookups // len(self) if len(self) else 0


def _together(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """One after the other what all parts have, or None what none has."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known else None


@nb.njit(nogil=True, cache=True)
def _take_offsets(source: np.ndarray, places: np.ndarray, features: int, offsets: np.ndarray) -> None:
    """Fill offsets, CSR over (place, feature), for the samples at places; source: the offsets that they are taken from."""
    for i in range(len(places)):
        for f in range(features):
            entry = places[i] * features + f
            offsets[i * features + f + 1] = offsets[i * features + f] + source[entry + 1] - source[entry]


@nb.njit(nogil=True, cache=True)
def _take_ids(
    source: np.ndarray, ids: np.ndarray, places: np.ndarray, features: int, offsets: np.ndarray, out: np.ndarray
) -> None:
    """Copy the ids of the samples at places, all features of a sample at once, to where the new offsets have them."""
    for i in range(len(places)):
        start, end = source[places[i] * features], source[(places[i] + 1) * features]
        to = offsets[i * features]
        for j in range(end - start):
            out[to + j] = ids[start + j]


def write_piece(path: str | Path, samples: Samples, keys: np.ndarray | pa.Array | None, meta: Mapping[str, Any]) -> None:
    """Write samples, their order keys and JSON-able meta as an Arrow IPC file of one record batch.

    The batch has one row; each column is a list, so that arrays of different lengths lie in one file, unpadded and mappable.
    The bytes are a function of the arguments alone. The file appears under its name at once and whole (temporary name, then
    rename), so that writing it twice, or at the same time, is harmless.
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
    """The samples, keys and meta of a piece. Arrays are read-only views of the mapped file; nothing is read until it is used.

    Raises ScheduleError where the file is not a piece.
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
    """Cut chunks of any size into batches of `size` samples, the last one shorter. sets: the samples, at least one, of each of the sets that they
    are, one after the other: then the last batch of each is shorter.
    """
    sizes = _sizes(size, sets)
    wanted = next(sizes)
    held: list[tuple[Samples, np.ndarray]] = []
    count = 0
    for samples, numbers in chunks:
        start = 0
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
    """How many samples each batch has, if there are so many."""
    for samples in sets:
        yield from (min(size, samples - first) for first in range(0, samples, size))
    yield from repeat(size)


def _join(parts: list[tuple[Samples, np.ndarray]]) -> tuple[Samples, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    return Samples.concat([samples for samples, _ in parts]), np.concatenate([numbers for _, numbers in parts])


class Abandoned(Exception):
    """A source that was still growing will not be whole: its reading has failed, or was stopped. Whoever did that says why."""


class OrderedSource(Protocol):
    """What a schedule is compiled from: samples in their global order, in chunks of any size.

    It may still be growing. Then chunks come as they are there, and who asks for a number of samples that is not known yet waits for it.
    """

    @property
    def expected_samples(self) -> int:
        """Samples of one epoch, about: known from the beginning."""

    @property
    def training_samples(self) -> int:
        """Samples of one epoch."""

    @property
    def evaluation_samples(self) -> int:
        """Samples of one pass."""

    @property
    def evaluation_sets(self) -> tuple[int, ...]:
        """Samples of each of the sets that the evaluation samples are, one after the other; empty: they are one, without a name."""

    @property
    def shuffled(self) -> bool:
        """Whether each epoch has an order of its own; otherwise every epoch gives the same arrays."""

    @property
    def slices(self) -> Path | None:
        """Of samples that were trained before, in this order: a file of which lane took each (`compiler/serial_reader`). None: to be decided."""

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the epoch's training samples in order, each with its samples' numbers (int64)."""

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the evaluation samples in order, each with its samples' numbers (int64), from 0."""


@dataclass(frozen=True)
class PieceOrder:
    """Samples as ranges of pieces, in order: rows starts[i] .. ends[i] - 1 of piece names[i]. starts, ends: int64 [pieces]."""

    names: tuple[str, ...]
    starts: Int64s
    ends: Int64s

    @classmethod
    def whole(cls, pieces: Sequence[tuple[str, int]]) -> PieceOrder:
        """All rows of pieces given as (name, rows)."""
        rows = np.array([rows for _, rows in pieces], np.int64)
        return cls(tuple(name for name, _ in pieces), np.zeros(len(rows), np.int64), rows)

    @classmethod
    def joined(cls, orders: Sequence[PieceOrder]) -> PieceOrder:
        """Orders (at least one), one after the other."""
        return cls(
            tuple(name for order in orders for name in order.names),
            np.concatenate([order.starts for order in orders]),
            np.concatenate([order.ends for order in orders]),
        )

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
    """An OrderedSource of pieces in a folder. epochs: empty, or each epoch's order of pieces, whose keys are sample numbers; slices, evaluation_sets:
    see there.
    """

    folder: Path
    training_order: PieceOrder
    evaluation_order: PieceOrder
    epochs: tuple[PieceOrder, ...] = ()
    slices: Path | None = None
    evaluation_sets: tuple[int, ...] = ()

    @property
    def expected_samples(self) -> int:
        """Samples of one epoch."""
        return self.training_samples

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
