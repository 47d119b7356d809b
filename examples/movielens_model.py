"""A model of one's own for ratings: one trunk over user, movie and genres, and an output for each label."""

import torch
from torch import Tensor, nn

import foreload.nn
from foreload.trainer.models.spec import ModelSpec


class Ratings(nn.Module):
    """As one would write it in plain PyTorch, with foreload's layers where nn.Embedding and nn.EmbeddingBag stood."""

    def __init__(self, spec: ModelSpec, hidden: int = 64) -> None:
        super().__init__()
        self.user, self.movie = foreload.nn.Embedding("userId"), foreload.nn.Embedding("movieId")
        self.genres = foreload.nn.EmbeddingBag("genres")
        self.trunk = nn.Sequential(nn.Linear(spec.width, hidden), nn.ReLU(), nn.Linear(hidden, hidden // 2), nn.ReLU())
        self.outputs = nn.Linear(hidden // 2, len(spec.labels))

    def forward(self) -> Tensor:
        """A logit that the movie is liked, and the number of stars: float32 [samples, 2]."""
        outputs: Tensor = self.outputs(self.trunk(torch.cat([self.user(), self.movie(), self.genres()], 1)))
        return outputs
