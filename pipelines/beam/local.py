"""Compile in this process, which alone writes into the schedule: beside the reading, where nothing is sorted or shuffled, else after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from foreload.base.errors import ForeloadError
from foreload.base.malloc import keep_freed
from foreload.pipelines.beam.growing import GrowingSource
from foreload.pipelines.beam.order import source_of
from foreload.pipelines.beam.stages import attempt, progress_of
from foreload.pipelines.compiler.compile import Compilation
from foreload.pipelines.planning.plan import Plan, ReadTask
from foreload.pipelines.planning.work_folder import give_encoding
from foreload.pipelines.samples.piece_order import Abandoned, OrderedSource

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
