"""Towers: the last layers of a model of several labels, an MLP for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec, mlp


class Towers(nn.Module):
    """A tower for each label, of hidden layers of these sizes and one output. inputs: columns of what each tower gets."""

    def __init__(self, spec: ModelSpec, inputs: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.of_label = nn.ModuleList(mlp(inputs, (*hidden, 1), last_relu=False, dropout=dropout) for _ in spec.labels)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """inputs: per label [b, columns]. Returns outputs [b, labels], or [b] where there is one label."""
        outputs = [tower(own) for tower, own in zip(self.of_label, inputs, strict=True)]
        return outputs[0].squeeze(1) if len(outputs) == 1 else torch.cat(outputs, 1)
