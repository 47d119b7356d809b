"""Compiles more epochs of a schedule's own samples, in this process.

The samples are taken from the schedule's files, ordered by its rules, and compiled. The sample
files of its first epoch hold all samples, slice by slice, and map each lookup to one of the step's
rows. The moves identify these rows. So the raw logs are not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from foreload.base.errors import ForeloadError
from foreload.pipelines.beam.local import compile_here
from foreload.pipelines.beam.order import CollectShuffled, CutShuffle, ShuffleBucket, SortRuns, load_orders, save_cut, source_of
from foreload.pipelines.compiler.serial_reader import KeptSlices
from foreload.pipelines.planning.plan import TRAINING, Plan, piece_name
from foreload.pipelines.samples.column_counts import ColumnCounts
from foreload.pipelines.samples.convert import Rejected
from foreload.pipelines.samples.pieces import PieceOrder, Samples, gather, write_piece
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import empty_slots, local_rows, rows_used

_BUFFERED_PIECES = 16  # samples of about this many pieces are held in memory before they are cut


def compile_again(plan: Plan, parent: Schedule) -> None:
    """Compile more epochs of a parent's samples.

    The plan's work folder exists. Failures that the user can fix are recorded there; others are
    raised.
    """
    try:
        slices = _write_samples(plan, parent)
        if plan.settings.shuffle_seed is not None:
            _shuffle(plan)
    except ForeloadError as error:
        plan.note_failure("Again", error)
        return
    nothing = ColumnCounts.none(plan.spec)
    plan.save("rejected", Rejected(0, []))
    plan.save("columns", {"training": nothing, "evaluation": nothing})
    compile_here(plan, replace(source_of(plan), slices=slices))


def _write_samples(plan: Plan, parent: Schedule) -> Path | None:
    """Write pieces of all samples, in the order of their numbers, and save their orders.

    Returns:
        The file that records which lane took each sample, if later epochs are to have the same
            slices (docs/definitions.md, "Steps and slices"); else None.
    """
    header = parent.header
    training, evaluation = _Pieces(plan, "training"), _Pieces(plan, "evaluation")
    path = plan.work / "slices"
    kept = header.shuffle_seed is None and header.lanes > 1 and header.placement == "locality"
    with closing(KeptSlices(path)) as slices:
        for kind, lanes in _first_of_all(parent):
            numbers = np.concatenate([of_lane for _, of_lane in lanes])
            if kind == "train" and kept:
                owner = np.repeat(np.arange(len(lanes), dtype=np.uint8), [len(of_lane) for _, of_lane in lanes])
                slices.keep_lanes(owner[np.argsort(numbers)])
            pieces = training if kind == "train" else evaluation
            pieces.add(
                Samples.concat([samples for samples, _ in lanes]), numbers - (header.first_number if kind == "train" else 0)
            )
    order, ends = evaluation.in_order(), list(accumulate((samples for _, samples in header.evaluation_sets), initial=0))
    sets = [order.slice(first, last) for first, last in pairwise(ends)] or [order]
    save_cut(plan, training.in_order(), sets)
    return path if kept else None


def _first_of_all(parent: Schedule) -> Iterator[tuple[str, list[tuple[Samples, np.ndarray]]]]:
    """Yield every step of the first epoch and of the first evaluation pass.

    Yields:
        The step's kind, and for each lane its samples and their numbers.
    """
    header, occupants = parent.header, empty_slots(parent)
    pass_steps = sum(header.set_steps)
    for event in parent.events():
        if event.kind == "train" and event.step >= header.first_step + header.steps_per_epoch:
            return
        if event.kind == "evaluate" and event.step >= pass_steps:
            continue
        lanes, rows = rows_used(parent, event, occupants)
        parts = []
        for number, moves in enumerate(lanes):
            ids = local_rows(lanes, rows, number)["id"][moves.index]
            offsets = None if moves.offsets is None else moves.offsets.astype(np.int64)
            samples = Samples(moves.labels, moves.dense, ids, offsets, moves.weights, moves.groups)
            parts.append((samples, moves.numbers))
        yield event.kind, parts


class _Pieces:
    """Turns samples that come in any order into pieces by their numbers, from 0.

    As in any external sort, the samples are first cut by number, and then each piece is sorted.
    """

    def __init__(self, plan: Plan, which: str) -> None:
        self._plan, self._which = plan, which
        self._held: list[tuple[Samples, np.ndarray]] = []
        self._count = self._parts = 0
        self._cut: dict[int, list[tuple[str, int]]] = {}  # piece -> (name, samples) of its parts

    def add(self, samples: Samples, numbers: np.ndarray) -> None:
        """Add samples; `numbers` is int64 [samples]."""
        self._held.append((samples, numbers))
        self._count += len(samples)
        if self._count >= _BUFFERED_PIECES * self._plan.piece_rows:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        samples = Samples.concat([samples for samples, _ in self._held])
        numbers = np.concatenate([numbers for _, numbers in self._held])
        for piece in np.unique(numbers // self._plan.piece_rows).tolist():
            places = np.flatnonzero(numbers // self._plan.piece_rows == piece)
            name = piece_name("part", self._which, piece, self._parts)
            write_piece(self._plan.pieces / name, samples.take(places), pa.array(numbers[places]), {})
            self._cut.setdefault(piece, []).append((name, len(places)))
        self._held, self._count = [], 0
        self._parts += 1

    def in_order(self) -> PieceOrder:
        """Return the order of all pieces, and delete the parts from which they were made."""
        self._flush()
        made = []
        for piece, parts in sorted(self._cut.items()):
            samples, numbers = gather(self._plan.pieces, PieceOrder.whole(parts))
            name = piece_name(self._which, piece)
            write_piece(self._plan.pieces / name, samples.take(np.argsort(numbers.to_numpy())), None, {})
            made.append((name, len(samples)))
            for part, _ in parts:
                os.unlink(self._plan.pieces / part)
        return PieceOrder.whole(made)


def _shuffle(plan: Plan) -> None:
    """Run the stages of a shuffle (`order`), one after the other."""
    places = range(max(len(load_orders(plan, "cut")[TRAINING].names), 1))
    runs = [place for element in places for place in SortRuns(plan).outputs(element)]
    buckets = list(CutShuffle(plan).together(runs))
    made = [piece for bucket in buckets for piece in ShuffleBucket(plan).outputs(bucket)]
    list(CollectShuffled(plan).together(made))
