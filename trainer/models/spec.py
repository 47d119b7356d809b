"""The description of the data that a model's constructor gets, and the inputs of its forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The inputs and labels of a model.

    Attributes:
        dense_width: the number of dense values per sample.
        features: the features in order, each as (name, dimension D, table).
        dense_names: the names of the dense values, in order. Empty if they are not known.
        poolings: "single", "sum" or "mean" for each feature, in order. Empty if they are not known.
        labels: the names of the labels to predict, in the order of the feature file.
        label_kinds: "click" or "number" for each label.
    """

    dense_width: int
    features: tuple[tuple[str, int, str], ...]
    dense_names: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ()
    labels: tuple[str, ...] = ("label",)
    label_kinds: tuple[str, ...] = ("click",)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features, in order."""
        return tuple(name for name, _, _ in self.features)

    @property
    def width(self) -> int:
        """The total number of columns of all embeddings, without further columns."""
        return sum(dimension for _, dimension, _ in self.features)

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of the outputs for a number of samples.

        The shape is [b] if there is one label, else [b, labels].
        """
        return (samples,) if len(self.labels) == 1 else (samples, len(self.labels))

    def one_output(self, model: str) -> None:
        """Raise ModelError if there are several labels. For models with one output.

        Args:
            model: the name of the model, for the error.
        """
        if len(self.labels) > 1:
            raise ModelError(
                f"{model}: predicts one label; got {len(self.labels)}: {', '.join(self.labels)}; use shared_bottom or mmoe, or a model of your own"
            )

    def equal_dimension(self, model: str) -> int:
        """Return the dimension of all features, which must be the same.

        For models that multiply embeddings with each other.

        Args:
            model: the name of the model, for the error.

        Raises:
            ModelError: the features have different dimensions, or there are none.
        """
        dimensions = {dimension for _, dimension, _ in self.features}
        if not dimensions:
            raise ModelError(f"{model}: multiplies embeddings, and there are only dense values; use wide_deep or dcn")
        if len(dimensions) != 1:
            by_feature = ", ".join(f"{name} {dimension}" for name, dimension, _ in self.features)
            raise ModelError(
                f"{model}: needs tables of one dimension; got {by_feature}; give all tables the same, or use wide_deep or dcn"
            )
        return dimensions.pop()


class Embeddings(dict[str, Tensor]):
    """The embeddings [b, D] by feature, and further columns as "<feature>.<column>".

    The values are views of `block`. A model may use the block instead of the views.

    Attributes:
        block: float32 [b, F, W]. Its first D columns are the embeddings.
    """

    def __init__(self, views: Mapping[str, Tensor], block: Tensor) -> None:
        super().__init__(views)
        self.block = block

    @classmethod
    def split(cls, block: Tensor, names: Sequence[str], parts: Sequence[Sequence[tuple[str, int]]]) -> Embeddings:
        """Make the views of a block [b, F, W].

        Unbinding and splitting add one node each to the backward graph. Slicing would create one
        block of zeros per view in backward.

        Args:
            block: float32 [b, F, W].
            names: the names of the features.
            parts: per feature the (name, columns) of the parts of its rows, the embedding first.
        """
        views = {}
        # torch.export cannot read back a program that unbinds nothing.
        entries = block.unbind(1) if names else ()
        for name, own, entry in zip(names, parts, entries, strict=True):
            columns = [size for _, size in own]
            rest = block.shape[2] - sum(columns)
            if len(own) == 1 and not rest:
                views[name] = entry
                continue
            for place, piece in enumerate(entry.split([*columns, rest] if rest else columns, 1)[: len(own)]):
                views[f"{name}.{own[place][0]}" if place else name] = piece
        return cls(views, block)


ModelBuilder = Callable[..., nn.Module]
"""A model's class, or a function that builds the model. It gets a ModelSpec and options."""


