"""A checkpoint as a model, without a store.

It gives the rows and the dense part to `evaluate`, `predict`, `lookup`, `export` and `digest`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from foreload.base.files import is_full
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.saved_dense import read_dense
from foreload.trainer.checkpoints.contents import MANIFEST, Checkpoint
from foreload.trainer.checkpoints.row_files import CheckpointRows, OpenRows, whole_copy
from foreload.trainer.errors import CheckpointError, RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import CHECKPOINTS, KEPT
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.model_code import check_code, code_of, note_code
from foreload.trainer.saved.model_rows import ModelRows, RowsByTable
from foreload.trainer.saved.saved_model import Digest, SavedModel, check_fitting, initial_rows
from foreload.trainer.saved.stopped_run import open_stopped
from foreload.trainer.storage import place

_ROWS = 1 << 16  # rows that are yielded at once


def dense_of(checkpoint: Checkpoint) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the parameters by name, and the optimizer state by "<parameter>/<key>".

    Raises RunError.
    """
    with checkpoint.local_dense() as path:
        return read_dense(path, checkpoint.contents.step)


def rows_by_id(checkpoint: Checkpoint, tables: Collection[int] | None = None) -> Iterator[ModelRows]:
    """Yield every row of a checkpoint whose files were verified, by (table, id).

    The call holds 16 bytes per row of one table; everything else is mapped. An increment, and a
    checkpoint with rounded weights, is first copied with all rows into a temporary folder (TMPDIR).

    Args:
        tables: Yield the rows of these tables only.

    Raises:
        CheckpointError: A file is damaged, or the temporary folder cannot be written to.
    """
    if checkpoint.is_mappable:
        yield from _mapped_by_id(checkpoint, tables)
        return
    with tempfile.TemporaryDirectory(prefix="foreload-") as folder:
        try:
            copy = whole_copy(checkpoint, Path(folder))
        except OSError as error:
            why = "is full" if is_full(error) else f"cannot be written to: {error.strerror}"
            raise CheckpointError(
                f"checkpoint {checkpoint.place}: its rows are assembled in {folder}, which {why}; set TMPDIR to a folder with room for a checkpoint"
            ) from error
        yield from _mapped_by_id(copy, tables)


def _mapped_by_id(checkpoint: Checkpoint, tables: Collection[int] | None) -> Iterator[ModelRows]:
    for table, layout in enumerate(checkpoint.contents.tables):
        if tables is not None and table not in tables:
            continue
        files = mapped_rows(checkpoint, table)
        if not files:
            continue
        # Sort the ids of all files of the table, and gather each batch of rows from the files that
        # have them.
        ids = np.concatenate([file.id for file in files])
        starts = np.cumsum([0, *(len(file.id) for file in files)])
        order = np.argsort(ids, kind="stable")
        for first in range(0, len(order), _ROWS):
            places = order[first : first + _ROWS]
            weights = np.empty((len(places), layout.width), np.float32)
            state = np.empty((len(places), layout.state_width), np.float32)
            tags = np.empty(len(places), np.int32)
            file_of = np.searchsorted(starts, places, side="right") - 1
            for number in np.unique(file_of):
                own = np.flatnonzero(file_of == number)
                at = places[own] - starts[number]
                tags[own], weights[own], state[own] = files[number].tag[at], files[number].weights[at], files[number].state[at]
            yield ModelRows(table, ids[places], tags, weights, state)


def mapped_rows(checkpoint: Checkpoint, table: int) -> list[CheckpointRows]:
    """Return the rows of a table's files, mapped.

    The checkpoint must be mappable, and the caller has verified its files.
    """
    of_table = (file for file in checkpoint.contents.rows if file.table == table)
    layout = checkpoint.contents.tables[table]
    return [OpenRows(pa.memory_map(str(checkpoint.at(file))).read_buffer(), file, layout).part(0, file.rows) for file in of_table]


