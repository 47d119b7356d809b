"""MMoE: experts that all labels share, mixed for each by a gate of its own, and a tower on the mixture (Ma et al. 2018, 10.1145/3219819.3220007)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.spec import ModelSpec, flattened, fraction, mlp, sizes
from foreload.trainer.models.towers import Towers


class MMoE(nn.Module):
    """Options: experts, how many; expert, sizes of each one's layers; tower, of the hidden layers of each label's; dropout between layers of both."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        experts: int = 4,
        expert: str | Sequence[int] = "64-32",
        tower: str | Sequence[int] = "16",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.spec = spec
        widths, own = sizes("mmoe: expert", expert), sizes("mmoe: tower", tower)
        if experts < 1:
            raise ModelError(f"mmoe: experts must be at least 1; got {experts}")
        if not widths:
            raise ModelError(f"mmoe: expert must have at least one layer, such as 64-32; got {expert!r}")
        share = fraction("mmoe: dropout", dropout)
        inputs = spec.dense_width + spec.width
        self.experts = nn.ModuleList(mlp(inputs, widths, last_relu=True, dropout=share) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(inputs, experts, bias=False) for _ in spec.labels)
        self.towers = Towers(spec, widths[-1], own, share)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """dense [b, n]; embeddings: per feature [b, D]. Returns outputs [b, labels], or [b] where there is one label."""
        inputs = torch.cat([dense, flattened(embeddings, self.spec)], 1)
        views = torch.stack([expert(inputs) for expert in self.experts], 1)  # [b, experts, width]
        shares = [gate(inputs).softmax(1) for gate in self.gates]  # per label [b, experts]
        # By elements: as a batch of matrix products each would be of one row.
        return self.towers([(share.unsqueeze(2) * views).sum(1) for share in shares])
