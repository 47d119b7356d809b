"""The dense gradients of a lane end to end in one vector, for the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 16  # float32 values: each gradient begins 64 bytes on, so that it is aligned like a tensor of its own


class FlatGradients:
    """Where the gradient of each parameter stands in a vector float32 [length], with one loss per lane behind them."""

    def __init__(self, parameters: Sequence[Tensor], lanes: int) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        sizes = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1] + lanes
        self._packed: dict[int, Tensor] = {}

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """Views of the vector, one a parameter, in its shape."""
        return [
            flat[start : start + shape.numel()].view(shape) for start, shape in zip(self._starts[:-1], self._shapes, strict=True)
        ]

    def losses(self, flat: Tensor) -> Tensor:
        """The view of the vector that holds the losses, float32 [lanes]."""
        return flat[self._starts[-1] :]

    def pack(self, gradients: Sequence[Tensor], loss: Tensor, lane: int) -> Tensor:
        """A lane's vector, the same one each time; what lies between gradients, and other lanes' losses, are 0."""
        flat = self._packed.get(lane)
        if flat is None:
            flat = self._packed[lane] = torch.zeros(self.length, device=loss.device)
        torch._foreach_copy_(self.gradients(flat), list(gradients))
        self.losses(flat)[lane] = loss
        return flat
