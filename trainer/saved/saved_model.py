"""What a trained model is asked for where it rests, be it a saved run, with its rows on a store, or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from foreload.cache.rows.initial import initial_weights
from foreload.cache.rows.layout import RowLayout
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
