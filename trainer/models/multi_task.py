"""Models of several labels: MMoE (Ma et al. 2018, 10.1145/3219819.3220007) and shared bottom (Caruana 1997, 10.1023/A:1007379606734)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.spec import ModelSpec, flattened, fraction, mlp, sizes


class Towers(nn.Module):
    """A tower for each label, of hidden layers of these sizes and one output. inputs: columns of what each tower gets."""

    def __init__(self, spec: ModelSpec, inputs: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.of_label = nn.ModuleList(mlp(inputs, (*hidden, 1), last_relu=False, dropout=dropout) for _ in spec.labels)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """inputs: per label [b, columns]. Returns outputs [b, labels], or [b] where there is one label."""
        outputs = [tower(own) for tower, own in zip(self.of_label, inputs, strict=True)]
        return outputs[0].squeeze(1) if len(outputs) == 1 else torch.cat(outputs, 1)


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
