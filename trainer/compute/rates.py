"""Learning rates by step, and the clipping of dense gradients (docs/definitions.md).

The rates are those of rows and of the dense part. Gradients are clipped by their norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreload.base.compiled import nb
from foreload.trainer.compute.layouts import UpdateRules
from foreload.trainer.compute.rate_schedules import RateSchedule
from foreload.trainer.compute.row_optimizers import RowOptimizer


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates of a job.

    Attributes:
        rules: the rules of the rows, at step 0 and before schedules.
        rows: the optimizers of the rows, by table.
        row_schedule: the schedule of the rows' learning rates. If None, they are the same at every
            step.
        dense: the learning rate of the dense part.
        dense_schedule: the schedule of `dense`. If None, it is the same at every step.
    """

    rules: UpdateRules
    rows: tuple[RowOptimizer, ...]
    row_schedule: RateSchedule | None
    dense: float
    dense_schedule: RateSchedule | None

    def rules_at(self, step: int) -> UpdateRules:
        """Return the rows' rules at a training step."""
        if self.row_schedule is None and not self.rules.by_step:
            return self.rules
        return self.rules.at(self.rows, step, 1.0 if self.row_schedule is None else self.row_schedule.factor(step))

    def set_dense(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the dense optimizer's learning rate to that of a training step."""
        if self.dense_schedule is not None:
            rate = self.dense * self.dense_schedule.factor(step)
            for group in optimizer.param_groups:
                group["lr"] = rate


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale gradients in place, so that the norm over all of them is at most `most`.

    If the norm is not a number, the gradients are left as they are. The norm is the root of the sum
    of squares in float64, gradient after gradient, each added up by `_squares`. So it is the same
    everywhere.
    """
    total = 0.0
    for gradient in gradients:
        total += _squares(gradient.detach().cpu().reshape(-1).numpy())
    norm = math.sqrt(total)
    if norm > most:
        torch._foreach_mul_(list(gradients), float(np.float32(most / norm)))


@nb.njit(nogil=True, cache=True)
def _squares(values: np.ndarray) -> float:
    """Return the sum of the squares of float32 values, in float64.

    There are eight sums, each of the values j, j + 8, .., which are added pair by pair.
    """
    sums = np.zeros(8)
    whole = values.size // 8 * 8
    for first in range(0, whole, 8):
        for j in range(8):
            value = np.float64(values[first + j])
            sums[j] += value * value
    for j in range(values.size - whole):
        value = np.float64(values[whole + j])
        sums[j] += value * value
    for j in range(4):
        sums[j] += sums[j + 4]
    for j in range(2):
        sums[j] += sums[j + 2]
    return sums[0] + sums[1]
