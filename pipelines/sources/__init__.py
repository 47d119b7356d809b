"""Sources of samples: planned as splits that are read apart from each other, parsed into typed records, encoded."""

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
    """The splits of a source, in its order: files of each pattern by path, splits by place. Reads headers and footers only.

    Raises SourceError where a pattern names no file, or a file cannot be opened or lacks a column; FeatureError where the spec
    asks for what a synthetic source does not have.
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
    """The records of a split in order, typed but not encoded, in pieces of at most PIECE_ROWS. scales: as `convert` has them. Raises SourceError.

    Where pieces are cut is a function of the file and the split alone. A piece may be empty but for its rejects.
    """
    if split.kind == "synthetic":
        return read_synthetic(split, spec)
    if split.kind == "parquet":
        return read_parquet(split, spec, scales)
    return read_text(split, spec, scales=scales)
