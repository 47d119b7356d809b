"""Layouts that follow from the features, the model and the job.

They describe rows, the embedding block, and the settings of the row optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from foreload.cache.rows.layout import ROW_OPTIMIZERS, RowLayout, widest
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.compute.row_optimizers import RowOptimizer, dimensions, rule_arrays
from foreload.trainer.models.spec import Embeddings, ModelSpec

# How a bag's rows become one entry of the block, as numbers that the kernels switch on. SINGLE is
# for a feature with one value per sample.
SINGLE, SUM, MEAN = 0, 1, 2
POOLING = {"single": SINGLE, "sum": SUM, "mean": MEAN}


def model_spec(features: FeatureSpec, dim: int) -> ModelSpec:
    """Return the description of the data that the model receives."""
    table_dimensions = dimensions(features, dim)
    return ModelSpec(
        len(features.dense),
        tuple(
            (feature.name, table_dimensions[feature.table], features.tables[feature.table].name) for feature in features.features
        ),
        tuple(dense.name for dense in features.dense),
        tuple(feature.pooling for feature in features.features),
        tuple(label.name for label in features.labels),
        tuple(label.kind for label in features.labels),
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """How the embedding block [b, F, width] is filled and read.

    The sequences are by feature, in the order of the feature file.

    Attributes:
        names: the names of the features.
        parts: (name, columns) of each part of the feature's rows.
        widths: int32 [F], all columns of the feature's rows.
        pooling: int8 [F], values of POOLING.
        width: the width of the widest row of all tables.
    """

    names: tuple[str, ...]
    parts: tuple[tuple[tuple[str, int], ...], ...]
    widths: np.ndarray
    pooling: np.ndarray
    width: int

    @classmethod
    def of(cls, features: FeatureSpec, rows: Sequence[RowLayout]) -> BlockLayout:
        """Return the block of these features.

        Args:
            rows: the layouts of the tables.
        """
        tables = [rows[feature.table] for feature in features.features]
        return cls(
            tuple(feature.name for feature in features.features),
            tuple(table.parts for table in tables),
            np.array([table.width for table in tables], np.int32),
            np.array([POOLING[feature.pooling] for feature in features.features], np.int8),
            widest(rows),
        )

    @property
    def equal(self) -> bool:
        """Whether every feature's rows fill the block's width, so that they can be copied whole."""
        return bool((self.widths == self.width).all())

    def embeddings(self, block: Tensor) -> Embeddings:
        """Return the block as the module receives it.

        It gets views [b, D] per feature, and views [b, columns] per "<feature>.<column>".
        """
        return Embeddings.split(block, self.names, self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """The rows that a slice looks up, and the block that receives them.

    The *local rows* of a slice are the distinct rows that it uses.

    Attributes:
        index: int32 [lookups], the place of each lookup among the local rows, by sample, feature,
            value.
        offsets: int32 [b*F + 1], where the bag of each sample and feature begins in `index`. If
            None, every feature has one value.
    """

    index: np.ndarray
    offsets: np.ndarray | None
    layout: BlockLayout


class UpdateRules(NamedTuple):
    """The row optimizers of all tables as arrays, for the kernels.

    It is a named tuple, since compiled loops take those as they are.

    Attributes:
        kinds: int8 [tables], places in ROW_OPTIMIZERS.
        rates: float32 [tables], learning rates.
        constants: float32 [tables, CONSTANTS], the other constants of the updates (row_optimizers).
        widths: int32 [tables].
        parts: int32, the columns of the parts of table k at part_offsets[k] .. part_offsets[k+1].
        part_offsets: int32 [tables + 1].
        width: the largest width of all tables, which is that of a partition.
        state_width: the largest state width of all tables, which is that of a partition.
        rowwise: whether all tables are under row-wise Adagrad and have rows of one part, of one
            width.
        two_a_weight: whether any table is under Adam or FTRL-Proximal.
        penalised: int32 [tables], the columns whose gradients get penalties; 0 for a table without.
        by_step: whether the constants depend on the step.
    """

    kinds: np.ndarray
    rates: np.ndarray
    constants: np.ndarray
    widths: np.ndarray
    parts: np.ndarray
    part_offsets: np.ndarray
    width: int
    state_width: int
    rowwise: bool
    two_a_weight: bool
    penalised: np.ndarray
    by_step: bool

    @classmethod
    def of(cls, rows: Sequence[RowLayout], optimizers: Sequence[RowOptimizer]) -> UpdateRules:
        """Return the rules of these tables at step 0.

        Args:
            rows: the layouts of the rows, by table.
            optimizers: one for each table, to which the states of the rows belong.

        Raises:
            ValueError: the optimizers are not those of the rows.
        """
        if [row.optimizer for row in rows] != [optimizer.name for optimizer in optimizers]:
            raise ValueError(f"optimizers: must be those of the rows, one per table; got {optimizers}")
        return cls(
            np.array([ROW_OPTIMIZERS.index(row.optimizer) for row in rows], np.int8),
            *rule_arrays(optimizers, 0),
            np.array([row.width for row in rows], np.int32),
            np.array([columns for row in rows for _, columns in row.parts], np.int32),
            np.cumsum([0, *(len(row.parts) for row in rows)]).astype(np.int32),
            widest(rows),
            max((row.state_width for row in rows), default=0),
            bool(rows)
            and len(rows[0].parts) == 1
            and all((row.optimizer, row.parts) == ("rowwise_adagrad", rows[0].parts) for row in rows),
            any(row.optimizer in ("adam", "ftrl") for row in rows),
            np.array([row.parts[0][1] * one.penalised for row, one in zip(rows, optimizers, strict=True)], np.int32),
            any(optimizer.by_step for optimizer in optimizers),
        )

    def at(self, optimizers: Sequence[RowOptimizer], step: int, factor: float) -> UpdateRules:
        """Return the rules at a training step.

        Args:
            optimizers: the same that `of` received.
            factor: multiplies the learning rates.
        """
        rates, constants = rule_arrays(optimizers, step, factor)
        return self._replace(rates=rates, constants=constants)
