"""Models that must be refused, and one that must not, found by import path in test_models.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec


class Sum(nn.Module):
    """The sum of everything, scaled: the smallest model that can be trained."""

    def __init__(self, spec: ModelSpec, *, scale: float = 1.0, flag: bool = False, steps: int = 3) -> None:
        super().__init__()
        self.names, self.arguments = spec.names, (scale, flag, steps)
        self.bias = nn.Parameter(torch.full((1,), scale))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return dense.sum(1) + sum(embeddings[name].sum(1) for name in self.names) + self.bias


class Counting(Sum):
    calls: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        self.calls += 1
        return super().forward(dense, embeddings)


class Normed(Sum):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.norm = nn.BatchNorm1d(spec.dense_width)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(self.norm(dense) if len(dense) > 1 else dense, embeddings)


class Remembering(Sum):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        self.shift = getattr(self, "shift", 0) + 1
        return super().forward(dense, embeddings) + self.shift


class Wide(Sum):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings)[:, None]


class Squeezing(Sum):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings).squeeze()


class Tupled(Sum):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return (super().forward(dense, embeddings),)


class Double(Sum):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))


class Lazy(Sum):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.lazy = nn.LazyLinear(1)


class Sparse(Sum):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.table = nn.Embedding(3, 1, sparse=True)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + self.table(torch.zeros(len(dense), dtype=torch.int64)).squeeze(1)


class Bare(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()


class Failing(Sum):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return embeddings["nothing of this name"]


class Unbuildable(Sum):
    def __init__(self, spec: ModelSpec) -> None:
        raise RuntimeError("no such luck")


class BadColumns(Sum):
    further_columns: ClassVar[dict[str, int]] = {"weights": 1}


class Demanding(Sum):
    def __init__(self, spec: ModelSpec, *, size: int) -> None:
        super().__init__(spec)


def not_a_class() -> None:
    """A function, which is no model."""


class Poisoned(Sum):
    """Its logit is NaN, or another value, for every sample whose first dense value is above 60."""

    def __init__(self, spec: ModelSpec, *, value: float = float("nan"), gradient: bool = False) -> None:
        super().__init__(spec)
        self.value = value
        self.weight = nn.Parameter(torch.linspace(-1, 1, 40))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        poisoned = dense[:, 0] > 60
        logits = super().forward(torch.where(poisoned[:, None], 0, dense), embeddings) + self.weight.sum()
        return torch.where(poisoned, self.value, logits)


class AlwaysNormed(Normed):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return Sum.forward(self, self.norm(dense), embeddings)


class Paired(Sum):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        assert len(dense) > 1
        return super().forward(dense, embeddings)


class Rooted(Sum):
    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + torch.sqrt(-1 - dense.sum(1).abs())


class Zero(Sum):
    """Its gradients are zero at first."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) * self.last


class Deaf(Sum):
    """It reads the first features only, and the dense values only if it sees."""

    def __init__(self, spec: ModelSpec, *, hears: int = 1, sees: bool = True) -> None:
        super().__init__(spec)
        self.names, self.sees = spec.names[:hears], sees

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense if self.sees else torch.zeros_like(dense), embeddings)
