"""The description of the data that a model gets, and what its forward receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The inputs of a model: the number of dense values per sample, and per feature (name, dimension D, table), in order.

    dense_names: of the dense values; poolings: of the features, "single", "sum" or "mean"; both in order, and empty where that is not known.
    labels: what is to be predicted, by name, in the order of the feature file; label_kinds: of each, "click" or "number".
    """

    dense_width: int
    features: tuple[tuple[str, int, str], ...]
    dense_names: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ()
    labels: tuple[str, ...] = ("label",)
    label_kinds: tuple[str, ...] = ("click",)

    @property
    def names(self) -> tuple[str, ...]:
        """The features' names, in order."""
        return tuple(name for name, _, _ in self.features)

    @property
    def width(self) -> int:
        """Columns of all features' embeddings together, without further columns."""
        return sum(dimension for _, dimension, _ in self.features)

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """What forward returns for so many samples: [b] where there is one label, else [b, labels]."""
        return (samples,) if len(self.labels) == 1 else (samples, len(self.labels))

    def one_output(self, model: str) -> None:
        """Raise ModelError where there are several labels, for a model that has one output. model: its name, for the error."""
        if len(self.labels) > 1:
            raise ModelError(
                f"{model}: predicts one label; got {len(self.labels)}: {', '.join(self.labels)}; use shared_bottom or mmoe, or a model of your own"
            )

    def equal_dimension(self, model: str) -> int:
        """The one dimension of all features, for a model that multiplies embeddings with each other. Raises ModelError.

        model: its name, for the error.
        """
        dimensions = {dimension for _, dimension, _ in self.features}
        if len(dimensions) != 1:
            by_feature = ", ".join(f"{name} {dimension}" for name, dimension, _ in self.features)
            raise ModelError(
                f"{model}: needs tables of one dimension; got {by_feature}; give the tables one, or use wide_deep or dcn"
            )
        return dimensions.pop()


class Embeddings(dict[str, Tensor]):
    """Per feature its embeddings [b, D], and "<feature>.<column>" for each further column that the model declares.

    They are views of `block`, float32 [b, F, W], whose first D columns are the embeddings; a model may use it instead of the views.
    """

    def __init__(self, views: Mapping[str, Tensor], block: Tensor) -> None:
        super().__init__(views)
        self.block = block

    @classmethod
    def split(cls, block: Tensor, names: Sequence[str], parts: Sequence[Sequence[tuple[str, int]]]) -> Embeddings:
        """The views of a block [b, F, W]. names: the features'; parts: per feature the (name, columns) of its rows' parts, the embedding first.

        Unbinding and splitting make one node each in backward, where slicing would make one block of zeros per view.
        """
        views = {}
        for name, own, entry in zip(names, parts, block.unbind(1), strict=True):
            columns = [size for _, size in own]
            rest = block.shape[2] - sum(columns)
            if len(own) == 1 and not rest:
                views[name] = entry
                continue
            for place, piece in enumerate(entry.split([*columns, rest] if rest else columns, 1)[: len(own)]):
                views[f"{name}.{own[place][0]}" if place else name] = piece
        return cls(views, block)


ModelBuilder = Callable[..., nn.Module]
"""A model's class, or a function that builds it: called with a ModelSpec and its options."""


def further_columns(model: ModelBuilder) -> tuple[tuple[str, int], ...]:
    """The columns per row that a model's class declares besides the embedding: (name, columns) in order. Raises ModelError."""
    declared = getattr(model, "further_columns", {})
    valid = isinstance(declared, Mapping) and all(
        isinstance(name, str) and name not in ("", "weights") and type(columns) is int and columns > 0
        for name, columns in declared.items()
    )
    if not valid:
        raise ModelError(f"{model.__name__}: further_columns must map names (not weights) to positive integers; got {declared!r}")
    return tuple(declared.items())


# The next three functions give the same bits from Embeddings, with a block, as from a plain dict: either way they end in the same contiguous tensor.


def stacked(embeddings: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    """Embeddings of one dimension side by side: contiguous, [b, F, D]."""
    if isinstance(embeddings, Embeddings):
        block, dimension = embeddings.block, spec.features[0][1]
        # The whole block as it is, where it is: a part's gradient would be copied into a block of zeros.
        return block if block.shape[2] == dimension else block.narrow(2, 0, dimension).contiguous()
    return torch.stack([embeddings[name] for name in spec.names], dim=1)


def flattened(embeddings: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
    """Embeddings of any dimensions end to end: contiguous, [b, spec.width]."""
    if isinstance(embeddings, Embeddings) and len({dimension for _, dimension, _ in spec.features}) == 1:
        return stacked(embeddings, spec).flatten(1)
    return torch.cat([embeddings[name] for name in spec.names], dim=1)


def single_columns(embeddings: Mapping[str, Tensor], column: str, spec: ModelSpec) -> Tensor:
    """A further column of width 1 of every feature: contiguous, [b, F]."""
    return torch.cat([embeddings[f"{name}.{column}"] for name in spec.names], dim=1)


def sizes(name: str, value: str | Sequence[int]) -> tuple[int, ...]:
    """Layer sizes given as "64-32", or as a list of integers; "" is none. name: of the option, for errors. Raises ModelError."""
    try:
        parts = [int(part) for part in value.split("-")] if isinstance(value, str) and value else [int(part) for part in value]
    except (TypeError, ValueError):
        parts = [0]
    if any(part < 1 for part in parts):
        raise ModelError(f"{name}: must be layer sizes such as 64-32; got {value!r}")
    return tuple(parts)


def fraction(name: str, value: float) -> float:
    """A dropout probability, checked to be in [0, 1). name: of the option, for errors. Raises ModelError."""
    if not 0 <= value < 1:
        raise ModelError(f"{name}: must be at least 0 and below 1; got {value}")
    return value


def mlp(inputs: int, widths: Sequence[int], last_relu: bool, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers of these output widths, with ReLU (and dropout) between them, and after the last too if asked."""
    layers: list[nn.Module] = []
    for place, width in enumerate(widths):
        layers.append(nn.Linear(inputs, width))
        if last_relu or place < len(widths) - 1:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        inputs = width
    return nn.Sequential(*layers)
