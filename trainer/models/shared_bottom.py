"""Shared bottom: one MLP that all labels share, and a tower of each label's own on it (Caruana 1997, Machine Learning 28)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec, flattened, fraction, mlp, sizes
from foreload.trainer.models.towers import Towers


class SharedBottom(nn.Module):
    """Options: bottom, sizes of the layers that labels share; tower, of the hidden layers of each label's own; dropout between all of them."""

    def __init__(
        self, spec: ModelSpec, *, bottom: str | Sequence[int] = "128-64", tower: str | Sequence[int] = "32", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.spec = spec
        shared, own = sizes("shared_bottom: bottom", bottom), sizes("shared_bottom: tower", tower)
        share = fraction("shared_bottom: dropout", dropout)
        width = spec.dense_width + spec.width
        self.bottom = mlp(width, shared, last_relu=True, dropout=share)
        self.towers = Towers(spec, (width, *shared)[-1], own, share)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """dense [b, n]; embeddings: per feature [b, D]. Returns outputs [b, labels], or [b] where there is one label."""
        shared = self.bottom(torch.cat([dense, flattened(embeddings, self.spec)], 1))
        return self.towers([shared] * len(self.spec.labels))
