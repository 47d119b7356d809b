"""The stages that bring pieces into the global order.

They sort by a column, hold out a tail, and shuffle each epoch. Sort and shuffle are external sorts
(pipelines/samples/external_sort.py): sorted runs are cut by key into buckets, and one worker sorts
each bucket. A sort writes the samples once more. A shuffle writes them twice for every epoch, as
runs and as buckets. The stages output numbers and names only; orders and bounds are in files of the
work folder (`Plan.save`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from foreload.pipelines.beam.stages import GroupStage, Stage
from foreload.pipelines.errors import SourceError
from foreload.pipelines.planning.plan import EVALUATION, TRAINING, TRAINING_ROWS, Plan, piece_name
from foreload.pipelines.samples.external_sort import ShuffledKeys, buckets, shuffle_keys, stable_order
from foreload.pipelines.samples.pieces import (
    PieceOrder,
    PieceRuns,
    PieceSource,
    gather,
    held_out,
    read_order,
    read_piece,
    write_piece,
)


def load_orders(plan: Plan, name: str) -> dict[str, PieceOrder]:
    """Return the order of each set after a stage.

    Args:
        name: The name under which the stage saved the orders. "read" and "sorted" have the sets of
            `Plan.sets`. "cut" has all training samples and all evaluation samples.
    """
    return plan.load(name, dict[str, PieceOrder])


def save_cut(plan: Plan, training: PieceOrder, sets: Sequence[PieceOrder]) -> None:
    """Save the orders "cut" of the training samples and of the evaluation samples.

    Args:
        training: The order of the training samples.
        sets: The order of each evaluation set; they follow one another.
    """
    plan.save("cut", {TRAINING: training, EVALUATION: PieceOrder.joined(sets)})
    if plan.settings.evaluation_sets:
        plan.save("sets", [order.rows for order in sets])


def source_of(plan: Plan) -> PieceSource:
    """Return the source to compile the schedule from, after all stages of this module have run."""
    orders = load_orders(plan, "cut")
    epochs: tuple[PieceOrder, ...] = ()
    if plan.settings.shuffle_seed is not None:
        epochs = tuple(plan.load("epochs", list[PieceOrder]))
    sets = tuple(plan.load("sets", list[int])) if plan.settings.evaluation_sets else ()
    return PieceSource(plan.pieces, orders[TRAINING], orders[EVALUATION], epochs, evaluation_sets=sets)


class CutBuckets(Stage):
    """The name of the orders as read -> (set, bucket) for every bucket.

    A bucket is a part of the order by key that fits in memory. The bucket's file holds, for each
    piece, the range that lies in the bucket.
    """

    def outputs(self, element: Any) -> Iterator[Any]:
        for which, order in load_orders(self.plan, "read").items():
            parts = list(buckets(PieceRuns(self.plan.pieces, order.names), order.starts, order.ends, self.plan.piece_rows))
            for bucket, (starts, ends) in enumerate(parts):
                kept = np.flatnonzero(ends > starts)
                part = PieceOrder(tuple(order.names[i] for i in kept), starts[kept], ends[kept])
                self.plan.save(_bucket_name(which, bucket), part)
            yield from ((which, bucket) for bucket in range(len(parts)))


class SortBucket(Stage):
    """(set, bucket) -> (set, bucket, piece, rows): the bucket's samples as one sorted piece."""

    def name(self, element: Any) -> str:
        return _bucket_name(*element)

    def outputs(self, element: Any) -> Iterator[Any]:
        which, bucket = element
        part = self.plan.load(_bucket_name(which, bucket), PieceOrder)
        samples, keys = gather(self.plan.pieces, part)
        name = piece_name("sorted", which, bucket)
        # The pieces of a bucket are in the order of their names, which is that of the sources. A
        # stable sort therefore leaves ties in the order of the sources.
        write_piece(self.plan.pieces / name, samples.take(stable_order(keys)), None, {})
        yield which, bucket, name, len(samples)


def _bucket_name(which: str, bucket: int) -> str:
    return piece_name("bucket", which, bucket)


class CollectSorted(GroupStage):
    """All sorted pieces -> the orders that they make."""

    def together(self, values: list[Any]) -> Iterator[Any]:
        orders = {
            which: PieceOrder.whole([(name, rows) for of, _, name, rows in values if of == which]) for which in self.plan.sets
        }
        self.plan.save("sorted", orders)
        yield "sorted"


