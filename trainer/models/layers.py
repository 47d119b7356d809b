"""Layers that replace nn.Embedding and nn.EmbeddingBag in a model.

They have no parameters. Each returns the rows of a feature in the current step.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError

STEP = "step"
"""The name of the parameter of forward that gets the number of training steps done before."""


class StepRows:
    """The embeddings of the current step, shared by the layers of one model.

    Attributes:
        embeddings: the embeddings by feature while the model's forward runs, otherwise None.
    """

    def __init__(self) -> None:
        self.embeddings: Mapping[str, Tensor] | None = None

    def of(self, feature: str) -> Tensor:
        """Return a feature's embeddings, float32 [b, dimension].

        The result is a contiguous copy, as the result of torch's layers is.

        Raises:
            ModelError: the model's forward is not running.
        """
        if self.embeddings is None:
            raise ModelError(
                f"feature {feature}: its rows exist only while the model's forward runs, called with (dense, embeddings), not before or after"
            )
        return self.embeddings[feature].clone(memory_format=torch.contiguous_format)


class Needed(NamedTuple):
    """A feature that a layer uses.

    Attributes:
        dimension: the number of columns that the layer needs. If None, any number will do.
        pooling: the poolings that the feature may have.
    """

    feature: str
    dimension: int | None
    pooling: tuple[str, ...]


class FeatureLayer(nn.Module):
    """A layer that returns the rows of one or more features.

    Attributes:
        rows: the source of the rows. It is None until the layer is connected to a model.
    """

    rows: StepRows | None

    def __init__(self) -> None:
        super().__init__()
        self.rows = None

    def needed(self) -> Iterator[Needed]:
        """Yield the features that the layer uses."""
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
        """Return the feature's embeddings of the current slice, float32 [b, dimension]."""
        return (self.rows or StepRows()).of(self.feature)

    def needed(self) -> Iterator[Needed]:
        yield Needed(self.feature, None, self.poolings)

    def extra_repr(self) -> str:
        """Return the text that print shows in the parentheses after the class name."""
        return repr(self.feature)


class Embedding(_OneFeature):
    """Replaces nn.Embedding: its forward takes no arguments.

    Forward returns the row of each sample's value of a feature, float32 [b, dimension].

    Args:
        feature: the name of a feature in the feature file that has one value per sample.
    """

    poolings = ("single",)


class EmbeddingBag(_OneFeature):
    """Replaces nn.EmbeddingBag: its forward takes no arguments.

    Forward returns the sum or mean of the rows of each sample's values of a feature, float32
    [b, dimension].

    Args:
        feature: the name of a feature in the feature file. The file specifies how the feature is
            pooled.
    """

    poolings = ("single", "sum", "mean")


class _Connection:
    """The hooks of a model that has feature layers.

    The hook before forward passes the embeddings to the layers, and passes on only the arguments
    that the model's own forward takes. The hook after forward removes the embeddings.
    """

    def __init__(self, rows: StepRows, arguments: int) -> None:
        self.rows, self.arguments = rows, arguments

    def before(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        self.rows.embeddings = given[1]
        return given[: self.arguments]

    def after(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        self.rows.embeddings = None


def connect(module: nn.Module) -> nn.Module:
    """Connect the feature layers of a model to the embeddings that it is called with.

    Returns the model, which is then called with (dense, embeddings). Its own forward may take both,
    only `dense`, or nothing. Layers that already have a source of rows, such as those of `wrap`,
    are left unchanged.
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
    """Return how many of (dense, embeddings) the forward of a module takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(2, sum(parameter.kind in kinds and parameter.name != STEP for parameter in parameters))


def takes_step(module: nn.Module) -> bool:
    """Return whether the forward of a model has a parameter `step`.

    `step` is an int, the number of training steps done before.
    """
    return STEP in inspect.signature(module.forward).parameters


def check_step(module: nn.Module) -> None:
    """Raise ModelError if forward has a required parameter after `step`.

    The other arguments are passed by position, and `step` by name.
    """
    parameters = inspect.signature(module.forward).parameters
    behind = itertools.dropwhile(lambda parameter: parameter.name != STEP, parameters.values())
    needed = [p.name for p in behind if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty and p.name != STEP]
    if needed:
        raise ModelError(
            f"{type(module).__name__}: step must be the last parameter of forward; got forward({', '.join(parameters)}); write "
            "forward(dense, embeddings, step)"
        )
