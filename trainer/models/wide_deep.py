"""Wide & Deep: a linear model in parallel with an MLP (Cheng et al. 2016, arXiv:1606.07792)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from foreload.trainer.models.built_in import LINEAR
from foreload.trainer.models.spec import (
    ModelSpec,
    draw_weights,
    flattened,
    fraction,
    mlp,
    single_columns,
    sizes,
)


class WideDeep(nn.Module):
    """A linear model of ids and dense values, in parallel with an MLP.

    Each row has one further weight, `linear`, for the linear model.

    Args:
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
        spec.one_output("wide_deep")
        self.spec = spec
        hidden = sizes("wide_deep: deep", deep)
        self.wide = nn.Linear(spec.dense_width, 1) if spec.dense_width else None
        self.deep = mlp(
            spec.dense_width + spec.width, (*hidden, 1), last_relu=False, dropout=fraction("wide_deep: dropout", dropout)
        )
        draw_weights(self, "wide_deep", init_std)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [b].

        Args:
            dense: float32 [b, n].
            embeddings: per feature [b, D], and "<feature>.linear" [b, 1].
        """
        logits = self.deep(torch.cat([dense, flattened(embeddings, self.spec)], 1)).squeeze(1)
        if self.spec.features:
            logits = logits + single_columns(embeddings, "linear", self.spec).sum(1)
        return logits if self.wide is None else logits + self.wide(dense).squeeze(1)
