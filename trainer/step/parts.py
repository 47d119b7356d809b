"""What a trainer has as long as its process lives, whatever term it is in and whichever lanes it hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.format import Event, LaneEvent
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.layouts import BlockLayout, UpdateRules
from foreload.trainer.compute.rates import Rates
from foreload.trainer.compute.training_loss import TrainingLoss


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The schedule, the dense part of the model, and the settings of a step; nothing in it is shared with another trainer.

    takes_step: whether the module's forward gets the number of steps done before; parameters: those of the module that are trained, in its order;
    layouts: of the rows, by table; block: of the embedding block; rules: the row optimizers; rates: learning rates by step; clip_dense: the most
    that the norm of the dense gradients may be, or None; dense_ema: how much of the parameters' moving average stays at each step, or None for none;
    loss: what is trained; seed: of the run; allow_nan: whether training goes on after a loss that is not finite.
    """

    schedule: Schedule
    module: nn.Module
    takes_step: bool
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    layouts: Sequence[RowLayout]
    block: BlockLayout
    rules: UpdateRules
    rates: Rates
    clip_dense: float | None
    dense_ema: float | None
    kernels: Kernels
    loss: TrainingLoss
    seed: int
    device: torch.device
    allow_nan: bool

    def moves(self, event: Event) -> list[LaneEvent]:
        """Every lane's part of an event, by lane: also of the lanes that others host, from whose masks follows what comes from them."""
        return [self.schedule.lane(event, lane) for lane in range(self.schedule.header.lanes)]
