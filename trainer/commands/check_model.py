"""`foreload check-model`: try a model, and a user's own loss, on synthetic samples.

The check needs no data, no store and no run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreload.base.codec import LeftOut
from foreload.pipelines.samples.feature_file import load_features
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.compute.own_loss import checked_loss
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.checking import check_uses, doubts, equal_samples_tie
from foreload.trainer.models.diagnosis import mixes_samples
from foreload.trainer.models.wrapping import Wrapped


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """The properties of a model that passed the check.

    Attributes:
        features: the number of categorical features.
        dense_values: the number of dense values of a sample.
        parameters: the number of values in the parameters of the dense part.
        unused_tables: the tables of a wrapped model that its forward does not use, by their paths
            in the module.
        mixes_samples: whether the model declares that an output depends on other samples of its
            slice.
        loss: the name of the loss that was tried.
    """

    model: str
    features: int
    dense_values: int
    parameters: int
    unused_tables: list[str]
    mixes_samples: bool
    warnings: list[str]
    loss: LeftOut[str | None] = None

    def text(self) -> str:
        """Return one line on the model, and one for each warning or note."""
        unused = f"; not used in forward: {', '.join(self.unused_tables)}" if self.unused_tables else ""
        counts = ((self.features, "feature"), (self.dense_values, "dense value"), (self.parameters, "parameter"))
        counted = ", ".join(f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts)
        loss = "" if self.loss is None else f"; loss {self.loss} works on them too"
        notes = "".join(f"\nforeload: warning: {line}" for line in self.warnings)
        if self.mixes_samples:
            notes += "\nit declares mixes_samples: an output depends on the other samples of its slice"
        return f"{self.model}: {counted}; forward and backward work on synthetic samples, and use all of it{unused}{loss}{notes}"


def run(
    name: str,
    folder: str,
    features: str,
    dim: int,
    options: Mapping[str, Any],
    seed: int,
    loss: str | None = None,
    drop_weights: bool = False,
) -> CheckedModel:
    """Build a model for a feature file, and run it forward and backward.

    The arguments have the meaning of `foreload train`'s --model, --model-folder, --features, --dim
    and so on. If a loss is given, it is tried as training tries it before its first step, and its
    name is reported.

    Raises:
        ModelError: the model or the loss does not work.
        FeatureError: the feature file cannot be used.
    """
    spec = model_spec(load_features(features), dim)
    module = build_model(load_model(name, folder), spec, options, seed, twice=True, drop_weights=drop_weights)
    unused = [path for part in module.modules() if isinstance(part, Wrapped) for path in part.unused]
    warnings = []
    if not equal_samples_tie(module, spec):
        warnings.append(
            "outputs of equal samples differ in their last bits by their place in the batch, so equal records may not tie in AUC"
        )
    mixing = mixes_samples(module)
    check_uses(module, spec)
    warnings += doubts(name, module, spec)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    tried = None if loss is None else checked_loss(loss, folder, spec).name
    return CheckedModel(name, len(spec.features), spec.dense_width, parameters, unused, mixing, warnings, tried)
