"""The loss that a job trains the labels of a schedule with."""

from __future__ import annotations

from foreload.base.errors import SettingError
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.compute.own_loss import checked_loss
from foreload.trainer.compute.training_loss import TrainingLoss
from foreload.trainer.job.job import TrainJob


def training_loss(job: TrainJob, features: FeatureSpec) -> TrainingLoss:
    """Tried, where it is the user's own. Raises SettingError for weights of labels that are not there, and ModelError."""
    names, weights = [label.name for label in features.labels], job.label_weights
    if unknown := sorted(set(weights) - set(names)):
        raise SettingError(f"--label-weights: must name labels of the schedule, {', '.join(names)}; got {unknown[0]}")
    if weights and len(names) == 1:
        raise SettingError(f"--label-weights: is for several labels, and the schedule has one, {names[0]}; leave it out")
    kinds = tuple(label.kind for label in features.labels)
    if job.loss is None:
        return TrainingLoss(kinds, tuple(weights.get(name, 1.0) for name in names))
    own = checked_loss(job.loss, job.model_folder, model_spec(features, job.dim))
    return TrainingLoss(kinds, (1.0,) * len(names), own)
