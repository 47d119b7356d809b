"""DCN-v2: cross layers in parallel with an MLP (Wang et al. 2021, arXiv:2008.13535)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.spec import (
    ModelSpec,
    draw_weights,
    flattened,
    fraction,
    mlp,
    sizes,
)


def _cross(width: int, rank: int) -> nn.Module:
    """Return a cross layer's map: a full matrix for rank 0, else a product of two thin ones."""
    if rank == 0:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))


class DCN(nn.Module):
    """Cross layers and an MLP on the same inputs.

    Args:
        layers: the number of cross layers.
        rank: the rank of their matrices. 0 means full matrices.
        deep: the sizes of the MLP's layers.
        dropout: the dropout probability between the layers of the MLP.
        init_std: the standard deviation of the linear layers' weights, with biases of zero. If 0,
            they begin as PyTorch's do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: int = 2,
        rank: int = 0,
        deep: str | Sequence[int] = "128-64",
        dropout: float = 0.0,
        init_std: float = 0.0,
    ) -> None:
        super().__init__()
        spec.one_output("dcn")
        self.spec = spec
        width = spec.dense_width + spec.width
        if layers < 1:
            raise ModelError(f"dcn: layers must be at least 1; got {layers}")
        if not 0 <= rank <= width:
            raise ModelError(f"dcn: rank must be 0 (full) to {width}, the width of the input; got {rank}")
        hidden = sizes("dcn: deep", deep)
        self.cross = nn.ModuleList(_cross(width, rank) for _ in range(layers))
        self.deep = mlp(width, hidden, last_relu=True, dropout=fraction("dcn: dropout", dropout))
        self.last = nn.Linear(width + (hidden[-1] if hidden else 0), 1)
        draw_weights(self, "dcn", init_std)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [b].

        Args:
            dense: float32 [b, n].
            embeddings: per feature [b, D].
        """
        first = torch.cat([dense, flattened(embeddings, self.spec)], 1)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        outputs = [crossed, self.deep(first)] if len(self.deep) else [crossed]
        return self.last(torch.cat(outputs, 1)).squeeze(1)
