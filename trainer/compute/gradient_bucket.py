"""The dense gradients of a lane end to end in one vector, and in the parcels that the exchange carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 16  # float32 values: each gradient begins 64 bytes on, so that it is aligned like a tensor of its own


@dataclass(frozen=True, slots=True)
class Piece:
    """What of a parameter lies in one chunk: its elements start .. end - 1, at `place` of the parcels' memory; whole: that is all of it."""

    parameter: int
    start: int
    end: int
    place: int
    whole: bool


class GradientBucket:
    """Where the gradient of each parameter stands in a vector float32 [length], and which chunk of that each trainer adds.

    A lane's parcel for a trainer is that trainer's chunk of the lane's vector, and behind it the lane's loss, so that every trainer knows all
    losses as soon as it has the parcels meant for it.
    """

    def __init__(self, parameters: Sequence[Tensor], chunks: int) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        sizes = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1]
        self._bounds = [self.length * k // chunks for k in range(chunks + 1)]
        self._memory = self.length + chunks * _ALIGNED
        # A parcel begins as many values on as there are losses before it, and those are aligned, too.
        self._parcels = [slice(begin + k * _ALIGNED, end + k * _ALIGNED + 1) for k, (begin, end) in enumerate(self._chunks())]
        self._pieces = [
            piece for k, (begin, end) in enumerate(self._chunks()) for piece in self._pieces_of(begin, end, k * _ALIGNED)
        ]
        self._packed: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def _chunks(self) -> list[tuple[int, int]]:
        return list(zip(self._bounds[:-1], self._bounds[1:], strict=True))

    def _pieces_of(self, begin: int, end: int, shift: int) -> list[Piece]:
        found = []
        for number, (first, shape) in enumerate(zip(self._starts[:-1], self._shapes, strict=True)):
            start, stop = max(begin, first), min(end, first + shape.numel())
            if start < stop:
                found.append(Piece(number, start - first, stop - first, start + shift, stop - start == shape.numel()))
        return found

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """Views of a vector [length], one a parameter, in its shape."""
        return [
            flat[start : start + shape.numel()].view(shape) for start, shape in zip(self._starts[:-1], self._shapes, strict=True)
        ]

    def pack(self, gradients: Sequence[Tensor], loss: Tensor, lane: int) -> list[Tensor]:
        """A lane's parcels, one a trainer, in the same memory each time; what lies between gradients is 0."""
        if lane not in self._packed:
            memory = torch.zeros(self._memory, device=loss.device)
            views = [memory[piece.place : piece.place + piece.end - piece.start] for piece in self._pieces]
            for place, piece in enumerate(self._pieces):
                if piece.whole:
                    views[place] = views[place].view(self._shapes[piece.parameter])
            self._packed[lane] = memory, views
        memory, views = self._packed[lane]
        values = [
            gradients[piece.parameter] if piece.whole else gradients[piece.parameter].reshape(-1)[piece.start : piece.end]
            for piece in self._pieces
        ]
        torch._foreach_copy_(views, values)
        parcels = [memory[parcel] for parcel in self._parcels]
        for parcel in parcels:
            parcel[-1] = loss
        return parcels
