"""Open a stopped run as a model: its schedule, its dense part, and its rows on the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.reading import Expected, StoredRows, read_rows
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.kept import ordinals_after
from foreload.pipelines.schedule.reader import RowIndex, Schedule
from foreload.trainer.assembly.saved_dense import read_dense
from foreload.trainer.assembly.start import Start
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run, locked
from foreload.trainer.run.event_log import EventLog
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.model_code import check_code, code_of, note_code
from foreload.trainer.run.reach import reach
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.model_rows import ModelRows, given_ordinals, model_rows
from foreload.trainer.saved.run_rows import check_current
from foreload.trainer.saved.saved_model import Digest, SavedModel, initial_rows
from foreload.trainer.saved.stopped_stores import find_stopped_rows, opened_rows, stopped_servers, stored_rows


class StoreRowReader:
    """The rows of a stopped run's tables, including those that were never trained: a RowSource.

    Args:
        model: The run.
        stored: Its rows on the store.
        last_batches: Per lane, the number of its last write-back batch.
    """

    def __init__(self, model: SavedModel, stored: StoredRows, last_batches: Sequence[int]) -> None:
        self._model, self._stored, self._last_batches = model, stored, last_batches
        schedule = model.schedule
        self._index = RowIndex(schedule)
        # If the run stopped before the schedule's end, the index also has rows that were not
        # trained yet. Their ordinals are the ones not given by the run's step.
        self._ordinals = None
        if model.step < schedule.header.end_step - 1:
            self._ordinals = ordinals_after(schedule, model.step)

    def read(self, table: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See RowSource."""
        weights = initial_rows(self._model, table, ids)
        trained = np.zeros(len(ids), bool)
        located = self._index.find(table, ids)
        reached = np.ones(len(located.places), bool)
        if self._ordinals is not None:
            reached = located.ordinal < self._ordinals[located.lane, table]
        for lane in np.unique(located.lane[reached]):
            chosen = np.flatnonzero(reached & (located.lane == lane))
            tags = np.minimum(located.tag[chosen], self._model.step + 1)
            # The last change of a row that also changes after the run's step is not known. So any
            # tag is accepted that is no later.
            tables = np.full(len(chosen), table, np.int16)
            expected = Expected(tables, located.ordinal[chosen], located.id[chosen], tags, int(lane), tag_at_most=True)
            read = read_rows(self._stored, expected, self._last_batches[lane]).weights
            weights[located.places[chosen]] = read[:, : weights.shape[1]]
            trained[located.places[chosen]] = True
        return weights, trained


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that has stopped or ended, with its store open: a SavedModel."""

    run: Run
    manifest: Manifest
    status: Status
    job: TrainJob
    schedule: Schedule
    stored: StoredRows
    accept_model: bool = False

    @property
    def name(self) -> str:
        """The name that messages use."""
        return f"run {self.run.path}"

    @property
    def step(self) -> int:
        """The last step trained."""
        return self.status.step

    @property
    def layouts(self) -> Sequence[RowLayout]:
        """The layouts of its tables, in order."""
        return self.stored.layouts

    @property
    def features(self) -> FeatureSpec:
        """The features in its schedule's header."""
        return self.schedule.header.features

    @property
    def encoding(self) -> str | None:
        """The identity of its schedule's encoding state; None without one."""
        identity: str | None = self.schedule.header.settings.get("encoding")
        return identity

    def check_code(self) -> None:
        """See SavedModel. Other code that is accepted is noted in the run's events."""
        if self.accept_model:
            note_code(EventLog(self.run.path, self.step, self.status.term), self.name, self.manifest, code_of(self.job))
        else:
            check_code(self.name, self.manifest, self.job, str(self.run.code_copy(self.manifest)))

    def rows(self, since: int | None = None) -> Iterator[ModelRows]:
        """See SavedModel. The rows are checked against the schedule."""
        return model_rows(self.schedule, self.status.step, self.stored, self.status.last_batches, since)

    def row_counts(self) -> np.ndarray:
        """See SavedModel."""
        counts: np.ndarray = given_ordinals(self.schedule, self.status.step).sum(axis=0)
        return counts

    def row_source(self) -> StoreRowReader:
        """See SavedModel."""
        return StoreRowReader(self, self.stored, self.status.last_batches)

    def dense(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """See SavedModel."""
        return read_dense(self.run.dense(self.status.step), self.status.step)

    def digest(self) -> str:
        """See SavedModel."""
        return Digest().model(self.dense(), [layout.name for layout in self.layouts], self.rows())


def stopped_run_at(run: Run, store: Store, status: Status, accept_model: bool = False) -> StoppedRun:
    """Return a run as it is at a status, with its rows on an open store.

    Args:
        store: Open on the run's servers.
        status: Where the run stopped.
        accept_model: As for `open_stopped`.

    Raises:
        RunError: Neither the run's schedule nor what it keeps of that exists.
    """
    manifest = run.manifest
    job, schedule = manifest.training_job, schedule_of(run)
    stored = stored_rows(run, store, schedule)
    find_stopped_rows(stored, schedule, Start(status.step, status.last_batches))
    return StoppedRun(run, manifest, status, job, schedule, stored, accept_model)


@contextlib.contextmanager
def open_stopped(
    path: str, store: str | None, accept_model: bool = False, own: Callable[[Run, Store], None] = check_current
) -> Iterator[StoppedRun]:
    """Yield the stopped run in a folder; its local stores run until the context ends.

    Local stores that were written to are saved at the end.

    Args:
        path: The run's folder.
        store: URLs with passwords. If None, those of the run, with the password of the environment.
        accept_model: If True, the model may run with other code than it was trained with.
        own: Raises RunError unless the folder may do with the rows what the command does. By
            default, it checks that the folder may read them.

    Raises:
        RunError: The run has never stopped cleanly, is in use, or its folder may not use the rows.
        CacheError: A server fails.
    """
    run = Run.open(path)
    with contextlib.ExitStack() as stack:
        # Local stores serve one command at a time, so a run that has some is locked exclusively.
        run.lock = stack.enter_context(locked(run.path, alone=run.manifest.local_stores is not None))
        manifest, status = run.manifest, run.saved_status()
        if status.step < manifest.stages[0].first_step:
            newest = run.newest_checkpoint()
            then = "begins again, or says what is missing" if newest is None else f"goes on from checkpoint {newest}"
            raise RunError(f"run {path}: crashed and never stopped cleanly, so it has no dense part; --resume {then}")
        servers = stack.enter_context(stopped_servers(run, status, store))
        spared, silence = run.placement.r, manifest.training_job.store_silence
        # Without parity, no server may be missing, so wait for all of them.
        if not spared and servers.local is None:
            reach([url for url in servers.urls if url], silence)
        opened = stack.enter_context(opened_rows(run, status, servers.urls, silence, spared, own))
        # From here on the rows are known to be those of the last clean stop.
        servers.of_the_stop = True
        try:
            yield stopped_run_at(run, opened, status, accept_model)
        finally:
            servers.changed = opened.rows_written > 0
