"""Models that are taken, with a word: outputs that are probably probabilities, and some that are not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from mixing_cases import Apart as Apart
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec


class Softmax(nn.Module):
    """The second of two classes, behind a softmax."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.names = spec.names
        self.out: nn.Module = nn.Linear(spec.width + spec.dense_width, 2)

    def pair(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """[b, 2]"""
        outputs: Tensor = self.out(torch.cat([dense, *(embeddings[name] for name in self.names)], 1))
        return outputs

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return self.pair(dense, embeddings).softmax(1)[:, 1]


class Deep(Softmax):
    """A softmax behind two layers, whose probabilities are rounded to 0 and 1 where parameters are large."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        width = spec.width + spec.dense_width
        self.out = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


class Clamped(Softmax):
    """A sigmoid written out, clamped."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return (1 / (1 + torch.exp(-self.pair(dense, embeddings)[:, 0]))).clamp(1e-6, 1 - 1e-6)


class SomeProbable(Softmax):
    """Of two labels, the second has probabilities."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        pair = self.pair(dense, embeddings)
        return torch.stack([pair[:, 0], pair.softmax(1)[:, 1]], 1)


class Zeros(Softmax):
    """Logits are small and positive at first, and nothing of the kind later."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.out = nn.Linear(spec.width + spec.dense_width, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, 0.1)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return self.pair(dense, embeddings)[:, 0]