class HoldOut(Stage):
    """The name of the orders so far -> the orders "cut", final except for a shuffle.

    "cut" has the training and the evaluation samples. The stage outputs 0, 1, ...: the places of
    the ranges of the training order. A range is a piece or a part of one.

    Raises:
        SourceError: If a set that the user asked for is empty.
    """

    def outputs(self, element: str) -> Iterator[Any]:
        orders = load_orders(self.plan, element)
        if self.plan.evaluation_fraction:
            order = orders[TRAINING]
            held = held_out(order.rows, self.plan.evaluation_fraction)
            # If the training samples were counted, their number remains, even if held-out records
            # have turned out to be malformed since.
            kept = self.plan.load(TRAINING_ROWS, int) if self.plan.counted else order.rows - held
            orders = {TRAINING: order.slice(0, kept), EVALUATION: order.slice(kept, order.rows)}
        if orders[TRAINING].rows == 0 and not self.plan.evaluation_only:
            raise SourceError("source: has no training samples; give files with at least one well-formed record")
        if self.plan.evaluation_fraction and orders[EVALUATION].rows == 0:
            raise SourceError(
                f"--eval-fraction: must hold out at least one of {orders[TRAINING].rows} samples; "
                f"got {self.plan.evaluation_fraction}; give a larger one, or --eval-source"
            )
        save_cut(self.plan, orders[TRAINING], [orders[which] for which in self.plan.sets if which != TRAINING])
        # Without at least one output, the stages that follow would never run.
        yield from range(max(len(orders[TRAINING].names), 1))


class SortRuns(Stage):
    """The place of a training range -> a run for every epoch. Outputs the place.

    A run has the range's samples sorted by shuffle key, with their numbers as keys.
    """

    def name(self, element: int) -> str:
        return str(element)

    def outputs(self, element: int) -> Iterator[Any]:
        order = load_orders(self.plan, "cut")[TRAINING]
        first = int((order.ends[:element] - order.starts[:element]).sum())  # samples in earlier ranges
        samples, _ = next(read_order(self.plan.pieces, order.range(element)))
        numbers = np.arange(first, first + len(samples), dtype=np.int64)
        seed = self.plan.settings.shuffle_seed
        assert seed is not None
        for epoch in range(self.plan.settings.epochs):
            places = stable_order(shuffle_keys(seed, self.plan.first_epoch + epoch, numbers + self.plan.first_number))
            write_piece(self.plan.pieces / _run_name(epoch, element), samples.take(places), pa.array(numbers[places]), {})
        yield element


def _run_name(epoch: int, index: int) -> str:
    return piece_name("run", epoch, index)


class CutShuffle(GroupStage):
    """All runs -> (epoch, bucket, buckets): equal parts of the shuffle keys' range, 0 .. 2^64 - 1.

    Each part has about piece_rows samples. Keys are hashes, so equal parts of their range hold
    about as many samples each, and no keys have to be sampled to find splitters.
    """

    def together(self, values: list[Any]) -> Iterator[Any]:
        self.plan.save("runs", len(values))
        count = -(-load_orders(self.plan, "cut")[TRAINING].rows // self.plan.piece_rows)
        for epoch in range(self.plan.settings.epochs):
            yield from ((epoch, bucket, count) for bucket in range(count))


class ShuffleBucket(Stage):
    """(epoch, bucket, buckets) -> (epoch, bucket, piece, rows).

    The piece has the samples of an epoch that fall into the bucket, in the epoch's order.
    """

    def name(self, element: Any) -> str:
        return piece_name(*element)

    def outputs(self, element: Any) -> Iterator[Any]:
        epoch, bucket, count = element
        seed = self.plan.settings.shuffle_seed
        assert seed is not None
        low, high = (bucket << 64) // count, (bucket + 1 << 64) // count  # shuffle keys: low .. high - 1
        names, starts, ends = [], [], []
        for index in range(self.plan.load("runs", int)):
            run_numbers = read_piece(self.plan.pieces / _run_name(epoch, index))[1]
            assert run_numbers is not None
            keys = ShuffledKeys(seed, self.plan.first_epoch + epoch, run_numbers.to_numpy(), self.plan.first_number)
            start, end = bisect_left(keys, low), bisect_left(keys, high)
            if end > start:
                names.append(_run_name(epoch, index))
                starts.append(start)
                ends.append(end)
        if not names:
            return
        samples, column = gather(self.plan.pieces, PieceOrder(tuple(names), np.array(starts), np.array(ends)))
        numbers = column.to_numpy()
        places = stable_order(shuffle_keys(seed, self.plan.first_epoch + epoch, numbers + self.plan.first_number))
        name = piece_name("epoch", epoch, bucket)
        write_piece(self.plan.pieces / name, samples.take(places), pa.array(numbers[places]), {})
        yield epoch, bucket, name, len(samples)


class CollectShuffled(GroupStage):
    """All shuffled pieces -> the order of every epoch."""

    def together(self, values: list[Any]) -> Iterator[Any]:
        epochs = range(self.plan.settings.epochs)
        orders = [PieceOrder.whole([(name, rows) for e, _, name, rows in values if e == epoch]) for epoch in epochs]
        self.plan.save("epochs", orders)
        yield "shuffled"
