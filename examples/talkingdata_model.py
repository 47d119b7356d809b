"""A model of one's own for clicks on apps: the features of a click side by side, a bottom that both labels share, and a tower for each."""

import torch
from torch import Tensor, nn

from foreload.trainer.models.spec import Embeddings, ModelSpec, flattened


class Clicks(nn.Module):
    """It is given dense values and embeddings (docs/models.md)."""

    def __init__(self, spec: ModelSpec, bottom: int = 64, tower: int = 16) -> None:
        super().__init__()
        self.spec = spec
        self.bottom = nn.Sequential(nn.Linear(spec.dense_width + spec.width, bottom), nn.ReLU())
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(bottom, tower), nn.ReLU(), nn.Linear(tower, 1)) for _ in spec.labels)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """A logit a label: float32 [samples, labels]."""
        shared = self.bottom(torch.cat([dense, flattened(embeddings, self.spec)], 1))
        return torch.cat([tower(shared) for tower in self.towers], 1)
