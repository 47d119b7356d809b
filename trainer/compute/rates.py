"""Learning rates of rows and of the dense part by step, and the clipping of dense gradients by their norm (docs/definitions.md)."""

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
    """rules: of the rows, at step 0 and before schedules; rows: their optimizers, by table; dense: the learning rate of the dense part.
    row_schedule, dense_schedule: of learning rates; None: the same at every step.
    """

    rules: UpdateRules
    rows: tuple[RowOptimizer, ...]
    row_schedule: RateSchedule | None
    dense: float
    dense_schedule: RateSchedule | None

    def rules_at(self, step: int) -> UpdateRules:
        """The rows' rules at a training step."""
        if self.row_schedule is None and not self.rules.by_step:
            return self.rules
        return self.rules.at(self.rows, step, 1.0 if self.row_schedule is None else self.row_schedule.factor(step))

    def set_dense(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Have the dense optimizer use the learning rate of a training step."""
        if self.dense_schedule is not None:
            rate = self.dense * self.dense_schedule.factor(step)
            for group in optimizer.param_groups:
                group["lr"] = rate


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale gradients, in place, so that their norm over all of them is at most `most`; those of a larger or undefined norm are left as they are.

    The norm is the root of the sum of squares in float64, gradient after gradient, of each as `_squares` adds them up: the same everywhere.
    """
    total = 0.0
    for gradient in gradients:
        total += _squares(gradient.detach().cpu().reshape(-1).numpy())
    norm = math.sqrt(total)
    if norm > most:
        torch._foreach_mul_(list(gradients), float(np.float32(most / norm)))


@nb.njit(nogil=True, cache=True)
def _squares(values: np.ndarray) -> float:
    """The sum of the squares of float32 values, in float64: eight sums, of values j, j + 8, .., added pair by pair."""
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
