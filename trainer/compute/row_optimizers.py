"""Settings of the row optimizers. What they keep per row is in cache/rows/layout.py, the updates are among the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreload.cache.rows.layout import ROW_OPTIMIZERS
from foreload.pipelines.errors import SettingError

# UpdateRules.kinds, on which the kernels switch: places in ROW_OPTIMIZERS.
SGD, ADAGRAD, ROWWISE_ADAGRAD = (ROW_OPTIMIZERS.index(name) for name in ("sgd", "adagrad", "rowwise_adagrad"))
EPSILON = np.float32(1e-8)  # added to the root that adagrad and rowwise_adagrad divide by


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """How rows are updated: `name` is one of ROW_OPTIMIZERS, `lr` the learning rate, finite and not negative.

    lr = 0 leaves the weights of every row at their initial values, as a baseline. Raises SettingError.
    """

    name: str
    lr: float

    def __post_init__(self) -> None:
        if self.name not in ROW_OPTIMIZERS:
            raise SettingError(f"row-optimizer: must be one of {', '.join(ROW_OPTIMIZERS)}; got {self.name!r}")
        if isinstance(self.lr, bool) or not isinstance(self.lr, int | float) or not (math.isfinite(self.lr) and self.lr >= 0):
            raise SettingError(f"lr: must be a finite number, not negative; got {self.lr!r}")
