"""The dense part of an exported model as a module of the caller, without foreload.

Such an export has only the parameters and buffers of the dense part. `foreload export --format
torch` joins this file with raw_values.py, plain_files.py, generators.py, inference.py and
standalone.py into model.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from foreload.trainer.models.generators import seeded
from foreload.trainer.serving.plain_files import read_weights, weights_of

# The relative and absolute tolerance between the logits of one module on two machines.
_NEAR = 1e-4


class Views(dict[str, Tensor]):
    """The embeddings that a model's forward takes, as views of the block [b, F, W].

    The keys are the features, and "feature.column" for further columns.
    """

    def __init__(self, block: Tensor, about: Mapping[str, Any]) -> None:
        super().__init__()
        self.block = block
        for place, feature in enumerate(about["features"]):
            first = 0
            for name, columns in about["tables"][feature["table"]]["parts"]:
                self[f"{feature['name']}.{name}" if first else feature["name"]] = block[:, place, first : first + columns]
                first += columns


class OwnModule(nn.Module):
    """The dense part as the caller's module, with the exported parameters and buffers.

    Args:
        about: the contents of features.json.
        weights: the file of parameters and buffers.
        tried: the file of synthetic inputs with the logits that the model gave for them.
        module: the module, or a class or function that builds it.

    Raises:
        ValueError: the module has other parameters or buffers, or gives other logits.
    """

    def __init__(
        self, about: Mapping[str, Any], weights: Path, tried: Path, module: nn.Module | Callable[..., nn.Module]
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            module = _built(about, module)
        self.module, self._about = module.eval(), about
        takes_step = "step" in inspect.signature(module.forward).parameters
        self._given = {"step": about["step"] + 1} if takes_step else {}
        saved, own = read_weights(weights), weights_of(module)
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in saved.items()}:
            raise ValueError(
                f"load: module must have the parameters and buffers of {about['model']['model']}; got others; give that module"
            )
        for name, value in own.items():
            value.copy_(saved[name])
        given = read_weights(tried)
        with torch.no_grad():
            logits = self(given["dense"], given["block"])
        if logits.shape != given["logits"].shape or not torch.allclose(logits, given["logits"], rtol=_NEAR, atol=_NEAR):
            raise ValueError(
                f"load: module must give the logits that {about['model']['model']} gave when it was exported; it gives others for the same "
                "parameters and buffers; give its class, or what builds it, so that its constructor draws the same random numbers as then"
            )

    def forward(self, dense: Tensor, block: Tensor) -> Tensor:
        """Return the logits [b], or [b, L] for several labels."""
        result = self.module(dense, Views(block, self._about), **self._given)
        # A forward may return losses of its own beside the logits.
        logits: Tensor = result[0] if isinstance(result, tuple) else result
        return logits


def _built(about: Mapping[str, Any], builder: Callable[..., nn.Module]) -> nn.Module:
    """Build the module as it was built for training: with one thread, under the same seed."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with seeded(about["seed"]):
            return builder(_spec(about), **about["model"]["model_options"])
    finally:
        torch.set_num_threads(threads)


class _Spec(SimpleNamespace):
    """A replacement for foreload's ModelSpec.

    It does not repeat the checks of ModelSpec, because the model passed them when it was trained.
    """

    def one_output(self, model: str) -> None:
        """Do nothing: the model passed this check when it was trained."""

    def equal_dimension(self, model: str) -> int:
        """Return the common dimension of all features."""
        return int(self.features[0][1])

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of the outputs for a number of samples."""
        return (samples,) if len(self.labels) == 1 else (samples, len(self.labels))


def _spec(about: Mapping[str, Any]) -> _Spec:
    """Return the description of the data for a model's constructor, like foreload's ModelSpec."""
    tables = [about["tables"][feature["table"]] for feature in about["features"]]
    features = tuple(
        (feature["name"], table["parts"][0][1], table["name"]) for feature, table in zip(about["features"], tables, strict=True)
    )
    return _Spec(
        dense_width=len(about["dense"]),
        features=features,
        names=tuple(name for name, _, _ in features),
        width=sum(dimension for _, dimension, _ in features),
        dense_names=tuple(entry["name"] for entry in about["dense"]),
        poolings=tuple(feature["pooling"] for feature in about["features"]),
        labels=tuple(label["name"] for label in about["labels"]),
        label_kinds=tuple(label["kind"] for label in about["labels"]),
    )
