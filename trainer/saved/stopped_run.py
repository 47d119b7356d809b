"""Opening a saved run, one that does not train: its schedule, its dense part, and its rows on the store."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.errors import StoreError
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.saved_dense import read_dense
from foreload.trainer.assembly.start import Start
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_layouts import layouts_of
from foreload.trainer.run.directory import Run, locked
from foreload.trainer.run.event_log import EventLog
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.model_code import check_code, code_of, note_code
from foreload.trainer.run.reach import reach
from foreload.trainer.run.servers import asked, open_stores, servers_of
from foreload.trainer.saved.digest import Digest
from foreload.trainer.saved.expected_rows import given_ordinals
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.model_rows import ModelRows, model_rows
from foreload.trainer.saved.row_check import check_rows
from foreload.trainer.saved.rows_at_rest import StoreRowReader, stored_rows_at
from foreload.trainer.saved.run_rows import check_current


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that was stopped or has ended, with its store open: a SavedModel."""

    run: Run
    manifest: Manifest
    status: Status
    job: TrainJob
    schedule: Schedule
    layouts: list[RowLayout]
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
    def features(self) -> FeatureSpec:
        """Those of its schedule."""
        return self.schedule.header.features

    @property
    def encoding(self) -> str | None:
        """The identity of its schedule's encoding state."""
        identity: str | None = self.schedule.header.settings.get("encoding")
        return identity

    @property
    def last_batches(self) -> tuple[int, ...]:
        """Per lane the number of its last write-back batch."""
        return tuple(int(self.status.batches[str(lane)]) for lane in range(self.manifest.lanes))

    def check_code(self) -> None:
        """See SavedModel; what is accepted is noted in the run's events."""
        if self.accept_model:
            note_code(EventLog(self.run.path, self.step, self.status.term), self.name, self.manifest, code_of(self.job))
        else:
            check_code(self.name, self.manifest, self.job, str(self.run.code_copy(self.manifest)))

    def rows(self, since: int | None = None) -> Iterator[ModelRows]:
        """See SavedModel; checked against the schedule."""
        return model_rows(self.schedule, self.status.step, self.stored, self.last_batches, since)

    def row_counts(self) -> np.ndarray:
        """See SavedModel."""
        counts: np.ndarray = given_ordinals(self.schedule, self.status.step).sum(axis=0)
        return counts

    def row_source(self) -> StoreRowReader:
        """See SavedModel."""
        return StoreRowReader(self, self.stored, self.last_batches)

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
    rows = layouts_of(job, schedule.header.features)
    at = Start(status.step, tuple(int(status.batches[str(lane)]) for lane in range(manifest.lanes)))
    stored = stored_rows_at(store, run.placement, rows, manifest.namespace, schedule, at)
    return StoppedRun(run, manifest, status, job, schedule, rows, stored, accept_model)


def leave_stores(local: LocalStores, of_the_stop: bool, changed: bool) -> None:
    """End the servers of a command that is through. of_the_stop: their rows are those of the last clean stop; changed: some were written since."""
    if not of_the_stop:
        # What servers that were found running have must not take the place of what was saved.
        local.discard()
        return
    try:
        local.leave(changed)
    except StoreError as error:
        if changed:
            raise
        # What was asked is known; and servers that still could not save are left as they were found.
        sys.stderr.write(f"foreload: warning: {error}\n")


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
        local = open_stores(run, status)
        opened: Store | None = None
        of_the_stop = False
        if local is not None:
            urls = local.start().urls
            stack.callback(lambda: leave_stores(local, of_the_stop, changed=opened is not None and opened.rows_written > 0))
        else:
            urls = servers_of(run, store)
        spared = run.placement.r
        if not spared and local is None:
            reach([url for url in urls if url], manifest.training_job.store_silence)
        opened = stack.enter_context(Store.connect(asked(urls), manifest.training_job.store_silence, spared))
        # Another run may have taken the name since, with rows that look the same.
        claim(opened, manifest.namespace, manifest.identity, "resume", spared)
        own(run, opened)
        check_rows(run, opened, status)
        of_the_stop = True
        yield stopped_run_at(run, opened, status, accept_model)
