"""Run a model so that its outputs are reproducible: in evaluation mode, and in tiles of one fixed size.

Equal records get equal scores, to the bit, whatever is scored beside them. The order of the sums within a product depends on how many samples it has:
in slices of different sizes, equal records would get scores that differ in their last bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Within the context a module's modes may be changed; behind it each part is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


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


# The generator behind numpy.random's functions, which have no other way to it.
