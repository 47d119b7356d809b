"""Parquet files: one split a row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.convert import convert, has_order_values, no_order, order_kind
from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.records import Records
from foreload.pipelines.sources.files import (
    File,
    kind_of,
    open_arrow,
    other_kind,
    reading,
    reason_of,
)
from foreload.pipelines.sources.heads import check_one_kind, shown_names
from foreload.pipelines.sources.splits import PIECE_ROWS, Split

ORDER_KINDS = ("number", "time", "text")
"""What values may be that records are ordered by."""


def plan_parquet(files: list[File], spec: FeatureSpec) -> list[Split]:
    """The splits of Parquet files; reads their footers only, and order_by where its types differ in kind. SourceError where one is damaged or lacks
    a column, or order_by is of several kinds.
    """
    splits, ordered = [], dict[str, pa.DataType]()
    for place, file in enumerate(files):
        with _opened(file.path) as parquet:
            names = parquet.schema_arrow.names
            for name in spec.columns:
                if names.count(name) != 1:
                    how_many = "no" if name not in names else "more than one"
                    raise SourceError(
                        f"{file.path}: {how_many} column {name!r} among {shown_names(names)}; check the feature file"
                    )
            if spec.order_by is not None:
                ordered[file.path] = parquet.schema_arrow.field(spec.order_by).type
            groups = [g for g in range(parquet.num_row_groups) if parquet.metadata.row_group(g).num_rows]
        splits += [Split("parquet", file.path, place, number, group, group + 1) for number, group in enumerate(groups)]
    if spec.order_by is not None:
        _check_order(spec.order_by, ordered, spec)
    return splits


def _check_order(column: str, types: dict[str, pa.DataType], spec: FeatureSpec) -> None:
    """Raise SourceError where order_by is of several kinds, or of a type that does not order. types: of the column, by path.

    A column without values is of no kind, whatever its type; whether it has any is looked up where types differ in kind, or one does not order.
    """
    kinds = {path: order_kind(type_, spec.order_type) for path, type_ in types.items()}
    if len({*kinds.values()}) > 1 or not {*kinds.values()} <= set(ORDER_KINDS):
        kinds = {path: kind for path, kind in kinds.items() if _has_values(path, column, spec)}
    check_one_kind(column, [(path, kind, str(types[path])) for path, kind in kinds.items()])
    for path, kind in kinds.items():
        if kind not in ORDER_KINDS:
            raise no_order(path, column, types[path])


def _has_values(path: str, column: str, spec: FeatureSpec) -> bool:
    """Whether order_by has a value in a file, of which no more is read than it takes to know."""
    with _opened(path, [column]) as parquet:
        batches = parquet.iter_batches(PIECE_ROWS, columns=[column], use_threads=False)
        return any(has_order_values(batch.column(0), spec, path) for batch in batches)


def read_parquet(split: Split, spec: FeatureSpec, scales: Sequence[Scale] = ()) -> Iterator[Records]:
    """The records of a row group in order, in pieces of at most PIECE_ROWS. scales: as `convert` has them. Raises SourceError."""
    for row, batch in _batches(split, spec):
        columns = {name: batch.column(batch.schema.get_field_index(name)) for name in spec.columns}

        def row_of(places: np.ndarray, row: int = row) -> np.ndarray:
            return places + row + 1

        yield convert(columns, spec, split.path, row_of, scales)


def _batches(split: Split, spec: FeatureSpec) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The row group's batches, each with the rows of the file before it."""
    with _opened(split.path, spec.columns) as parquet:
        if spec.order_by is not None:
            _check_times(parquet, split, spec.order_by)
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(split.start))
        for batch in parquet.iter_batches(PIECE_ROWS, row_groups=[split.start], columns=list(spec.columns), use_threads=False):
            yield row, batch
            row += batch.num_rows


def _check_times(parquet: pq.ParquetFile, split: Split, name: str) -> None:
    """SourceError where a row group has INT96 times beyond the range of nanoseconds, at which Arrow starts anew without a word."""
    schema = parquet.schema
    if not any(schema.column(k).path == name and schema.column(k).physical_type == "INT96" for k in range(len(schema))):
        return
    with _opened(split.path, unit="us") as coarse:
        nano, micro = (
            np.asarray(file.read_row_group(split.start, columns=[name]).column(0).cast(pa.int64()).fill_null(0))
            for file in (parquet, coarse)
        )
    if (nano // 1000 != micro).any():
        raise SourceError(f"{split.path}: column {name} holds times beyond the range of nanoseconds; order by another column")


@contextmanager
def _opened(path: str, columns: Sequence[str] = (), unit: str = "ns") -> Iterator[pq.ParquetFile]:
    """A Parquet file, of which columns are to be read; INT96 times in a unit. SourceError where it is none, or what is read is damaged."""
    with reading(path), open_arrow(path) as file:
        kind = kind_of(file)
        if kind not in (None, "Parquet"):
            raise other_kind(path, "a readable Parquet file", kind)
        try:
            parquet = pq.ParquetFile(file, coerce_int96_timestamp_unit=unit)
            if any(_holds_fixed_lists(parquet.schema_arrow.field(name).type) for name in columns):
                parquet = pq.ParquetFile(file, coerce_int96_timestamp_unit=unit, metadata=_without_arrow_types(file))
            yield parquet
        except pa.ArrowException as error:
            raise SourceError(
                f"{path}: not a readable Parquet file ({reason_of(error)}); it may be truncated, write it again"
            ) from error


def _holds_fixed_lists(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind) or any(_holds_fixed_lists(kind.field(k).type) for k in range(kind.num_fields))


def _without_arrow_types(file: pa.NativeFile) -> pq.FileMetaData:
    """The footer without the Arrow types that are noted in it: Arrow fails at a null among lists that it takes for lists of a fixed size.
    Parquet itself knows no such lists.
    """
    # A file ends with the footer, its length (4 bytes) and PAR1. A key of the same length that nobody knows leaves all offsets as they are.
    size = file.size()
    file.seek(size - 8)
    length = file.read(4)
    file.seek(size - 8 - int.from_bytes(length, "little"))
    footer = file.read(int.from_bytes(length, "little")).replace(b"ARROW:schema", b"-----:schema")
    return pq.read_metadata(pa.BufferReader(b"PAR1" + footer + length + b"PAR1"))
