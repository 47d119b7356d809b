"""Sources of samples.

A source is planned as splits, which are read independently, parsed into typed records and encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.records import MOST_REJECTS, Records, RejectedRecord
from foreload.pipelines.sources.files import match_files
from foreload.pipelines.sources.parquet import plan_parquet, read_parquet
from foreload.pipelines.sources.splits import (
    FORMATS,
    PIECE_ROWS,
    Format,
    Piece,
    Source,
    Split,
)
from foreload.pipelines.sources.synthetic import plan_synthetic, read_synthetic
from foreload.pipelines.sources.text import plan_text, read_text

__all__ = [
    "FORMATS",
    "MOST_REJECTS",
    "PIECE_ROWS",
    "Encoder",
    "Format",
    "Piece",
    "Records",
    "RejectedRecord",
    "Source",
    "Split",
    "plan_splits",
    "read_records",
]


def plan_splits(source: Source, spec: FeatureSpec) -> list[Split]:
    """Return the splits of a source, in its order.

    The files of each pattern are ordered by path, and their splits by position. Only headers and
    footers are read, and values of order_by if its type has to be determined from them.

    Raises:
        SourceError: a pattern matches no file, or a file cannot be opened or lacks a column.
        FeatureError: the spec needs a column that a synthetic source does not have.
    """
    if source.format == "synthetic":
        return plan_synthetic(source, spec)
    files = match_files(source.patterns)
    if source.format == "parquet":
        return plan_parquet(files, spec)
    if source.format == "criteo":
        spec = replace(spec, text=replace(FeatureSpec.criteo().text, missing=spec.text.missing))
    return plan_text(files, spec)


def read_records(split: Split, spec: FeatureSpec, scales: Sequence[Scale] = ()) -> Iterator[Records]:
    """Yield the records of a split in order, typed but not encoded.

    A piece has at most PIECE_ROWS records.

    The boundaries of pieces are a function of the file and the split alone. A piece may have no
    records, only rejects.

    Args:
        scales: as in `convert`.

    Raises:
        SourceError: the file cannot be read, or a whole column has a type that does not fit its
            use.
    """
    if split.kind == "synthetic":
        return read_synthetic(split, spec)
    if split.kind == "parquet":
        return read_parquet(split, spec, scales)
    return read_text(split, spec, scales=scales)
