"""Forward outside training, on tiles of one fixed size: so a record gets the same score, to the bit, in whatever company, and equal records tie.

The order of the sums within a product depends on how many samples it has: of slices of different sizes, equal records would get scores that differ in
their last bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE = 256
"""Samples of a tile."""


def in_tiles(forward: Callable[[Tensor, Tensor], Tensor], dense: Tensor, block: Tensor) -> Tensor:
    """Outputs [b] or [b, L] of samples, at least one, cut in order; the last tile is filled up with copies of its last sample, which are dropped.

    forward: gives those of a tile; dense: float32 [b, n]; block: float32 [b, F, W]; both contiguous.
    """
    outputs = []
    for first in range(0, len(block), TILE):
        tile = [dense[first : first + TILE], block[first : first + TILE]]
        samples = len(tile[1])
        if samples < TILE:
            tile = [torch.cat([given, given[-1:].expand(TILE - samples, *given.shape[1:])]) for given in tile]
        outputs.append(forward(*tile)[:samples])
    return torch.cat(outputs)
