"""Run a model with reproducible outputs: in evaluation mode, and in tiles of a fixed size.

Equal records get equal scores, to the bit, whatever other records are scored with them. The order
of the sums within a matrix product depends on the number of samples, so in slices of different
sizes equal records would get scores that differ in their last bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the modes of a module on leaving the context.

    Within the context the modes may be changed. Afterwards each submodule is in the mode in which
    it was before.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


TILE = 256
"""The number of samples in a tile."""


def in_tiles(forward: Callable[[Tensor, Tensor], Tensor], dense: Tensor, block: Tensor) -> Tensor:
    """Run `forward` on samples tile by tile, and return the outputs, [b] or [b, L].

    Samples keep their order. The last tile is padded with copies of its last sample, and their
    outputs are dropped. There must be at least one sample.

    Args:
        forward: returns the outputs of one tile.
        dense: float32 [b, n], contiguous.
        block: float32 [b, F, W], contiguous.
    """
    outputs = []
    for first in range(0, len(block), TILE):
        tile = [dense[first : first + TILE], block[first : first + TILE]]
        samples = len(tile[1])
        if samples < TILE:
            tile = [torch.cat([given, given[-1:].expand(TILE - samples, *given.shape[1:])]) for given in tile]
        outputs.append(forward(*tile)[:samples])
    return torch.cat(outputs)