def digest_of(checkpoint: Checkpoint) -> str:
    """Return the digest of a checkpoint whose files were verified (docs/definitions.md, Digest).

    It has 64 hexadecimal digits. Raises CheckpointError.
    """
    tables = [layout.name for layout in checkpoint.contents.tables]
    return Digest().model(dense_of(checkpoint), tables, rows_by_id(checkpoint))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint as a SavedModel. If its files are local, they were verified.

    Attributes:
        schedule_path: The present location of its schedule. If None, the former location is tried.
        accept_model: If True, the model may run with other code than it was trained with.
    """

    checkpoint: Checkpoint
    schedule_path: str | None = None
    accept_model: bool = False

    @property
    def name(self) -> str:
        """The name that messages use."""
        return f"checkpoint {self.checkpoint.place}"

    @property
    def step(self) -> int:
        """The last step trained."""
        return self.checkpoint.contents.step

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of a run that has the rows as they are read from the checkpoint."""
        contents = self.checkpoint.contents
        return replace(contents.run, inexact=contents.inexact)

    @cached_property
    def job(self) -> TrainJob:
        """The job of its run."""
        return self.manifest.training_job

    @property
    def features(self) -> FeatureSpec:
        """The features in its schedule's header."""
        return self.checkpoint.contents.features

    @property
    def encoding(self) -> str | None:
        """The identity of its schedule's encoding state."""
        return self.checkpoint.contents.encoding

    @property
    def layouts(self) -> tuple[RowLayout, ...]:
        """The layouts of its tables, in order."""
        return self.checkpoint.contents.tables

    @cached_property
    def schedule(self) -> Schedule:
        """See SavedModel.

        If `schedule_path` is given, the schedule must be there. If not, it is looked for where it
        was and, if the checkpoint is in its run's folder, in what the run keeps.
        """
        if self.schedule_path is not None:
            return check_fitting(self, Schedule(self.schedule_path))
        stage = self.manifest.stages[-1]
        places, folder = [Path(stage.path)], self.checkpoint.place.absolute().parent
        if isinstance(folder, Path) and folder.name == CHECKPOINTS:
            places.append(folder.parent / KEPT / stage.identity[:16])
        # If no place has it, the error says what is wrong with the first one.
        why = f"{stage.path} is now a different schedule"
        for path in places:
            try:
                schedule = Schedule(path)
            except ScheduleError as error:
                why = str(error) if path == places[0] else why
                continue
            if schedule.identity == stage.identity:
                return schedule
        raise RunError(
            f"{self.name}: this needs the schedule that it was trained on: {why}; say where it is now: --schedule, or SCHEDULE of evaluate"
        )

    def check_code(self) -> None:
        """See SavedModel."""
        if self.accept_model:
            note_code(None, self.name, self.manifest, code_of(self.job))
        else:
            check_code(self.name, self.manifest, self.job, self.checkpoint.code_copy)

    def rows(self, since: int | None = None) -> Iterator[ModelRows]:
        """See SavedModel."""
        rows = rows_by_id(self.checkpoint)
        return rows if since is None else (some.changed_after(since) for some in rows)

    def row_counts(self) -> np.ndarray:
        """See SavedModel."""
        counts: np.ndarray = np.array(self.checkpoint.contents.ordinals, np.int64).sum(axis=0)
        return counts

    def dense(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """See SavedModel."""
        return dense_of(self.checkpoint)

    def row_source(self) -> _SortedRows:
        """See SavedModel."""
        return _SortedRows(self)

    def digest(self) -> str:
        """See SavedModel."""
        return digest_of(self.checkpoint)


class _SortedRows:
    """The rows of a checkpoint's tables, including those that were never trained: a RowSource.

    A table is read when it is first asked for; if the checkpoint cannot be mapped, all tables are
    read at once. The ids are held, 8 bytes a row, and the weights are in a temporary file without a
    name, by ascending id.
    """

    def __init__(self, model: SavedCheckpoint) -> None:
        self._model = model
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, table: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See RowSource."""
        if table not in self._tables:
            # To read one table of a checkpoint that cannot be mapped, all its rows must be put
            # together.
            self._load([table] if self._model.checkpoint.is_mappable else range(len(self._model.layouts)))
        known, weights = self._tables[table]
        # Ids that were not trained keep their initial weights.
        places = np.searchsorted(known, ids)
        there = places < len(known)
        there[there] = known[places[there]] == ids[there]
        found = initial_rows(self._model, table, ids)
        found[there] = weights[places[there]]
        return found, there

    def _load(self, tables: Sequence[int]) -> None:
        batches = RowsByTable(rows_by_id(self._model.checkpoint, tables))
        for table in tables:
            width, ids = self._model.layouts[table].width, [np.empty(0, np.int64)]
            with tempfile.TemporaryFile() as file:
                for batch in batches.of(table):
                    ids.append(batch.ids)
                    file.write(np.ascontiguousarray(batch.weights).data)
                file.flush()
                known = np.concatenate(ids)
                weights = np.empty((0, width), np.float32)
                if len(known):
                    weights = np.memmap(file, np.float32, "r", shape=(len(known), width))
            self._tables[table] = known, weights


def names_checkpoint(path: str) -> bool:
    """Return whether a path is that of a checkpoint; every URL is taken for one.

    Raises CheckpointError if a URL is not valid.
    """
    folder = place(path)
    return not isinstance(folder, Path) or (folder / MANIFEST).exists()


@contextlib.contextmanager
def open_model(path: str, store: str | None, schedule: str | None = None, accept_model: bool = False) -> Iterator[SavedModel]:
    """Yield the model of the run, or of the checkpoint, in a folder.

    Args:
        path: The folder, or the URL of a checkpoint.
        store: For a run, as for `open_stopped`.
        schedule: For a checkpoint, where its schedule is now.
        accept_model: As for `open_stopped`.

    Raises:
        CheckpointError: A file of a checkpoint is damaged.
        RunError: `store` is given for a checkpoint, or `schedule` for a run. For a run also what
            `open_stopped` raises.
    """
    if names_checkpoint(path):
        if store is not None:
            raise RunError(f"--store: is for runs; checkpoint {path} is read without a store; leave it out")
        checkpoint = Checkpoint.open(path)
        # Files in an object store are compared with the manifest when they are fetched.
        if checkpoint.is_local:
            checkpoint.verify()
        yield SavedCheckpoint(checkpoint, schedule, accept_model)
        return
    with open_stopped(path, store, accept_model) as saved:
        if schedule is not None:
            raise RunError(f"--schedule: is for checkpoints; run {path} keeps what it needs of its schedule; leave it out")
        yield saved
