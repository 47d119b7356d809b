"""Forward and backward of one lane on its slice, without any other lane's data.

The bits of the results therefore do not depend on which trainer hosts the lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreload.base.hashing import key
from foreload.cache.rows.device_copies import upload
from foreload.pipelines.schedule.format import Event, LaneEvent
from foreload.trainer.compute.layouts import Lookups
from foreload.trainer.models.diagnosis import check_apart, mixes_samples
from foreload.trainer.models.fitting import model_name
from foreload.trainer.models.generators import seed_torch
from foreload.trainer.models.inference import in_tiles
from foreload.trainer.models.own_losses import outputs_and_losses, outputs_of, own_losses_of, penalty_of
from foreload.trainer.step.term_session import TrainerParts


@dataclass(frozen=True, slots=True)
class LocalRows:
    """The local rows of a slice.

    Attributes:
        rows: float32 [n, W].
        places: int32 [local rows], the places of the local rows in `rows`. If None, the local rows
            are all of `rows`, in order.
    """

    rows: Tensor
    places: np.ndarray | None

    @property
    def count(self) -> int:
        """The number of local rows."""
        return self.rows.shape[0] if self.places is None else self.places.size


@dataclass(frozen=True, slots=True)
class SliceGradients:
    """The result of a slice's backward pass.

    Attributes:
        rows: float32 [local rows, W], the gradients of the local rows.
        dense: one tensor for each trained parameter, in its shape.
        loss: the sum over the slice's samples, divided by the number of samples in the whole batch.
            So the lanes' losses add up to the batch's mean.
    """

    rows: Tensor
    dense: list[Tensor]
    loss: Tensor


def _gathered(parts: TrainerParts, moves: LaneEvent, local: LocalRows, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return the dense values [b, n] and the embedding block [b, F, W] of a lane's slice."""
    block = torch.empty(
        (len(moves.labels), len(parts.block.names), parts.block.width), device=parts.device, requires_grad=requires_grad
    )
    parts.kernels.gather_block(local.rows, Lookups(moves.index, moves.offsets, parts.block), block, local.places)
    # A copy, since a mapped view may lie at any address, on which the bits of a product depend.
    return upload(moves.dense, parts.device), block


def _module_of(parts: TrainerParts, steps_done: int) -> Callable[[Tensor, Tensor], Any]:
    """Return the module as a function of dense values and an embedding block.

    It returns what forward does: the outputs, or (outputs, own losses).

    Args:
        steps_done: the number of training steps before, which a model that takes the step receives.
    """
    given = {"step": steps_done} if parts.takes_step else {}

    def run(dense: Tensor, block: Tensor) -> Any:
        return parts.module(dense, parts.block.embeddings(block), **given)

    return run


def evaluate(parts: TrainerParts, moves: LaneEvent, local: LocalRows, steps_done: int) -> Tensor:
    """Return the outputs, [b] or [b, labels], of a lane's slice outside training.

    The slice must not be empty. It is computed in tiles, unless the model mixes samples. The module
    must be in evaluation mode, and no gradients are computed.

    Args:
        moves: the lane's part of the event.
        local: the local rows of the slice.
        steps_done: the number of training steps before.
    """
    dense, block = _gathered(parts, moves, local)
    module = _module_of(parts, steps_done)

    def run(dense: Tensor, block: Tensor) -> Tensor:
        outputs: Tensor = outputs_of(module(dense, block))
        return outputs

    return run(dense, block) if mixes_samples(parts.module) else in_tiles(run, dense, block)


def output_shape(moves: LaneEvent) -> tuple[int, ...]:
    """Return the shape of a slice's outputs: [b], or [b, labels] if there are several labels."""
    samples, labels = moves.labels.shape
    return (samples,) if labels == 1 else (samples, labels)


def check_samples(parts: TrainerParts, moves: LaneEvent, local: LocalRows, steps_done: int) -> None:
    """Refuse a model whose output for a sample depends on other samples.

    Args:
        moves: the lane's part of the event, with two or more samples.
        local: the local rows of the slice.
        steps_done: the number of training steps before.

    Raises:
        ModelError: the outputs depend on other samples.
    """
    run, name = _module_of(parts, steps_done), model_name(parts.module)

    def forward(dense: Tensor, block: Tensor) -> Tensor:
        # Seed each call alike, so that random draws do not make outputs differ.
        seed_torch(parts.seed, parts.device.type)
        return outputs_and_losses(name, run(dense, block), len(block))

    check_apart(name, parts.module, forward, *_gathered(parts, moves, local))


def learn(parts: TrainerParts, event: Event, lane: int, moves: LaneEvent, local: LocalRows, with_penalty: bool) -> SliceGradients:
    """Run forward and backward of a lane's slice.

    This changes nothing but torch's generator and the module's mode.

    Args:
        event: the training step.
        lane: the lane, which the seed of random draws depends on.
        moves: the lane's part of the event.
        local: the local rows of the slice.
        with_penalty: whether this lane has the module's penalty.
    """
    if not len(moves.labels):
        # A batch with fewer samples than lanes leaves some slices empty.
        no_gradients = [torch.zeros_like(parameter) for parameter in parts.parameters]
        return SliceGradients(
            torch.empty((0, parts.block.width), device=parts.device), no_gradients, torch.zeros((), device=parts.device)
        )
    # Random draws, as for dropout, depend on seed, step and lane only, not on the trainer.
    seed_torch(key(parts.seed, event.step, lane) >> 1, parts.device.type)
    if not all(part.training for part in parts.module.modules()):
        parts.module.train()
    dense_values, block = _gathered(parts, moves, local, requires_grad=True)
    result = _module_of(parts, event.step)(dense_values, block)
    outputs: Tensor = outputs_of(result)
    labels = upload(moves.labels, parts.device).reshape(outputs.shape)
    weights = None if moves.weights is None else upload(moves.weights, parts.device)
    # Divide by the samples of the whole batch, so that the lanes' losses and gradients add up.
    name = model_name(parts.module)
    total = parts.loss.of_slice(outputs, labels, weights)
    if (own := own_losses_of(name, result, len(labels))) is not None:
        total = total + own.sum()
    loss = total / event.samples
    if with_penalty and (penalty := penalty_of(name, parts.module)) is not None:
        loss = loss + penalty
    # A parameter or block that the loss does not depend on has no gradient: it counts as zeros.
    of_block, *of_parameters = torch.autograd.grad(loss, [block, *parts.parameters], allow_unused=True)
    dense = [g if g is not None else torch.zeros_like(p) for g, p in zip(of_parameters, parts.parameters, strict=True)]
    gradient = of_block if of_block is not None else torch.zeros_like(block)
    rows = torch.empty((local.count, parts.block.width), device=parts.device)
    parts.kernels.row_gradients(gradient, Lookups(moves.index, moves.offsets, parts.block), rows)
    return SliceGradients(rows, dense, loss.detach())
