"""`foreload check-model`: a model, and a loss of one's own, tried on made-up samples, with no data, no store and no run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreload.pipelines.samples.feature_file import load_features
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.compute.own_loss import checked_loss
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.checking import check_uses, doubts, equal_samples_tie
from foreload.trainer.models.mixing import mixes_samples
from foreload.trainer.models.wrapping import Wrapped


def run(
    name: str,
    folder: str,
    features: str,
    dim: int,
    options: Mapping[str, Any],
    seed: int,
    loss: str | None = None,
    drop_weights: bool = False,
) -> dict[str, Any]:
    """Build a model for a feature file, and run it forward and backward; returns what it is. Raises ModelError and FeatureError.

    name, folder, dim, options, seed, loss, drop_weights: as `foreload train` has them in --model, --model-folder, --dim, and so on; a
    loss is tried as it is there before training, and is told of.
    """
    spec = model_spec(load_features(features), dim)
    module = build_model(load_model(name, folder), spec, options, seed, twice=True, drop_weights=drop_weights)
    about = {
        "model": name,
        "features": len(spec.features),
        "dense_values": spec.dense_width,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "unused_tables": [path for part in module.modules() if isinstance(part, Wrapped) for path in part.unused],
    }
    warnings = []
    if not equal_samples_tie(module, spec):
        warnings.append(
            "outputs of equal samples differ in their last bits by where they stand, so equal records may not tie in AUC"
        )
    about["mixes_samples"] = mixes_samples(module)
    check_uses(module, spec)
    about["warnings"] = warnings + doubts(name, module, spec)
    return about if loss is None else about | {"loss": checked_loss(loss, folder, spec).name}


def text(about: Mapping[str, Any]) -> str:
    """The same for a person, on a line."""
    unused = f"; not used in forward: {', '.join(about['unused_tables'])}" if about["unused_tables"] else ""
    counted = ", ".join(
        f"{about[name]:,} {word}{'s' * (about[name] != 1)}"
        for name, word in (("features", "feature"), ("dense_values", "dense value"), ("parameters", "parameter"))
    )
    loss = f"; loss {about['loss']} works on them too" if "loss" in about else ""
    notes = "".join(f"\nforeload: warning: {line}" for line in about["warnings"])
    if about["mixes_samples"]:
        notes += "\nit declares mixes_samples: an output depends on the other samples of its slice"
    return f"{about['model']}: {counted}; forward and backward work on made-up samples, and use all of it{unused}{loss}{notes}"
