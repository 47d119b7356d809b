"""The encoder of a saved model's raw columns."""

from __future__ import annotations

from foreload.pipelines.samples import encoding_state
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import ENCODING_FOLDER, FeatureSpec
from foreload.trainer.errors import RunError
from foreload.trainer.saved.saved_model import SavedModel


def encoder_of(model: SavedModel) -> tuple[FeatureSpec, Encoder]:
    """Return a model's features, and the encoder of its vocabularies and scales.

    These are in the model's schedule, which is looked for only if there are any.

    Raises:
        ScheduleError: The encoding is damaged.
        RunError: The encoding is not what the model was trained with, or cannot be found.
    """
    if not encoding_state.needs_state(model.features):
        return model.features, Encoder(model.features)
    schedule = model.schedule
    folder = schedule.path / ENCODING_FOLDER
    if encoding_state.identity(folder) != model.encoding:
        raise RunError(f"schedule {schedule.path}: its encoding is not the one that it was prepared with; put that folder back")
    return encoding_state.load(folder, model.features)
