"""Whether each output of a model depends on its own sample alone: on no other sample of the slice, nor on its place in it or on its size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.modes import modes_kept

Forward = Callable[[Tensor, Tensor], Tensor]
"""Outputs [b], or [b, labels], of dense values [b, n] and a block [b, F, W], under one seed whatever their values are."""

_NEAR = 1e-3  # an output to that of the same sample elsewhere, relative to 1 + its size; sums may run in another order there


def mixes_samples(module: nn.Module) -> bool:
    """Whether the class of a model, or of a part of it, declares `mixes_samples = True`."""
    return any(getattr(part, "mixes_samples", False) is True for part in module.modules())


def check_apart(name: str, module: nn.Module, forward: Forward, dense: Tensor, block: Tensor) -> None:
    """Refuse a module whose outputs depend on other samples than their own, unless it declares that. Raises ModelError.

    Exact: of two batches of one shape, with the same sample at one place and others everywhere else, its output has the same bits, in training and
    in evaluation mode. Nearly, in evaluation mode: the same sample at another place, and alone. Modes are as before afterwards.

    Args:
        name: of the model, for errors.
        module: that `forward` runs.
        forward: runs it on samples of this shape, and on one.
        dense: float32 [b, n].
        block: float32 [b, F, W]; b is at least 2.
    """
    if mixes_samples(module):
        return
    with modes_kept(module), torch.no_grad():
        for training in (True, False):
            module.train(training)
            outputs = forward(dense, block)
            if not torch.equal(forward(dense, block).nan_to_num(), outputs.nan_to_num()):
                continue  # it keeps a state, which is another fault, and shows elsewhere
            _check_bits(name, training, forward, dense, block, outputs)
            if not training:
                _check_place(name, forward, dense, block, outputs)


def _check_bits(name: str, training: bool, forward: Forward, dense: Tensor, block: Tensor, outputs: Tensor) -> None:
    samples = len(block)
    # Values of the same kind as those given: dense ones may be anything that a module counts on; rows of tables are learned, and may be any numbers.
    generator = torch.Generator().manual_seed(samples)
    noise = torch.randn(block.shape, generator=generator).to(block.device) * (block.std() + 0.1)
    other_dense, other_block = dense.roll(1, 0), block.roll(1, 0) + noise
    for place in sorted({0, samples // 2, samples - 1}):
        dense_there, block_there = other_dense.clone(), other_block.clone()
        dense_there[place], block_there[place] = dense[place], block[place]
        got = forward(dense_there, block_there)[place]
        if not torch.equal(got, outputs[place]) and not bool((got.isnan() & outputs[place].isnan()).all()):
            raise _refused(
                name, f"{'' if training else 'in evaluation mode '}an output changes with the other samples of its slice, by "
                f"{float((got - outputs[place]).abs().max()):.3g}"
            )  # fmt: skip


def _check_place(name: str, forward: Forward, dense: Tensor, block: Tensor, outputs: Tensor) -> None:
    rolled = forward(dense.roll(1, 0), block.roll(1, 0)).roll(-1, 0)
    alone = forward(dense[:1].clone(), block[:1].clone())
    for got, wanted, what in ((rolled, outputs, "its place in the slice"), (alone, outputs[:1], "the size of its slice")):
        differs = (got - wanted).abs()
        if bool((differs > _NEAR * (1 + wanted.abs())).any()):
            raise _refused(name, f"an output changes with {what}, by {float(differs.nan_to_num().max()):.3g}")


def _refused(name: str, what: str) -> ModelError:
    return ModelError(
        f"{name}: an output must depend on its own sample alone, for slices differ from training to predictions; {what}; look for attention without "
        "batch_first=True, norms over the batch, and [b] with [b, 1], which broadcasts to [b, b]; where it is meant, declare mixes_samples = True in "
        "its class"
    )
