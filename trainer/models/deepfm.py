"""DeepFM: a factorization machine and an MLP on the same embeddings.

Guo et al. 2017, arXiv:1703.04247.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from foreload.trainer.models.built_in import LINEAR
from foreload.trainer.models.spec import (
    ModelSpec,
    draw_weights,
    fraction,
    mlp,
    single_columns,
    sizes,
    stacked,
)


class DeepFM(nn.Module):
    """A factorization machine and an MLP on the same embeddings.

    Each row has one further weight, `linear`, of first order.

    Args:
        spec: the inputs. All features must have the same dimension.
        deep: the sizes of the MLP's hidden layers.
        dropout: the dropout probability between the hidden layers.
        init_std: the standard deviation of the linear layers' weights, with biases of zero. If 0,
            they begin as PyTorch's do.
    """

    further_columns: ClassVar[dict[str, int]] = LINEAR

    def __init__(
        self, spec: ModelSpec, *, deep: str | Sequence[int] = "128-64", dropout: float = 0.0, init_std: float = 0.0
    ) -> None:
        super().__init__()
        spec.one_output("deepfm")
        self.spec = spec
        dimension = spec.equal_dimension("deepfm")
        hidden = sizes("deepfm: deep", deep)
        self.first = nn.Linear(spec.dense_width, 1) if spec.dense_width else None
        inputs = spec.dense_width + len(spec.features) * dimension
        self.deep = mlp(inputs, (*hidden, 1), last_relu=False, dropout=fraction("deepfm: dropout", dropout))
        draw_weights(self, "deepfm", init_std)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [b].

        Args:
            dense: float32 [b, n].
            embeddings: per feature [b, D], and "<feature>.linear" [b, 1].
        """
        vectors = stacked(embeddings, self.spec)
        # The sum over pairs of dot products: (|sum v|^2 - sum |v|^2) / 2.
        second = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        deep = self.deep(torch.cat([dense, vectors.flatten(1)], 1)).squeeze(1)
        logits = deep + second + single_columns(embeddings, "linear", self.spec).sum(1)
        return logits if self.first is None else logits + self.first(dense).squeeze(1)
