"""Parquet files. Each row group is one split."""

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
"""The kinds of values that records can be ordered by."""


def plan_parquet(files: list[File], spec: FeatureSpec) -> list[Split]:
    """Return the splits of Parquet files.

    Only the footers are read. If the types of order_by differ in kind, or one cannot be ordered by,
    that column is read too.

    Raises:
        SourceError: a file is damaged or lacks a column, or order_by does not hold one kind of
            values that can be ordered by.
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
    """Check that order_by holds one kind of values, and one that can be ordered by.

    A column without values has no kind, whatever its type. Files are searched for values only if
    types differ in kind, or if a type cannot be ordered by.

    Args:
        types: path -> type of the column.

    Raises:
        SourceError: the check fails.
    """
    kinds = {path: order_kind(type_, spec.order_type) for path, type_ in types.items()}
    if len({*kinds.values()}) > 1 or not {*kinds.values()} <= set(ORDER_KINDS):
        kinds = {path: kind for path, kind in kinds.items() if _has_values(path, column, spec)}
    check_one_kind(column, [(path, kind, str(types[path])) for path, kind in kinds.items()])
    for path, kind in kinds.items():
        if kind not in ORDER_KINDS:
            raise no_order(path, column, types[path])


def _has_values(path: str, column: str, spec: FeatureSpec) -> bool:
    """Return whether order_by has a value in a file.

    Reading stops at the first batch with a value.
    """
    with _opened(path, [column]) as parquet:
        batches = parquet.iter_batches(PIECE_ROWS, columns=[column], use_threads=False)
        return any(has_order_values(batch.column(0), spec, path) for batch in batches)


def read_parquet(split: Split, spec: FeatureSpec, scales: Sequence[Scale] = ()) -> Iterator[Records]:
    """Yield the records of a row group in order, in pieces of at most PIECE_ROWS.

    Args:
        scales: as in `convert`.

    Raises:
        SourceError: the file cannot be read, or a whole column has a type that does not fit its
            use.
    """
    for row, batch in _batches(split, spec):
        columns = {name: batch.column(batch.schema.get_field_index(name)) for name in spec.columns}

        def row_of(places: np.ndarray, row: int = row) -> np.ndarray:
            return places + row + 1

        yield convert(columns, spec, split.path, row_of, scales)


def _batches(split: Split, spec: FeatureSpec) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the batches of the row group, each with the number of rows before it in the file."""
    with _opened(split.path, spec.columns) as parquet:
        if spec.order_by is not None:
            _check_times(parquet, split, spec.order_by)
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(split.start))
        for batch in parquet.iter_batches(PIECE_ROWS, row_groups=[split.start], columns=list(spec.columns), use_threads=False):
            yield row, batch
            row += batch.num_rows


def _check_times(parquet: pq.ParquetFile, split: Split, name: str) -> None:
    """Check that the INT96 times of a row group fit nanoseconds.

    Arrow wraps around silently beyond that range. So the column is also read in microseconds, and
    the two are compared.

    Raises:
        SourceError: a time lies outside the range.
    """
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
    """Open a Parquet file.

    Args:
        columns: the columns to read.
        unit: the unit that INT96 times are read in.

    Raises:
        SourceError: the file is not Parquet, or what is read of it is damaged.
    """
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
    """Return the footer without the Arrow types that are stored in it.

    Arrow fails at a null among lists that these types declare as lists of a fixed size. Parquet
    itself has no such lists.
    """
    # A file ends with the footer, the length of the footer (4 bytes), and PAR1. The key of the
    # Arrow types is replaced by an unknown one of the same length, so all offsets in the footer
    # stay valid.
    size = file.size()
    file.seek(size - 8)
    length = file.read(4)
    file.seek(size - 8 - int.from_bytes(length, "little"))
    footer = file.read(int.from_bytes(length, "little")).replace(b"ARROW:schema", b"-----:schema")
    return pq.read_metadata(pa.BufferReader(b"PAR1" + footer + length + b"PAR1"))
