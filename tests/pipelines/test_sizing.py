"""The bytes that rows take: what a size has room for fits it, and no more would."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.partition import Partition
from foreload.pipelines.planning.options import DEFAULT_MEMORY_BYTES
from foreload.pipelines.planning.sizing import (
    MOST_SLOTS,
    columns_of,
    default_columns,
    lane_bytes,
    most_rows,
    slot_bytes,
    slots_of_size,
    stored_bytes,
)
from foreload.pipelines.samples.features import Feature, FeatureSpec, Table
from foreload.trainer.compute.layouts import layouts
from foreload.trainer.models import MODELS, load_model
from foreload.trainer.run.job import TrainJob


@given(st.integers(0, 1 << 50), st.integers(1, 5000), st.booleans())
def test_as_many_slots_as_a_size_has_room_for(size_bytes: int, columns: int, with_base: bool) -> None:
    slots = slots_of_size(size_bytes, columns, with_base)
    assert slots == 0 or lane_bytes(slots, columns, with_base) <= size_bytes
    assert slots == MOST_SLOTS or lane_bytes(slots + 1, columns, with_base) > size_bytes


@given(st.integers(1, 5000))
def test_a_row_at_rest_tells_its_columns(columns: int) -> None:
    assert columns_of(stored_bytes(columns)) == columns
    assert columns_of(stored_bytes(columns) - 1) == columns


@given(st.integers(1, 50), st.integers(1, 40), st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"]), st.booleans())
def test_a_partition_takes_what_its_slots_are_said_to_take(slots: int, width: int, optimizer: str, with_base: bool) -> None:
    row = RowLayout(0, "t", 9, (("weights", width),), optimizer)
    partition = Partition(slots, 0, row.width, row.state_width, with_base=with_base)
    assert partition.bytes == slots * slot_bytes(row.width + row.state_width, with_base)


def test_slots_by_default_fit_every_built_in_model_trained_by_default() -> None:
    for features in (FeatureSpec.criteo(), FeatureSpec.synthetic(1000, dimension=8), _spec((10, 64), (10, None))):
        slots = slots_of_size(DEFAULT_MEMORY_BYTES, default_columns(features), with_base=True)
        job = TrainJob.of({"schedule": "s", "run": "r", "store": "local:3"})
        assert job.code(job.store.count).r > 0
        for name in MODELS:
            rows = layouts(features, load_model(name), job.dim, job.row_optimizers(features))
            widest = max(row.width for row in rows) + max(row.state_width for row in rows)
            assert lane_bytes(slots, widest, with_base=True) <= DEFAULT_MEMORY_BYTES


def test_rows_are_bounded_by_tables_and_by_lookups() -> None:
    spec = _spec((10, None), (None, None))
    assert most_rows(spec) is None
    assert most_rows(spec, 4) == 4 + 4
    assert most_rows(spec, 40) == 10 + 40
    assert most_rows(_spec((10, None), (7, None))) == 17
    assert most_rows(_spec((10, None), (None, None), pooling="sum"), 4) is None
    assert most_rows(_spec((10, None), (7, None), pooling="sum"), 4) == 17


def _spec(*tables: tuple[int | None, int | None], pooling: Literal["single", "sum"] = "single") -> FeatureSpec:
    """A feature for each table (rows, dimension)."""
    return FeatureSpec(
        label="y",
        dense=(),
        features=tuple(
            Feature(f"f{k}", k, f"f{k}", "hash" if rows else "vocabulary", pooling=pooling) for k, (rows, _) in enumerate(tables)
        ),
        tables=tuple(Table(f"f{k}", rows, dimension) for k, (rows, dimension) in enumerate(tables)),
    )
