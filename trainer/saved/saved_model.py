"""A trained model that does not train, of a stopped run or a checkpoint: its rows, its features, and its digest (docs/definitions.md, Digest)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.samples import encoding_state
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import ENCODING_FOLDER, FeatureSpec
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.saved.model_rows import ModelRows


class RowSource(Protocol):
    """Rows of a model by table and id."""

    def read(self, table: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights float32 [n, W] of the rows with these ids (int64 [n], each once), and whether each was trained (bool [n]); else they are initial.

        Raises RowError and StoreError.
        """


class SavedModel(Protocol):
    """A model after a step."""

    @property
    def name(self) -> str:
        """Of the run or checkpoint, for messages."""

    @property
    def step(self) -> int:
        """The last one trained."""

    @property
    def job(self) -> TrainJob:
        """What it was trained by."""

    @property
    def manifest(self) -> Manifest:
        """That of the run."""

    @property
    def features(self) -> FeatureSpec:
        """Those of its schedule's header."""

    @property
    def encoding(self) -> str | None:
        """The identity of its schedule's encoding state; None without one."""

    @property
    def layouts(self) -> Sequence[RowLayout]:
        """Of its tables, in order."""

    @property
    def schedule(self) -> Schedule:
        """The schedule that it was trained on last, or what is kept of it. Raises RunError where that is not there."""

    def check_code(self) -> None:
        """Compare the model's code, where it is now, with what the model was trained with, before it is run. Raises ModelError where it differs,
        unless that is accepted, of which stderr is warned.
        """

    def rows(self, since: int | None = None) -> Iterator[ModelRows]:
        """Every trained row by (table, id); since: only those that a later step than that changed."""

    def row_counts(self) -> np.ndarray:
        """How many rows were trained, of each table: int64 [tables]."""

    def dense(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Parameters by name, and optimizer state by "<parameter>/<key>"."""

    def row_source(self) -> RowSource:
        """What reads single rows."""

    def digest(self) -> str:
        """The digest of the model (docs/definitions.md, Digest), 64 hexadecimal digits."""


def encoder_of(model: SavedModel) -> tuple[FeatureSpec, Encoder]:
    """A model's features, and what encodes by its vocabularies and scales, which stand in its schedule; that is looked for only if there are any.

    Raises ScheduleError where these are damaged, RunError where they are not what the model was trained with, or cannot be found.
    """
    if not encoding_state.needs_state(model.features):
        return model.features, Encoder(model.features)
    schedule = model.schedule
    folder = schedule.path / ENCODING_FOLDER
    if encoding_state.identity(folder) != model.encoding:
        raise RunError(f"schedule {schedule.path}: its encoding is not what it was prepared with; put that folder back")
    return encoding_state.load(folder, model.features)


def check_fitting(model: SavedModel, schedule: Schedule) -> Schedule:
    """The schedule, if a model's samples can be of it. Raises RunError where its features or their encoding are others."""
    header = schedule.header
    if header.features != model.features or header.settings.get("encoding") != model.encoding:
        raise RunError(
            f"schedule {schedule.path}: its features or their encoding are not those that {model.name} was trained on "
            f"({model.manifest.stages[-1].path}); prepare it with the same feature file, and --after that schedule where vocabularies or "
            "standardised columns are counted"
        )
    return schedule


def initial_rows(model: SavedModel, table: int, ids: np.ndarray) -> np.ndarray:
    """The weights that rows (ids int64 [n]) have before they are trained: float32 [n, W]."""
    layout = model.layouts[table]
    weights = np.zeros((len(ids), layout.width), np.float32)
    initial_weights(model.job.seed, table, np.ascontiguousarray(ids), layout.scale, weights, layout.init_columns)
    return weights


class Digest:
    """SHA-256 of the dense part, and then of the tables in order, fed in pieces.

    Call model() once; or dense() once, and then for every table table() once and rows() any number of times, by ascending id.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"foreload digest 1\n")
        self._last: int | None = None

    def dense(self, parameters: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> None:
        """parameters: by name; state: by "<parameter>/<key>" (dense_optimizers.optimizer_state). All are hashed as float32."""
        for name in sorted(parameters):
            self._array(name, parameters[name])
        for name, key in sorted((path.rpartition("/")[0], path.rpartition("/")[2]) for path in state):
            self._array(f"{name}/{key}", state[f"{name}/{key}"])

    def _array(self, name: str, array: np.ndarray) -> None:
        shape = ",".join(str(size) for size in array.shape)
        self._hash.update(f"{name}\n{shape}\n".encode())
        self._hash.update(np.ascontiguousarray(array, "<f4").tobytes())

    def table(self, name: str) -> None:
        """Begin a table."""
        self._hash.update(f"table {name}\n".encode())
        self._last = None

    def rows(self, ids: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        """Rows of the table: ids int64 [n], ascending over all calls; weights float32 [n, W]; state float32 [n, S]. Raises ValueError."""
        if not len(ids):
            return
        if (self._last is not None and ids[0] <= self._last) or not (ids[1:] > ids[:-1]).all():
            raise ValueError("rows of a digest must come by ascending id, each once")
        self._last = int(ids[-1])
        pieces = [np.ascontiguousarray(ids, "<i8").view(np.uint8).reshape(len(ids), 8)]
        for values in (weights, state):
            if values.shape[1]:
                pieces.append(np.ascontiguousarray(values, "<f4").view(np.uint8))
        self._hash.update(np.hstack(pieces).data)

    def model(
        self, dense: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], tables: Sequence[str], rows: Iterator[ModelRows]
    ) -> str:
        """Hash a whole model: parameters and state, the tables' names, and every row by (table, id). Returns the digest, 64 hexadecimal digits."""
        self.dense(*dense)
        batch = next(rows, None)
        for table, name in enumerate(tables):
            self.table(name)
            while batch is not None and batch.table == table:
                self.rows(batch.ids, batch.weights, batch.state)
                batch = next(rows, None)
        return self.hexdigest()

    def hexdigest(self) -> str:
        """The digest of what was fed so far, 64 hexadecimal digits."""
        return self._hash.hexdigest()
