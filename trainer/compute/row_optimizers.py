"""The settings of the row optimizers, and the row layouts.

The layouts follow from the settings, the features and the model. Names and state widths are in
`cache/rows/layout`, since the cache stores the state; the updates are branches of both kernels,
`compiled_kernels` and `torch_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreload.base.errors import SettingError
from foreload.cache.rows.layout import ROW_OPTIMIZERS, RowLayout
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.initial_values import InitialValues
from foreload.trainer.compute.rate_schedules import power

# UpdateRules.kinds, on which the kernels switch: places in ROW_OPTIMIZERS.
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL = (
    ROW_OPTIMIZERS.index(name) for name in ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
)
# The columns of UpdateRules.constants: of both Adagrads, Adam and FTRL-Proximal. FIRST and SECOND
# are Adam's beta1 and beta2, and the column behind each has 1 less it. ROOT is the factor of the
# root of Adam's second moment at the step.
CONSTANTS = 8
EPSILON, DECAY = 0, 1
FIRST, SECOND, ROOT = 1, 3, 5
L1, L2, BETA = 0, 1, 2
# The penalties of the embedding, with every optimizer but FTRL-Proximal, which has its own.
PENALTY_L1, PENALTY_L2 = 6, 7

# The least value of terms that are added to a denominator. With 0 there, a gradient of 0 would give
# NaN.
_LEAST = 1e-30
_MOST = 1e30


@dataclass(frozen=True, slots=True)
class _Option:
    """A number that a row optimizer takes.

    Attributes:
        default: its default.
        rule: the values that it may have, in words.
        low: the lower bound, which is tested on the float64 value if included, else on the float32
            value.
        high: the upper bound, which is tested likewise.
    """

    default: float
    rule: str
    low: float
    high: float = _MOST
    low_included: bool = True
    high_included: bool = True

    def allows(self, value: float) -> bool:
        rounded = float(np.float32(value)) if abs(value) <= self.high else value
        above = value >= self.low if self.low_included else rounded > self.low
        return above and (value <= self.high if self.high_included else rounded < self.high)


_SMALL = _Option(1e-8, f"from {_LEAST:g} to 1", _LEAST, 1)
_OF_ADAGRAD = {"epsilon": _SMALL, "decay": _Option(1.0, "above 0 and at most 1", 0, 1, low_included=False)}
_PENALTY = _Option(0.0, f"from 0 to {_MOST:g}", 0)
_OPTIONS: dict[str, dict[str, _Option]] = {
    "sgd": {},
    "adagrad": _OF_ADAGRAD,
    "rowwise_adagrad": _OF_ADAGRAD,
    "adam": {
        "beta1": _Option(0.9, "at least 0 and, as a float32, below 1", 0, 1, high_included=False),
        "beta2": _Option(0.999, "at least 0 and, as a float32, below 1", 0, 1, high_included=False),
        "epsilon": _SMALL,
    },
    "ftrl": {"l1": _PENALTY, "l2": _PENALTY, "beta": _Option(1.0, f"from {_LEAST:g} to {_MOST:g}", _LEAST)},
}


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """How rows are updated.

    lr = 0 leaves the weights of every row at their initial values, as a baseline. `ftrl` does not
    take 0, since it divides by lr.

    Attributes:
        name: one of ROW_OPTIMIZERS.
        lr: the learning rate, finite and not negative.
        options: the optimizer's options that differ from their defaults, by name.
        l1: the L1 penalty of the embedding, which adds l1 * sign(w) to the gradient of weight w.
        l2: the L2 penalty of the embedding, which adds l2 * w.

    Raises:
        SettingError: a setting is not valid.
    """

    name: str
    lr: float
    options: Mapping[str, float] = field(default_factory=dict)
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ROW_OPTIMIZERS:
            raise SettingError(f"row-optimizer: must be one of {', '.join(ROW_OPTIMIZERS)}; got {self.name!r}")
        if isinstance(self.lr, bool) or not isinstance(self.lr, int | float) or not (math.isfinite(self.lr) and self.lr >= 0):
            raise SettingError(f"lr: must be a finite number, not negative; got {self.lr!r}")
        if self.name == "ftrl" and not np.float32(self.lr) > 0:
            raise SettingError(f"lr: must be above 0 with row-optimizer ftrl, which divides by it; got {self.lr!r}")
        check_options("row-options", self.name, self.options)
        for name, value in (("row-l1", self.l1), ("row-l2", self.l2)):
            if not _PENALTY.allows(value):
                raise SettingError(f"{name}: must be {_PENALTY.rule}; got {value:g}")
            if self.name == "ftrl" and value:
                raise SettingError(
                    f"{name}: must be 0 with row-optimizer ftrl, whose own {name.removeprefix('row-')} is in row-options; got {value:g}"
                )

    @property
    def penalised(self) -> bool:
        """Whether the gradient gets penalties of the embedding."""
        return bool(self.l1 or self.l2)

    @property
    def by_step(self) -> bool:
        """Whether the constants differ from step to step."""
        return self.name == "adam"

    def option(self, name: str) -> float:
        """Return an option's value, given or default."""
        return float(self.options.get(name, _OPTIONS[self.name][name].default))

    def rule(self, step: int, factor: float) -> tuple[float, dict[int, float]]:
        """Return what the kernels need for a training step, all float64.

        Args:
            factor: multiplies the learning rate.

        Returns:
            The learning rate, and the constants by their columns.
        """
        rate = self.lr * factor
        if self.name in ("adagrad", "rowwise_adagrad"):
            return rate, {EPSILON: self.option("epsilon"), DECAY: self.option("decay")}
        if self.name == "ftrl":
            return rate, {L1: self.option("l1"), L2: self.option("l2"), BETA: self.option("beta")}
        if self.name == "adam":
            first, second = self.option("beta1"), self.option("beta2")
            constants = {EPSILON: self.option("epsilon"), ROOT: 1.0 / math.sqrt(1.0 - power(second, step + 1))}
            constants |= {FIRST: first, FIRST + 1: 1.0 - first, SECOND: second, SECOND + 1: 1.0 - second}
            return rate / (1.0 - power(first, step + 1)), constants
        return rate, {}