def further_columns(model: ModelBuilder) -> tuple[tuple[str, int], ...]:
    """Return the further columns per row that a model's class declares: (name, columns) in order.

    The columns of the embedding are not included.

    Raises:
        ModelError: the declaration is not valid.
    """
    declared = getattr(model, "further_columns", {})
    valid = isinstance(declared, Mapping) and all(
        isinstance(name, str) and name not in ("", "weights") and type(columns) is int and columns > 0
        for name, columns in declared.items()
    )
    if not valid:
        raise ModelError(f"{model.__name__}: further_columns must map names (not weights) to positive integers; got {declared!r}")
    return tuple(declared.items())


# The next three functions return the same bits from Embeddings, which have a block, as from a plain
# dict: both paths produce the same contiguous tensor.


def stacked(embeddings: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    """Return embeddings of equal dimension side by side: contiguous, [b, F, D]."""
    if isinstance(embeddings, Embeddings):
        block = embeddings.block
        dimension = spec.features[0][1] if spec.features else block.shape[2]
        # Use the whole block where possible. The gradient of a part would be copied into a block of
        # zeros.
        return block if block.shape[2] == dimension else block.narrow(2, 0, dimension).contiguous()
    return torch.stack([embeddings[name] for name in spec.names], dim=1)


def flattened(embeddings: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    """Return embeddings of any dimensions end to end: contiguous, [b, spec.width]."""
    if isinstance(embeddings, Embeddings) and len({dimension for _, dimension, _ in spec.features}) <= 1:
        return stacked(embeddings, spec).flatten(1)
    return torch.cat([embeddings[name] for name in spec.names], dim=1)


def single_columns(embeddings: Mapping[str, Tensor], column: str, spec: ModelSpec) -> Tensor:
    """Return a further column of width 1 of every feature, of which there is at least one: contiguous, [b, F]."""
    return torch.cat([embeddings[f"{name}.{column}"] for name in spec.names], dim=1)


def sizes(name: str, value: str | Sequence[int]) -> tuple[int, ...]:
    """Parse layer sizes, given as "64-32" or as a list of integers. "" means no layers.

    Args:
        name: the name of the option, for errors.

    Raises:
        ModelError: the value is not valid.
    """
    try:
        parts = [int(part) for part in value.split("-")] if isinstance(value, str) and value else [int(part) for part in value]
    except (TypeError, ValueError):
        parts = [0]
    if any(part < 1 for part in parts):
        raise ModelError(f"{name}: must be layer sizes such as 64-32; got {value!r}")
    return tuple(parts)


def fraction(name: str, value: float) -> float:
    """Return a dropout probability after checking that it is in [0, 1).

    Args:
        name: the name of the option, for errors.

    Raises:
        ModelError: the value is out of range.
    """
    if not 0 <= value < 1:
        raise ModelError(f"{name}: must be at least 0 and below 1; got {value}")
    return value


def mlp(inputs: int, widths: Sequence[int], last_relu: bool, dropout: float = 0.0) -> nn.Sequential:
    """Build linear layers with ReLU between them.

    Args:
        inputs: the number of input columns.
        widths: the output width of each layer.
        last_relu: whether the last layer is followed by ReLU, too.
        dropout: the probability of the dropout after each ReLU. If 0, there is no dropout.
    """
    layers: list[nn.Module] = []
    for place, width in enumerate(widths):
        layers.append(nn.Linear(inputs, width))
        if last_relu or place < len(widths) - 1:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        inputs = width
    return nn.Sequential(*layers)


def draw_weights(model: nn.Module, of: str, std: float) -> None:
    """Draw the weights of a model's linear layers from a normal distribution, with biases of zero.

    Args:
        of: the name of the model, for the error.
        std: the standard deviation. If 0, the layers stay as PyTorch begins them.

    Raises:
        ModelError: the deviation is negative or not finite.
    """
    if not 0 <= std < math.inf:
        raise ModelError(f"{of}: init_std must be a finite number of at least 0; got {std:g}")
    for layer in model.modules() if std else ():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
