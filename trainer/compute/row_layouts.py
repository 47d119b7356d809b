"""The layouts of rows, which follow from the features, the model and the job. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.base.errors import SettingError
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.compute.row_optimizers import RowOptimizer


def dimensions(features: FeatureSpec, dim: int) -> list[int]:
    """Columns of an embedding, D, by table: the table's own `dimension`, or else `dim`. Raises SettingError unless all are positive."""
    by_table = [table.dimension or dim for table in features.tables]
    if min(by_table, default=1) < 1:
        raise SettingError(f"dim: must be at least 1; got {dim}")
    return by_table


def layouts(
    features: FeatureSpec, further: Sequence[tuple[str, int]], dim: int, optimizers: Sequence[RowOptimizer]
) -> list[RowLayout]:
    """The layout of every table's rows, in the order of the tables; further: the columns of a row besides the embedding, as its model
    declares them; optimizers: of each table, whose state the rows have.

    Raises SettingError.
    """
    row_layouts = []
    for number, (table, dimension, optimizer) in enumerate(
        zip(features.tables, dimensions(features, dim), optimizers, strict=True)
    ):
        if table.rows is None:
            raise SettingError(f"table {table.name}: its number of rows is not known; use the features of a prepared schedule")
        row_layouts.append(RowLayout(number, table.name, table.rows, (("weights", dimension), *further), optimizer.name))
    return row_layouts
