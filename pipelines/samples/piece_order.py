"""Samples in their global order, as ranges of pieces in a folder: what a schedule is compiled from. (docs/definitions.md, Order)"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from foreload.base.arrays import Int64s
from foreload.pipelines.samples.external_sort import Keys
from foreload.pipelines.samples.pieces import Samples, read_piece


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
        """Of samples that were trained before, in this order: a file of which lane took each (`compiler/kept_slices`). None: to be decided."""

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
