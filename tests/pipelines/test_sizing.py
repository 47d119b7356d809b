"""The bytes that rows take: what a size has room for fits it, and no more would."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreload.cache.rows.layout import ROW_OPTIMIZERS, RowLayout
from foreload.cache.rows.partition import Partition
from foreload.pipelines.compiler import numbering, row_table
from foreload.pipelines.compiler.row_table import RowTable
from foreload.pipelines.compiler.segments import write_row_table
from foreload.pipelines.planning.options import DEFAULT_MEMORY_BYTES
from foreload.pipelines.planning.sizing import (
    DIRECT_ROWS,
    FEWEST_DIRECT_ROWS,
    HASHED_ROW_BYTES,
    LANE_ROW_BYTES,
    MOST_SLOTS,
    ROW_LINE_BYTES,
    ROW_RECORD_BYTES,
    ROWS_A_LOOKUP,
    Shape,
    columns_of,
    default_columns,
    lane_bytes,
    schedule_bytes,
    slot_bytes,
    slots_of_size,
    stored_bytes,
)
from foreload.pipelines.samples.features import Feature, FeatureSpec, Label, Table
from foreload.trainer.job.job import TrainJob, layouts_of
from foreload.trainer.models.built_in import MODELS


@given(st.integers(0, 1 << 50), st.integers(1, 5000), st.booleans())
def test_as_many_slots_as_a_size_has_room_for(size_bytes: int, columns: int, with_base: bool) -> None:
    slots = slots_of_size(size_bytes, columns, with_base)
    assert slots == 0 or lane_bytes(slots, columns, with_base) <= size_bytes
    assert slots == MOST_SLOTS or lane_bytes(slots + 1, columns, with_base) > size_bytes


@given(st.integers(1, 5000))
def test_a_row_at_rest_tells_its_columns(columns: int) -> None:
    assert columns_of(stored_bytes(columns)) == columns
    assert columns_of(stored_bytes(columns) - 1) == columns


@given(st.integers(1, 50), st.integers(1, 40), st.sampled_from(ROW_OPTIMIZERS), st.booleans())
def test_a_partition_takes_what_its_slots_are_said_to_take(slots: int, width: int, optimizer: str, with_base: bool) -> None:
    row = RowLayout(0, "t", 9, (("weights", width),), optimizer)
    partition = Partition(slots, 0, row.width, row.state_width, with_base=with_base)
    assert partition.bytes == slots * slot_bytes(row.width + row.state_width, with_base)


def test_slots_by_default_fit_every_built_in_model_trained_by_default() -> None:
    for features in (FeatureSpec.criteo(), FeatureSpec.synthetic(1000, dimension=8), _spec((10, 64), (10, None))):
        slots = slots_of_size(DEFAULT_MEMORY_BYTES, default_columns(features), with_base=True)
        for name in MODELS:
            job = TrainJob.of({"schedule": "s", "run": "r", "store": "local:3", "model": name})
            assert job.code(job.store.count).r > 0
            rows = layouts_of(job, features)
            widest = max(row.width for row in rows) + max(row.state_width for row in rows)
            assert lane_bytes(slots, widest, with_base=True) <= DEFAULT_MEMORY_BYTES


def test_rows_are_bounded_by_tables_and_by_lookups() -> None:
    spec = _spec((10, None), (None, None))
    assert spec.most_rows() is None
    assert spec.most_rows(4) == 4 + 4
    assert spec.most_rows(40) == 10 + 40
    assert _spec((10, None), (7, None)).most_rows() == 17
    assert _spec((10, None), (None, None), pooling="sum").most_rows(4) is None
    assert _spec((10, None), (7, None), pooling="sum").most_rows(4) == 17


def test_a_row_ever_trained_takes_what_it_is_said_to_take(tmp_path: Path) -> None:
    count = 1 << 16
    batch: dict[str, np.ndarray] = {
        "table": np.zeros(count, np.int16), "id": np.arange(count), "lane": np.zeros(count, np.uint8), "ordinal": np.arange(count),
        "tag": np.ones(count, np.int32),
    }  # fmt: skip
    for direct_rows in (count, 0):
        table = RowTable(_spec((count, None)), tmp_path, direct_rows)
        table.load(iter([batch]), np.zeros((1, 1), np.int64))
        assert table.rows.records.nbytes == count * ROW_RECORD_BYTES
        if not direct_rows:
            assert table.rows.keys.nbytes + table.rows.entries.nbytes == count * HASHED_ROW_BYTES
        header_bytes = write_row_table(tmp_path, table)["bytes"] - count * ROW_LINE_BYTES
        assert 0 < header_bytes < 2000
    for samples in (0, 1 << 12, 1 << 16, 1 << 30):
        assert row_table.direct_rows(samples) == min(max(ROWS_A_LOOKUP * samples, FEWEST_DIRECT_ROWS), DIRECT_ROWS)
    assert numbering.LANE_ROW.itemsize == LANE_ROW_BYTES


def test_the_row_table_of_a_schedule_grows_with_the_rows_that_are_looked_up() -> None:
    shape = Shape(1000, epochs=1, shuffled=False, ordered=False)

    def more_bytes(*tables: tuple[int | None, int | None], pooling: Literal["single", "sum"] = "single") -> int:
        """What tables take more than others of two rows each."""
        least = _spec(*((2, None) for _ in tables), pooling=pooling)
        return schedule_bytes(shape, _spec(*tables, pooling=pooling)) - schedule_bytes(shape, least)

    of_row = ROW_LINE_BYTES + ROW_RECORD_BYTES + LANE_ROW_BYTES
    assert more_bytes((10, None), (300, None)) == of_row * (8 + 298)
    assert more_bytes((FEWEST_DIRECT_ROWS, None)) == more_bytes((None, None)) == of_row * 998
    assert more_bytes((None, None), pooling="sum") > 2 * more_bytes((None, None))
    assert more_bytes((1 << 30, None)) == more_bytes((10**7, None)) == 1000 * (of_row + HASHED_ROW_BYTES) - 2 * of_row


def _spec(*tables: tuple[int | None, int | None], pooling: Literal["single", "sum"] = "single") -> FeatureSpec:
    """A feature for each table (rows, dimension)."""
    return FeatureSpec(
        labels=(Label("y", "y"),),
        dense=(),
        features=tuple(
            Feature(f"f{k}", k, f"f{k}", "hash" if rows else "vocabulary", pooling=pooling) for k, (rows, _) in enumerate(tables)
        ),
        tables=tuple(Table(f"f{k}", rows, dimension) for k, (rows, dimension) in enumerate(tables)),
    )
