"""Compiles in this process, which is the only one that writes into the schedule's folder.

If nothing is sorted or shuffled, it compiles while the sources are read, else after that.
"""

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

_POLL_SECONDS = 0.01  # between two checks for a new piece


class GrowingSource:
    """An OrderedSource of the output of `Encode`, task by task, as it is written.

    If a tail is held out, the source yields only samples that can no longer become part of the
    tail.
    """

    shuffled = False
    slices: Path | None = None

    def __init__(self, plan: Plan, tasks: Sequence[ReadTask], rows: Mapping[str, int], counted: bool) -> None:
        """Start with nothing read.

        Args:
            tasks: The tasks that are being read.
            rows: The number of rows of each of the plan's sets, about.
            counted: Whether `rows` is exact, so that all numbers of samples are known from the
                beginning.
        """
        self._plan, self._rows, self._counted = plan, rows, counted
        self._tasks = sorted(task.name for task in tasks if task.is_training)
        self._over = threading.Event()
        self._whole = False

    def finish(self, whole: bool) -> None:
        """Report that reading has ended.

        Args:
            whole: Whether everything was read, and the orders exist.
        """
        self._whole = whole
        self._over.set()

    def wait_for_samples(self) -> None:
        """Wait until a piece exists or reading has ended. Raises Abandoned."""
        next(self._written(), None)
        self.check()

    @property
    def expected_samples(self) -> int:
        """The samples of one epoch, about."""
        return self._rows[TRAINING] - held_out(self._rows[TRAINING], self._plan.evaluation_fraction)

    @property
    def training_samples(self) -> int:
        """The samples of one epoch.

        Unless they are counted, this waits until they are read. Raises Abandoned.
        """
        return self.expected_samples if self._counted else self._read().training_samples

    @property
    def evaluation_samples(self) -> int:
        """The samples of one pass.

        Unless they are counted, this waits until they are read. Raises Abandoned.
        """
        if not self._counted:
            return self._read().evaluation_samples
        return sum(self._rows.values()) - self.expected_samples

    @property
    def evaluation_sets(self) -> tuple[int, ...]:
        """The samples of each set that has a name.

        Unless they are counted, this waits until they are read. Raises Abandoned.
        """
        if not self._counted:
            return self._read().evaluation_sets
        return tuple(self._rows[which] for which in self._plan.sets[1:]) if self._plan.settings.evaluation_sets else ()

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """Yield chunks of the training samples in order, as they are written. Raises Abandoned.

        Each chunk comes with its samples' numbers, from 0.
        """
        given = 0
        for samples in self._certain():
            yield samples, np.arange(given, given + len(samples), dtype=np.int64)
            given += len(samples)
        order = self._read().training_order
        for samples, _ in read_order(self._plan.pieces, order.slice(given, order.rows)):
            yield samples, np.arange(given, given + len(samples), dtype=np.int64)
            given += len(samples)

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Return chunks of the evaluation samples in order. Raises Abandoned.

        Each chunk comes with its samples' numbers, from 0.
        """
        return self._read().evaluation()

    def _read(self) -> PieceSource:
        """Wait until reading has ended, and return the whole source."""
        self._over.wait()
        self.check()
        return source_of(self._plan)

    def check(self) -> None:
        """Raise Abandoned if reading has ended early, so that compiling is useless."""
        if self._over.is_set() and not self._whole:
            raise Abandoned

    def _certain(self) -> Iterator[Samples]:
        """Yield the training samples that are certain while the sources are being read.

        These are the samples of the pieces written so far, without the tail that is held out of
        these.
        """
        pieces: deque[Samples] = deque()
        seen = given = 0
        for samples in self._written():
            pieces.append(samples)
            seen += len(samples)
            # `seen - held_out(seen)` never shrinks, so a sample in front of the tail stays a
            # training sample.
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
        """Yield the training samples piece by piece as they are written, until reading ends."""
        for task in self._tasks:
            saved, count = self._plan.order_path(names_of(task)), 0
            while not self._over.is_set():
                piece = self._plan.pieces / piece_of(task, count)
                if piece.exists():
                    yield read_piece(piece)[0]
                    count += 1
                elif saved.exists():
                    # The task is done. A place whose records are all malformed has no piece, so
                    # later places may have pieces.
                    for name in self._plan.load(names_of(task), list[str])[count:]:
                        yield read_piece(self._plan.pieces / name)[0]
                    break
                else:
                    self._over.wait(_POLL_SECONDS)


_NAME = "Compile"


@contextlib.contextmanager
def compiling(plan: Plan, tasks: Sequence[ReadTask], rows: Mapping[str, int], counted: bool) -> Iterator[None]:
    """Compile the schedule while and after the body runs.

    The body runs the pipeline that reads and orders all tasks. When the context is left, the
    schedule is complete, or a failure is recorded.

    Args:
        rows: As in GrowingSource.
        counted: As in GrowingSource.
    """
    if plan.spec.order_by is not None or plan.settings.shuffle_seed is not None:
        yield
        if not plan.failed():
            compile_here(plan, source_of(plan))
        return
    source = GrowingSource(plan, tasks, rows, counted)

    def begin() -> None:
        # The compiler needs the vocabularies and scales. They exist once the first piece is
        # encoded.
        if plan.counted:
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
    """Compile a source in this process.

    Args:
        check: Called every now and then. It may raise an error to stop the compilation.
    """
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
