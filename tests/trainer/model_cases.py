"""Models of a user's own, found by import path: most of them must be refused, for what their docstring says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec
from foreload.trainer.models.wide_deep import WideDeep

POISON_ABOVE = 60
"""A sample whose first dense value is above it is poison to `Poisoned`. (log(1 + 1e30) is 69.)"""


class Sum(nn.Module):
    """The sum of everything, scaled: the smallest model that can be trained."""

    def __init__(self, spec: ModelSpec, *, scale: float = 1.0, flag: bool = False, steps: int = 3) -> None:
        super().__init__()
        self.names, self.arguments = spec.names, (scale, flag, steps)
        self.bias = nn.Parameter(torch.full((1,), scale))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return dense.sum(1) + sum(embeddings[name].sum(1) for name in self.names) + self.bias


class Counting(Sum):
    """It changes a buffer in forward."""

    calls: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        self.calls += 1
        return super().forward(dense, embeddings)


class Normed(Sum):
    """It has a batch norm, whose buffers change in forward; it works on one sample, too."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.norm = nn.BatchNorm1d(spec.dense_width)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(self.norm(dense) if len(dense) > 1 else dense, embeddings)


class Remembering(Sum):
    """It changes an attribute in forward, which no state_dict tells."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        self.shift = getattr(self, "shift", 0) + 1
        return super().forward(dense, embeddings) + self.shift


class Wide(Sum):
    """Its logits are a column."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings)[:, None]


class Squeezing(Sum):
    """Its logits have no axis where there is one sample."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings).squeeze()


class Balanced(nn.Module):
    """Its samples and its parameters add terms of their own to the loss."""

    def __init__(self, spec: ModelSpec, *, share: float = 0.1) -> None:
        super().__init__()
        self.names, self.share = spec.names, share
        self.top, self.last = nn.Linear(spec.dense_width + spec.width, 4), nn.Linear(4, 1)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        hidden = torch.relu(self.top(torch.cat([dense, *(embeddings[name] for name in self.names)], 1)))
        return self.last(hidden).squeeze(1), self.share * (hidden * hidden).mean(1)

    def penalty(self) -> Any:
        return 0.01 * sum((value * value).sum() for value in self.parameters())


class SummedOnItsOwn(Balanced):
    """It adds up its own losses."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        outputs, losses = super().forward(dense, embeddings)
        return outputs, losses.sum()


class MixedOnItsOwn(Balanced):
    """Its own losses are of the whole slice."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        outputs, losses = super().forward(dense, embeddings)
        return outputs, losses - losses.mean()


class PenalisedByLayer(Balanced):
    """Its penalty is no scalar."""

    def penalty(self) -> Any:
        return self.top.weight.square().sum(1)


class PenalisedBySamples(Balanced):
    """Its penalty is of the samples of the last forward."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        outputs, losses = super().forward(dense, embeddings)
        self.kept = losses
        return outputs

    def penalty(self) -> Any:
        return self.kept.mean()


class PenalisedByArgument(Balanced):
    """It has a method of that name that is something else."""

    def penalty(self, factor: float) -> Any:  # type: ignore[override]
        return factor


class Tupled(Sum):
    """Its logits are in a tuple."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return (super().forward(dense, embeddings),)


class Double(Sum):
    """It has a parameter that is not float32."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))


class Lazy(Sum):
    """It has parameters that have no shape yet."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.lazy = nn.LazyLinear(1)


class Sparse(Sum):
    """A parameter's gradient is sparse."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.table = nn.Embedding(3, 1, sparse=True)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + self.table(torch.zeros(len(dense), dtype=torch.int64)).squeeze(1)


class Bare(nn.Module):
    """It has no parameters."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()


class Failing(Sum):
    """Its forward raises."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return embeddings["nothing of this name"]


class Unbuildable(Sum):
    """Its constructor raises."""

    def __init__(self, spec: ModelSpec) -> None:
        raise RuntimeError("no such luck")


