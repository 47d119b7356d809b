"""Check that a model which names its features fits the data.

Such a model has feature layers, or was made by `wrap`.
"""

from __future__ import annotations

from torch import nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.layers import FeatureLayer
from foreload.trainer.models.lookups import Collection, Lookup
from foreload.trainer.models.spec import ModelSpec
from foreload.trainer.models.wrapping import Wrapped


def model_name(module: nn.Module) -> str:
    """Return the name of a model in messages: its class, or the class of the wrapped module."""
    return type(module.module if isinstance(module, Wrapped) else module).__name__


def check_fits(module: nn.Module, spec: ModelSpec) -> None:
    """Check that the data have the features and dense values that a model uses, as it uses them.

    Raises:
        ModelError: a feature is missing or has another dimension or pooling, or the dense values
            differ.
    """
    dimensions = {name: dimension for name, dimension, _ in spec.features}
    poolings = dict(zip(spec.names, spec.poolings, strict=False))
    for path, layer in module.named_modules():
        if isinstance(layer, Wrapped):
            _check_dense(layer, spec)
        for need in layer.needed() if isinstance(layer, FeatureLayer) else ():
            place = layer.path if isinstance(layer, Lookup | Collection) else path
            where = f"{model_name(module)}: {place}: feature {need.feature}"
            if need.feature not in dimensions:
                raise ModelError(f"{where}: is not in the feature file, which has {', '.join(spec.names)}")
            if need.dimension not in (None, dimensions[need.feature]):
                raise ModelError(
                    f"{where}: must have rows of dimension {need.dimension}; got {dimensions[need.feature]}; say dimension = {need.dimension} "
                    "in the feature file"
                )
            pooling = poolings.get(need.feature, need.pooling[0])
            if pooling not in need.pooling:
                raise ModelError(
                    f"{where}: must have pooling {' or '.join(need.pooling)}; got {pooling}; change the feature file, or the layer"
                )


def _check_dense(wrapped: Wrapped, spec: ModelSpec) -> None:
    wanted = wrapped.dense_names
    if wanted and ((spec.dense_names or wanted) != wanted or len(wanted) != spec.dense_width):
        got = ", ".join(spec.dense_names) or str(spec.dense_width)
        raise ModelError(
            f"{model_name(wrapped)}: dense values must be {', '.join(wanted)}, in this order, as given to `wrap`; got {got}; change what is given "
            "to wrap, or the feature file"
        )
