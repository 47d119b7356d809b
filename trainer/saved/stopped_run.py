"""Open a stopped run as a model: its schedule, its dense part, and its rows on the store, by table and id."""

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
from foreload.trainer.saved.at_rest import find_at_rest, opened_rows, servers_at_rest, stored_rows
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.model_rows import ModelRows, given_ordinals, model_rows
from foreload.trainer.saved.run_rows import check_current
from foreload.trainer.saved.saved_model import Digest, SavedModel, initial_rows


class StoreRowReader:
    """The rows of a saved run's tables, also those that were never trained: a RowSource. stored, last_batches: its rows on the store, and per lane
    the number of its last write-back batch.
    """

    def __init__(self, model: SavedModel, stored: StoredRows, last_batches: Sequence[int]) -> None:
        self._model, self._stored, self._last_batches = model, stored, last_batches
        schedule = model.schedule
        self._index = RowIndex(schedule)
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
            # The last change of a row that changes after the run's step is not known, so any tag up to that is taken.
            tables = np.full(len(chosen), table, np.int16)
            expected = Expected(tables, located.ordinal[chosen], located.id[chosen], tags, int(lane), tag_at_most=True)
            read = read_rows(self._stored, expected, self._last_batches[lane]).weights
            weights[located.places[chosen]] = read[:, : weights.shape[1]]
            trained[located.places[chosen]] = True
        return weights, trained


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that was stopped or has ended, with its store open: a SavedModel."""

    run: Run
    manifest: Manifest
    status: Status
    job: TrainJob
    schedule: Schedule
    stored: StoredRows
    accept_model: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"run {self.run.path}"

    @property
    def step(self) -> int:
        """The last one trained."""
        return self.status.step

    @property
    def layouts(self) -> Sequence[RowLayout]:
        """Of its tables, in order."""
        return self.stored.layouts

    @property
    def features(self) -> FeatureSpec:
        """Those of its schedule."""
        return self.schedule.header.features

    @property
    def encoding(self) -> str | None:
        """The identity of its schedule's encoding state."""
        identity: str | None = self.schedule.header.settings.get("encoding")
        return identity

    def check_code(self) -> None:
        """See SavedModel; what is accepted is noted in the run's events."""
        if self.accept_model:
            note_code(EventLog(self.run.path, self.step, self.status.term), self.name, self.manifest, code_of(self.job))
        else:
            check_code(self.name, self.manifest, self.job, str(self.run.code_copy(self.manifest)))

    def rows(self, since: int | None = None) -> Iterator[ModelRows]:
        """See SavedModel; checked against the schedule."""
        return model_rows(self.schedule, self.status.step, self.stored, self.status.last_batches, since)

    def row_counts(self) -> np.ndarray:
        """See SavedModel."""
        counts: np.ndarray = given_ordinals(self.schedule, self.status.step).sum(axis=0)
        return counts

    def row_source(self) -> StoreRowReader:
        """See SavedModel."""
        return StoreRowReader(self, self.stored, self.status.last_batches)

    def dense(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Parameters by name, and optimizer state by "<parameter>/<key>"."""
        return read_dense(self.run.dense(self.status.step), self.status.step)

    def digest(self) -> str:
        """The digest of the model (docs/definitions.md, Digest), 64 hexadecimal digits."""
        return Digest().model(self.dense(), [layout.name for layout in self.layouts], self.rows())


def stopped_run_at(run: Run, store: Store, status: Status, accept_model: bool = False) -> StoppedRun:
    """A run as it is at `status`, with its rows on an open store; accept_model: as for `open_stopped`.

    Raises RunError where neither its schedule nor what it keeps of that is there.
    """
    manifest = run.manifest
    job, schedule = manifest.training_job, schedule_of(run)
    stored = stored_rows(run, store, schedule)
    find_at_rest(stored, schedule, Start(status.step, status.last_batches))
    return StoppedRun(run, manifest, status, job, schedule, stored, accept_model)


@contextlib.contextmanager
def open_stopped(
    path: str, store: str | None, accept_model: bool = False, own: Callable[[Run, Store], None] = check_current
) -> Iterator[StoppedRun]:
    """The run in a folder, its local stores started for as long as the context lasts.

    store: URLs with passwords; those of the run, with the password of the environment, by default. accept_model: its model may be run with other code
    than it was trained with. own: raises RunError unless the folder may do with the rows what the command does: by default, read them. Local
    stores to which something was written are saved at the end. Raises RunError and CacheError.
    """
    run = Run.open(path)
    with contextlib.ExitStack() as stack:
        # Its local stores are for one command at a time.
        run.lock = stack.enter_context(locked(run.path, alone=run.manifest.local_stores is not None))
        manifest, status = run.manifest, run.saved_status()
        if status.step < manifest.stages[0].first_step:
            newest = run.newest_checkpoint()
            then = "begins again, or says what is missing" if newest is None else f"goes on from checkpoint {newest}"
            raise RunError(f"run {path}: was broken off and never stopped cleanly, so it has no dense part; --resume {then}")
        servers = stack.enter_context(servers_at_rest(run, status, store))
        spared, silence = run.placement.r, manifest.training_job.store_silence
        if not spared and servers.local is None:
            reach([url for url in servers.urls if url], silence)
        opened = stack.enter_context(opened_rows(run, status, servers.urls, silence, spared, own))
        servers.of_the_stop = True
        try:
            yield stopped_run_at(run, opened, status, accept_model)
        finally:
            servers.changed = opened.rows_written > 0
