"""Layers that stand where nn.Embedding and nn.EmbeddingBag stood in a model, and give a feature's rows of the step; they hold no parameters."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError

STEP = "step"
"""The parameter of a model's forward that gets the number of training steps done before."""


class StepRows:
    """Where the layers of one model take the step's embeddings from: set while the model's forward runs, None otherwise."""

    def __init__(self) -> None:
        self.embeddings: Mapping[str, Tensor] | None = None

    def of(self, feature: str) -> Tensor:
        """The feature's embeddings, float32 [b, dimension]: a copy that is contiguous, as torch's layers give one. Raises ModelError."""
        if self.embeddings is None:
            raise ModelError(
                f"feature {feature}: its rows are there while the model's forward runs, called with (dense, embeddings); nothing is before or after"
            )
        return self.embeddings[feature].clone(memory_format=torch.contiguous_format)


class Needed(NamedTuple):
    """A feature that a layer takes. dimension: the columns that the layer must get, None for any; pooling: those that the feature may have."""

    feature: str
    dimension: int | None
    pooling: tuple[str, ...]


class FeatureLayer(nn.Module):
    """A layer that gives rows of features. rows: where it takes them from, once it is part of a model."""

    rows: StepRows | None

    def __init__(self) -> None:
        super().__init__()
        self.rows = None

    def needed(self) -> Iterator[Needed]:
        """The features that it takes."""
        raise NotImplementedError


class _OneFeature(FeatureLayer):
    poolings: tuple[str, ...]

    def __init__(self, feature: str) -> None:
        super().__init__()
        if not isinstance(feature, str) or not feature:
            raise ModelError(
                f"foreload.nn.{type(self).__name__}: needs the name of a feature of the feature file; got {feature!r}"
            )
        self.feature = feature

    def forward(self) -> Tensor:
        """The feature's embeddings of this slice, float32 [b, dimension]."""
        return (self.rows or StepRows()).of(self.feature)

    def needed(self) -> Iterator[Needed]:
        yield Needed(self.feature, None, self.poolings)

    def extra_repr(self) -> str:
        """What print shows of it."""
        return repr(self.feature)


class Embedding(_OneFeature):
    """Stands where nn.Embedding stood: forward, without arguments, gives the row of each sample's value of a feature, float32 [b, dimension].

    feature: its name in the feature file; one value a sample.
    """

    poolings = ("single",)


class EmbeddingBag(_OneFeature):
    """Stands where nn.EmbeddingBag stood: forward, without arguments, gives the sum or mean of the rows of each sample's values of a feature.

    feature: its name in the feature file, which says how it is pooled. The result is float32 [b, dimension].
    """

    poolings = ("single", "sum", "mean")


class _Connection:
    """The hooks of a model that has layers of features: what it is called with goes to them, and to its forward as far as that takes it."""

    def __init__(self, rows: StepRows, arguments: int) -> None:
        self.rows, self.arguments = rows, arguments

    def before(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        self.rows.embeddings = given[1]
        return given[: self.arguments]

    def after(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        self.rows.embeddings = None


def connect(module: nn.Module) -> nn.Module:
    """Have the layers of features in a model take their rows from what it is called with, (dense, embeddings); returns the model.

    Its own forward may take both, `dense` alone, or nothing. Layers that a part of it feeds already, as `wrap` does, are left to that.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, FeatureLayer) and layer.rows is None]
    if layers:
        connection = _Connection(StepRows(), _positional(module))
        module.register_forward_pre_hook(connection.before)
        module.register_forward_hook(connection.after, always_call=True)
        for layer in layers:
            layer.rows = connection.rows
    return module


def _positional(module: nn.Module) -> int:
    """How many of (dense, embeddings) the forward of a module takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(2, sum(parameter.kind in kinds and parameter.name != STEP for parameter in parameters))


def takes_step(module: nn.Module) -> bool:
    """Whether the forward of a model has a parameter `step`: an int, the number of training steps done before."""
    return STEP in inspect.signature(module.forward).parameters


def check_step(module: nn.Module) -> None:
    """Raise ModelError where forward needs something behind `step`: others are given by position, `step` by its name."""
    parameters = inspect.signature(module.forward).parameters
    behind = itertools.dropwhile(lambda parameter: parameter.name != STEP, parameters.values())
    needed = [p.name for p in behind if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty and p.name != STEP]
    if needed:
        raise ModelError(
            f"{type(module).__name__}: step must be the last parameter of forward; got forward({', '.join(parameters)}); write "
            "forward(dense, embeddings, step)"
        )
