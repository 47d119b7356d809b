"""`foreload check-model`: a model, and a loss of one's own, tried on made-up samples, with no data, no store and no run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreload.base.codec import LeftOut
from foreload.pipelines.samples.features import load_features
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.compute.own_loss import checked_loss
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.checking import check_uses, doubts, equal_samples_tie
from foreload.trainer.models.diagnosis import mixes_samples
from foreload.trainer.models.wrapping import Wrapped


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """What a model is that works. unused_tables: of a wrapped one, by their paths; loss: the name of the one that was tried."""

    model: str
    features: int
    dense_values: int
    parameters: int
    unused_tables: list[str]
    mixes_samples: bool
    warnings: list[str]
    loss: LeftOut[str | None] = None

    def text(self) -> str:
        """A line, and one for each thing to note."""
        unused = f"; not used in forward: {', '.join(self.unused_tables)}" if self.unused_tables else ""
        counts = ((self.features, "feature"), (self.dense_values, "dense value"), (self.parameters, "parameter"))
        counted = ", ".join(f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts)
        loss = "" if self.loss is None else f"; loss {self.loss} works on them too"
        notes = "".join(f"\nforeload: warning: {line}" for line in self.warnings)
        if self.mixes_samples:
            notes += "\nit declares mixes_samples: an output depends on the other samples of its slice"
        return f"{self.model}: {counted}; forward and backward work on made-up samples, and use all of it{unused}{loss}{notes}"


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
    """Build a model for a feature file, and run it forward and backward. Raises ModelError and FeatureError.

    name, folder, dim, options, seed, loss, drop_weights: as `foreload train` has them in --model, --model-folder, --dim, and so on; a
    loss is tried as it is there before training, and is reported.
    """
    spec = model_spec(load_features(features), dim)
    module = build_model(load_model(name, folder), spec, options, seed, twice=True, drop_weights=drop_weights)
    unused = [path for part in module.modules() if isinstance(part, Wrapped) for path in part.unused]
    warnings = []
    if not equal_samples_tie(module, spec):
        warnings.append(
            "outputs of equal samples differ in their last bits by where they stand, so equal records may not tie in AUC"
        )
    mixing = mixes_samples(module)
    check_uses(module, spec)
    warnings += doubts(name, module, spec)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    tried = None if loss is None else checked_loss(loss, folder, spec).name
    return CheckedModel(name, len(spec.features), spec.dense_width, parameters, unused, mixing, warnings, tried)
