"""DLRM: dense values and embeddings, their dot products, two MLPs (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.pairwise import with_pairwise_dots
from foreload.trainer.models.spec import (
    ModelSpec,
    mlp,
    sizes,
    stacked,
)

_FEW_PRODUCTS = 3  # of features alone: of three


def little_to_interact(spec: ModelSpec) -> str | None:
    """What there is to say of data for which DLRM is hardly a model: its top MLP sees dot products of embeddings, and no embedding itself."""
    vectors = len(spec.features) + (spec.dense_width > 0)
    products = vectors * (vectors - 1) // 2
    if products > _FEW_PRODUCTS or (spec.dense_width and products > 1):
        return None
    beside = " and the dense values" if spec.dense_width else ""
    return (
        f"dlrm learns from {products} dot product{'s' * (products != 1)}{beside} here, and from no embedding itself; deepfm, dcn and wide_deep do: "
        "--model deepfm"
    )


class DLRM(nn.Module):
    """Options: bottom, sizes of the MLP on dense values (the last must be D; default 64-D); top, of that on its output and the dots (ends in 1).

    Buffers, as `with_pairwise_dots` takes them: pairs int64 [n*(n-1)/2], places int64 [n*n], n the features and, if there are dense values, one more.
    """

    pairs: Tensor
    places: Tensor

    def __init__(self, spec: ModelSpec, *, bottom: str | Sequence[int] = "", top: str | Sequence[int] = "64-32-1") -> None:
        super().__init__()
        spec.one_output("dlrm")
        self.spec = spec
        dimension = spec.equal_dimension("dlrm")
        bottom_sizes = sizes("dlrm: bottom", bottom) or (64, dimension)
        top_sizes = sizes("dlrm: top", top)
        if bottom_sizes[-1] != dimension:
            raise ModelError(
                f"dlrm: the last size of bottom must be the dimension of the embeddings, {dimension}; got {bottom_sizes[-1]}"
            )
        if top_sizes[-1:] != (1,):
            raise ModelError(f"dlrm: the last size of top must be 1, the logit; got {top!r}")
        vectors = len(spec.features) + bool(spec.dense_width)
        if vectors < 2:
            raise ModelError(
                "dlrm: there must be two features, or dense values, for a dot product; got 1 feature alone; use deepfm"
            )
        rows, columns = torch.tril_indices(vectors, vectors, -1)
        places = torch.full((vectors, vectors), len(rows))
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        self.register_buffer("places", places.flatten(), persistent=False)
        self.bottom = mlp(spec.dense_width, bottom_sizes, last_relu=True) if spec.dense_width else None
        self.top = mlp(len(rows) + (dimension if spec.dense_width else 0), top_sizes, last_relu=False)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """dense [b, n]; embeddings: per feature [b, D]. Returns logits [b]."""
        vectors = stacked(embeddings, self.spec)
        low = dense[:, :0] if self.bottom is None else self.bottom(dense)
        return self.top(with_pairwise_dots(low, vectors, self.pairs, self.places)).squeeze(1)
