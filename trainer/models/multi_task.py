"""Models of several labels: MMoE and shared bottom.

MMoE: Ma et al. 2018, 10.1145/3219819.3220007. Shared bottom: Caruana 1997, 10.1023/A:1007379606734.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.spec import ModelSpec, draw_weights, flattened, fraction, mlp, sizes


class Towers(nn.Module):
    """One tower per label, each with hidden layers and one output.

    Args:
        inputs: the number of columns that each tower gets.
        hidden: the sizes of the hidden layers.
        dropout: the dropout probability between the layers.
    """

    def __init__(self, spec: ModelSpec, inputs: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.of_label = nn.ModuleList(mlp(inputs, (*hidden, 1), last_relu=False, dropout=dropout) for _ in spec.labels)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs [b, labels], or [b] if there is one label.

        Args:
            inputs: per label [b, columns].
        """
        outputs = [tower(own) for tower, own in zip(self.of_label, inputs, strict=True)]
        return outputs[0].squeeze(1) if len(outputs) == 1 else torch.cat(outputs, 1)


class MMoE(nn.Module):
    """Experts that a gate per label mixes, and one tower per label.

    Args:
        experts: the number of experts.
        expert: the sizes of each expert's layers.
        tower: the sizes of the hidden layers of each label's tower.
        dropout: the dropout probability between the layers of experts and towers.
        init_std: the standard deviation of the linear layers' weights, with biases of zero. If 0,
            they begin as PyTorch's do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        experts: int = 4,
        expert: str | Sequence[int] = "64-32",
        tower: str | Sequence[int] = "16",
        dropout: float = 0.0,
        init_std: float = 0.0,
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
        draw_weights(self, "mmoe", init_std)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs [b, labels], or [b] if there is one label.

        Args:
            dense: float32 [b, n].
            embeddings: per feature [b, D].
        """
        inputs = torch.cat([dense, flattened(embeddings, self.spec)], 1)
        views = torch.stack([expert(inputs) for expert in self.experts], 1)  # [b, experts, width]
        shares = [gate(inputs).softmax(1) for gate in self.gates]  # per label [b, experts]
        # Multiply elementwise: in a batch of matrix products, each product would have a single row.
        return self.towers([(share.unsqueeze(2) * views).sum(1) for share in shares])


class SharedBottom(nn.Module):
    """Layers that all labels share, and one tower per label.

    Args:
        bottom: the sizes of the layers that the labels share.
        tower: the sizes of the hidden layers of each label's tower.
        dropout: the dropout probability between all of these layers.
        init_std: the standard deviation of the linear layers' weights, with biases of zero. If 0,
            they begin as PyTorch's do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        bottom: str | Sequence[int] = "128-64",
        tower: str | Sequence[int] = "32",
        dropout: float = 0.0,
        init_std: float = 0.0,
    ) -> None:
        super().__init__()
        self.spec = spec
        shared, own = sizes("shared_bottom: bottom", bottom), sizes("shared_bottom: tower", tower)
        share = fraction("shared_bottom: dropout", dropout)
        width = spec.dense_width + spec.width
        self.bottom = mlp(width, shared, last_relu=True, dropout=share)
        self.towers = Towers(spec, (width, *shared)[-1], own, share)
        draw_weights(self, "shared_bottom", init_std)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs [b, labels], or [b] if there is one label.

        Args:
            dense: float32 [b, n].
            embeddings: per feature [b, D].
        """
        shared = self.bottom(torch.cat([dense, flattened(embeddings, self.spec)], 1))
        return self.towers([shared] * len(self.spec.labels))
