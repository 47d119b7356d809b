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


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The program, the dense part of the model, and the settings of a step; everything in it belongs to that trainer alone.

    parameters: those of the module that are trained, in its order; layouts: of the rows, by table.
    """

    schedule: Schedule
    module: nn.Module
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    layouts: Sequence[RowLayout]
    block: BlockLayout
    rules: UpdateRules
    kernels: Kernels
    seed: int
    device: torch.device
    allow_nan: bool

    def moves(self, event: Event) -> list[LaneEvent]:
        """Every lane's part of an event."""
        return [self.schedule.lane(event, lane) for lane in range(self.schedule.header.lanes)]