class BadColumns(Sum):
    """Its further columns have the name of those that every row has."""

    further_columns: ClassVar[dict[str, int]] = {"weights": 1}


class Demanding(Sum):
    """It has an option without a default."""

    def __init__(self, spec: ModelSpec, *, size: int) -> None:
        super().__init__(spec)


def not_a_model(spec: ModelSpec) -> None:
    """A function that builds no module."""


def a_sum(spec: ModelSpec, *, scale: float = 1.0) -> Sum:
    """A function that builds one."""
    return Sum(spec, scale=scale)


def wide_and_deep(spec: ModelSpec) -> nn.Module:
    """A function that builds one that has further columns."""
    return WideDeep(spec)


BUILT = Sum(ModelSpec(0, ()))
"""A module that is built already."""


class Poisoned(Sum):
    """It is sound but where the data are not: the logit of poison is `value`."""

    def __init__(self, spec: ModelSpec, *, value: float = float("nan")) -> None:
        super().__init__(spec)
        self.value = value
        # A second parameter, with an optimizer state that a step that is undone must leave alone.
        self.weight = nn.Parameter(torch.linspace(-1, 1, 40))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        poisoned = dense[:, 0] > POISON_ABOVE
        logits = super().forward(torch.where(poisoned[:, None], 0, dense), embeddings) + self.weight.sum()
        return torch.where(poisoned, self.value, logits)


class AlwaysNormed(Normed):
    """Its batch norm fails on one sample, too."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return Sum.forward(self, self.norm(dense), embeddings)


class Paired(Sum):
    """It needs two samples."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        assert len(dense) > 1
        return super().forward(dense, embeddings)


class Crowded(Sum):
    """It fails where there are many samples."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        assert len(dense) < 10
        return super().forward(dense, embeddings)


class Rooted(Sum):
    """Its logits are NaN: the root of what is below 0."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + torch.sqrt(-1 - dense.sum(1).abs())


class Norm(Sum):
    """Its gradient is NaN: that of the norm of what is 0."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + (embeddings[self.names[0]] * 0).square().sum(1).sqrt()


class Layered(Sum):
    """Its logits are NaN by a layer within a layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.deep = nn.Sequential(nn.Linear(spec.dense_width, 2), nn.Sequential(nn.ReLU(), Logarithm()), nn.Linear(2, 1))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + self.deep(dense).squeeze(1)


class Logarithm(nn.Module):
    """Of what may be 0, and less."""

    def forward(self, values: Tensor) -> Any:
        return torch.log(values - 1)


class Probable(Sum):
    """Its logits are probabilities, in a shape of their own on the way."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return torch.sigmoid(super().forward(dense, embeddings)[:, None]).squeeze(1)


class Zero(Sum):
    """Its gradients are zero at first, though it ignores nothing: not to be refused."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) * self.last


class Deaf(Sum):
    """It ignores features, and may ignore the dense values: warned of, not refused.

    hears: how many features it uses; sees: whether it uses dense values.
    """

    def __init__(self, spec: ModelSpec, *, hears: int = 1, sees: bool = True) -> None:
        super().__init__(spec)
        self.names, self.sees = spec.names[:hears], sees

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense if self.sees else torch.zeros_like(dense), embeddings)


class Heads(Sum):
    """It has an output for each label; probabilities where it is told so.

    sigmoid: the label of which.
    """

    def __init__(self, spec: ModelSpec, *, sigmoid: int = -1) -> None:
        super().__init__(spec)
        self.heads, self.sigmoid = nn.ModuleList(nn.Linear(spec.width, 1) for _ in spec.labels), sigmoid

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        low = super().forward(dense, embeddings)
        inputs = torch.cat([embeddings[name] for name in self.names], 1)
        outputs = [low + head(inputs).squeeze(1) for head in self.heads]
        if self.sigmoid >= 0:
            outputs[self.sigmoid] = outputs[self.sigmoid].sigmoid()
        return torch.stack(outputs, 1)


class AllProbable(Heads):
    """All its outputs are probabilities."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings).sigmoid()
