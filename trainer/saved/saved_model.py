"""A trained model of a stopped run or a checkpoint: its rows, its features and its digest.

For the digest, see its definition (docs/definitions.md, Digest).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.saved.model_rows import ModelRows


class RowSource(Protocol):
    """Gives rows of a model by table and id."""

    def read(self, table: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights of rows, and whether each row was trained.

        A row that was not trained has its initial weights.

        Args:
            table: The number of the table.
            ids: int64 [n], each id once.

        Returns:
            float32 [n, W] and bool [n].

        Raises:
            RowError: A row is missing, or is not the expected one.
            StoreError: A store shard fails.
        """


class SavedModel(Protocol):
    """A model after a training step."""

    @property
    def name(self) -> str:
        """The name that messages use."""

    @property
    def step(self) -> int:
        """The last step trained."""

    @property
    def job(self) -> TrainJob:
        """The job that trained it."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of its run."""

    @property
    def features(self) -> FeatureSpec:
        """The features in its schedule's header."""

    @property
    def encoding(self) -> str | None:
        """The identity of its schedule's encoding state; None without one."""

    @property
    def layouts(self) -> Sequence[RowLayout]:
        """The layouts of its tables, in order."""

    @property
    def schedule(self) -> Schedule:
        """The schedule that it was trained on last, or what is kept of it.

        Raises RunError if neither exists.
        """

    def check_code(self) -> None:
        """Compare the model's present code with the code that it was trained with, before it runs.

        Raises ModelError if they differ. If the caller accepts other code, a warning on stderr
        takes the place of the error.
        """

    def rows(self, since: int | None = None) -> Iterator[ModelRows]:
        """Yield every trained row by (table, id).

        Args:
            since: Yield only rows that a step after this one changed. If None, all are yielded.
        """

    def row_counts(self) -> np.ndarray:
        """Return how many rows of each table were trained: int64 [tables]."""

    def dense(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the parameters by name, and the optimizer state by "<parameter>/<key>"."""

    def row_source(self) -> RowSource:
        """Return a reader of single rows."""

    def digest(self) -> str:
        """Return the digest of the model (docs/definitions.md, Digest), 64 hexadecimal digits."""


def check_fitting(model: SavedModel, schedule: Schedule) -> Schedule:
    """Return the schedule if it has a model's features and encoding; raise RunError if not."""
    header = schedule.header
    if header.features != model.features or header.settings.get("encoding") != model.encoding:
        raise RunError(
            f"schedule {schedule.path}: its features or their encoding are not those that {model.name} was trained on "
            f"({model.manifest.stages[-1].path}); prepare it with the same feature file, and --after that schedule where vocabularies or "
            "standardised columns are counted"
        )
    return schedule


def initial_rows(model: SavedModel, table: int, ids: np.ndarray) -> np.ndarray:
    """Return the weights that rows have before they are trained: float32 [n, W].

    Args:
        table: The number of the table.
        ids: int64 [n].
    """
    layout = model.layouts[table]
    weights = np.zeros((len(ids), layout.width), np.float32)
    initial_weights(model.job.seed, layout, np.ascontiguousarray(ids), weights)
    return weights


class Digest:
    """SHA-256 of the dense part and then of the tables in order, fed in pieces.

    Call `model` once. Or call `dense` once, and then for every table `table` once and `rows` any
    number of times, by ascending id.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"foreload digest 1\n")
        self._last: int | None = None

    def dense(self, parameters: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> None:
        """Hash the dense part, as float32.

        Args:
            parameters: By name.
            state: By "<parameter>/<key>" (dense_optimizers.optimizer_state).
        """
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
        """Hash rows of the table.

        Args:
            ids: int64 [n], ascending over all calls.
            weights: float32 [n, W].
            state: float32 [n, S].

        Raises:
            ValueError: The ids are not ascending.
        """
        if not len(ids):
            return
        if (self._last is not None and ids[0] <= self._last) or not (ids[1:] > ids[:-1]).all():
            raise ValueError("rows of a digest must come in ascending order of id, each once")
        self._last = int(ids[-1])
        # A row is hashed as its id, its weights and its state, little-endian.
        pieces = [np.ascontiguousarray(ids, "<i8").view(np.uint8).reshape(len(ids), 8)]
        for values in (weights, state):
            if values.shape[1]:
                pieces.append(np.ascontiguousarray(values, "<f4").view(np.uint8))
        self._hash.update(np.hstack(pieces).data)

    def model(
        self, dense: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], tables: Sequence[str], rows: Iterator[ModelRows]
    ) -> str:
        """Hash a whole model, and return the digest: 64 hexadecimal digits.

        Args:
            dense: The parameters and the state, as for `dense`.
            tables: The tables' names.
            rows: Every row, by (table, id).
        """
        self.dense(*dense)
        batch = next(rows, None)
        for table, name in enumerate(tables):
            self.table(name)
            while batch is not None and batch.table == table:
                self.rows(batch.ids, batch.weights, batch.state)
                batch = next(rows, None)
        return self.hexdigest()

    def hexdigest(self) -> str:
        """Return the digest of what was fed so far, 64 hexadecimal digits."""
        return self._hash.hexdigest()
