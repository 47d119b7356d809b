"""The dense gradients of a lane end to end in one vector, cut into one chunk per trainer, and the parcels in which chunks are sent.

Each trainer adds one chunk over all lanes (docs/internals/trainer.md, A step). A parcel is a lane's chunk with the lane's loss behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 16  # float32 values: each gradient begins 64 bytes on, so that it is aligned like a tensor of its own


@dataclass(frozen=True, slots=True)
class Piece:
    """What of a parameter lies in one chunk: its elements start .. end - 1, at `place` of the memory of the parcels; whole: all of them."""

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
        """parameters: those that are trained, in order; chunks: as many as trainers."""
        self._shapes = [parameter.shape for parameter in parameters]
        sizes = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1]
        self._bounds = [self.length * k // chunks for k in range(chunks + 1)]
        self._memory = self.length + chunks * _ALIGNED
        # Every parcel before it adds a loss, which takes _ALIGNED values of memory, so that gradients behind it stay aligned.
        self._parcels = [slice(begin + k * _ALIGNED, end + k * _ALIGNED + 1) for k, (begin, end) in enumerate(self._chunks())]
        self._pieces = [
            piece for k, (begin, end) in enumerate(self._chunks()) for piece in self._pieces_of(begin, end, k * _ALIGNED)
        ]
        self._packed: dict[int, tuple[Tensor, list[Tensor]]] = {}

    @property
    def parcel_sizes(self) -> list[int]:
        """Of each trainer, how many values a parcel for it has."""
        return [end - begin + 1 for begin, end in self._chunks()]

    def _chunks(self) -> list[tuple[int, int]]:
        return list(zip(self._bounds[:-1], self._bounds[1:], strict=True))

    def _pieces_of(self, begin: int, end: int, shift: int) -> list[Piece]:
        """What lies between begin and end of the vector, which stand `shift` values further on in the parcels' memory."""
        pieces = []
        for number, (first, shape) in enumerate(zip(self._starts[:-1], self._shapes, strict=True)):
            start, stop = max(begin, first), min(end, first + shape.numel())
            if start < stop:
                pieces.append(Piece(number, start - first, stop - first, start + shift, stop - start == shape.numel()))
        return pieces

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """Views of a vector [length], one a parameter, in its shape."""
        return [
            flat[start : start + shape.numel()].view(shape) for start, shape in zip(self._starts[:-1], self._shapes, strict=True)
        ]

    def pack(self, gradients: Sequence[Tensor], loss: Tensor, lane: int) -> list[Tensor]:
        """A lane's parcels, one per trainer, float32 [chunk + 1]; in the lane's same memory each time, so the next call overwrites them.

        gradients: one per parameter, in its shape; loss: of the lane, without dimensions. What lies between gradients, for alignment, is 0.
        """
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