def rule_arrays(optimizers: Sequence[RowOptimizer], step: int, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return `RowOptimizer.rule` of every table as arrays.

    Returns:
        The rates, float32 [tables], and the constants, float32 [tables, CONSTANTS].
    """
    rates, constants = np.zeros(len(optimizers), np.float32), np.zeros((len(optimizers), CONSTANTS), np.float32)
    for table, optimizer in enumerate(optimizers):
        rates[table], own = optimizer.rule(step, factor)
        if optimizer.penalised:
            own |= {PENALTY_L1: optimizer.l1, PENALTY_L2: optimizer.l2}
        for column, value in own.items():
            constants[table, column] = value
    return rates, constants


def check_options(where: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise SettingError unless a row optimizer takes these options.

    Args:
        where: the name of the options in messages.
        name: one of ROW_OPTIMIZERS.
        options: by name.
    """
    known = _OPTIONS[name]
    for key, value in options.items():
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SettingError(f"{where}: {name} has no option {key}; {has}")
        if not known[key].allows(value):
            raise SettingError(f"{where}: {key} of {name} must be {known[key].rule}; got {value:g}")


def dimensions(features: FeatureSpec, dim: int) -> list[int]:
    """Return the columns of an embedding, D, by table.

    It is the table's own `dimension`, or `dim` if the table has none. Raises SettingError unless
    all are positive.
    """
    by_table = [table.dimension or dim for table in features.tables]
    if min(by_table, default=1) < 1:
        raise SettingError(f"dim: must be at least 1; got {dim}")
    return by_table


def layouts(
    features: FeatureSpec,
    further: Sequence[tuple[str, int]],
    dim: int,
    optimizers: Sequence[RowOptimizer],
    initial: Sequence[InitialValues] | None = None,
) -> list[RowLayout]:
    """Return the layout of every table's rows, in the order of the tables.

    Args:
        further: the columns of a row besides the embedding, as the model declares them.
        dim: the dimension of tables without one of their own.
        optimizers: for each table, the optimizer whose state the rows have.
        initial: for each table, how embeddings begin. If None, as by default.

    Raises:
        SettingError: a dimension is not positive, or the number of a table's rows is not known.
    """
    if initial is None:
        initial = [InitialValues()] * len(features.tables)
    row_layouts = []
    columns = zip(features.tables, dimensions(features, dim), optimizers, initial, strict=True)
    for number, (table, dimension, optimizer, values) in enumerate(columns):
        if table.rows is None:
            raise SettingError(f"table {table.name}: its number of rows is not known; use the features of a prepared schedule")
        parts = (("weights", dimension), *further)
        row_layouts.append(RowLayout(number, table.name, table.rows, parts, optimizer.name, str(values)))
    return row_layouts
