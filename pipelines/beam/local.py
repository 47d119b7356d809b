"""Compile in this process, which alone writes into the schedule: while the sources are read if nothing is sorted or shuffled, else after it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from foreload.base.errors import ForeloadError
from foreload.base.process import keep_freed
from foreload.pipelines.beam.order import source_of
from foreload.pipelines.beam.stages import attempt, progress_of
from foreload.pipelines.compiler.compile import Compilation
from foreload.pipelines.planning.plan import TRAINING, Plan, ReadTask, names_of, piece_of
from foreload.pipelines.planning.work_folder import give_encoding
from foreload.pipelines.samples.pieces import Abandoned, OrderedSource, PieceSource, Samples, held_out, read_order, read_piece

_POLL_SECONDS = 0.01  # between two looks for a piece


class GrowingSource:
    """An OrderedSource of what `Encode` writes, task by task, as it comes. Of a tail that is held out it gives what cannot be part of it any more.

    rows: of the sources of each of the plan's sets, about; counted: exactly, so that all numbers of samples are known from the beginning.
    """

    shuffled = False
    slices: Path | None = None

    def __init__(self, plan: Plan, tasks: Sequence[ReadTask], rows: Mapping[str, int], counted: bool) -> None:
        self._plan, self._rows, self._counted = plan, rows, counted
        self._tasks = sorted(task.name for task in tasks if task.is_training)
        self._over = threading.Event()
        self._whole = False

    def finish(self, whole: bool) -> None:
        """Nothing more will be read; whole: all has been, and the orders are there."""
        self._whole = whole
        self._over.set()

    def wait_for_samples(self) -> None:
        """Until a piece is there, or the reading is over. Raises Abandoned."""
        next(self._written(), None)
        self.check()

    @property
    def expected_samples(self) -> int:
        """Samples of one epoch, about."""
        return self._rows[TRAINING] - held_out(self._rows[TRAINING], self._plan.evaluation_fraction)

    @property
    def training_samples(self) -> int:
        """Samples of one epoch; waits for them to be read unless they are counted. Raises Abandoned."""
        return self.expected_samples if self._counted else self._read().training_samples

    @property
    def evaluation_samples(self) -> int:
        """Samples of one pass; waits for them to be read unless they are counted. Raises Abandoned."""
        if not self._counted:
            return self._read().evaluation_samples
        return sum(self._rows.values()) - self.expected_samples

    @property
    def evaluation_sets(self) -> tuple[int, ...]:
        """Samples of each set that has a name; waits for them to be read unless they are counted. Raises Abandoned."""
        if not self._counted:
            return self._read().evaluation_sets
        return tuple(self._rows[which] for which in self._plan.sets[1:]) if self._plan.settings.evaluation_sets else ()

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the training samples in order, with their numbers from 0, as they come. Raises Abandoned."""
        given = 0
        for samples in self._certain():
            yield samples, np.arange(given, given + len(samples), dtype=np.int64)
            given += len(samples)
        order = self._read().training_order
        for samples, _ in read_order(self._plan.pieces, order.slice(given, order.rows)):
            yield samples, np.arange(given, given + len(samples), dtype=np.int64)
            given += len(samples)

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Chunks of the evaluation samples in order, with their numbers from 0. Raises Abandoned."""
        return self._read().evaluation()

    def _read(self) -> PieceSource:
        """All of it, once the reading is over."""
        self._over.wait()
        self.check()
        return source_of(self._plan)

    def check(self) -> None:
        """Raise Abandoned if nothing will come of what is compiled."""
        if self._over.is_set() and not self._whole:
            raise Abandoned

    def _certain(self) -> Iterator[Samples]:
        """The first training samples, those of pieces written while it is read: all but the part that is held out of these pieces."""
        pieces: deque[Samples] = deque()
        seen = given = 0
        for samples in self._written():
            pieces.append(samples)
            seen += len(samples)
            room = seen - held_out(seen, self._plan.evaluation_fraction) - given
            while room:
                first = pieces.popleft()
                if len(first) > room:
                    pieces.appendleft(first.slice(room, len(first)))
                    first = first.slice(0, room)
                room -= len(first)
                given += len(first)
                yield first

    def _written(self) -> Iterator[Samples]:
        """The training samples as they are read, piece by piece, as long as there is something still to be read."""
        for task in self._tasks:
            saved, count = self._plan.order_path(names_of(task)), 0
            while not self._over.is_set():
                piece = self._plan.pieces / piece_of(task, count)
                if piece.exists():
                    yield read_piece(piece)[0]
                    count += 1
                elif saved.exists():  # a place whose records are all malformed has no piece, so there may be later ones
                    for name in self._plan.load(names_of(task), list[str])[count:]:
                        yield read_piece(self._plan.pieces / name)[0]
                    break
                else:
                    self._over.wait(_POLL_SECONDS)


_NAME = "Compile"


@contextlib.contextmanager
def compiling(plan: Plan, tasks: Sequence[ReadTask], rows: Mapping[str, int], counted: bool) -> Iterator[None]:
    """While it is entered, the pipeline is to read and order all tasks; it is left when the schedule is whole, or a failure is noted.

    rows, counted: as in GrowingSource.
    """
    if plan.spec.order_by is not None or plan.settings.shuffle_seed is not None:
        yield
        if not plan.failed():
            compile_here(plan, source_of(plan))
        return
    source = GrowingSource(plan, tasks, rows, counted)

    def begin() -> None:
        if plan.counted:  # what is counted is needed first
            source.wait_for_samples()
        compile_here(plan, source, source.check)

    with ThreadPoolExecutor(1) as thread:
        task = thread.submit(begin)
        try:
            yield
            source.finish(whole=not plan.failed())
            with contextlib.suppress(Abandoned):
                task.result()
        except BaseException:
            source.finish(whole=False)
            raise


def compile_here(plan: Plan, source: OrderedSource, check: Callable[[], object] = lambda: None) -> None:
    """Compile a source, in this process. check: called every now and then, and may end it by an error of its own."""
    keep_freed()
    note = progress_of(plan, _NAME)

    def progress(done: int, total: int) -> None:
        check()
        note(done, total, total)

    try:
        give_encoding(plan)
        with attempt(plan) as scratch:
            Compilation(plan.compile_settings(), plan.out).compile(source, scratch, progress)
    except ForeloadError as error:
        plan.note_failure(_NAME, error)
