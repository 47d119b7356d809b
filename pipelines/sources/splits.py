"""Sources and their splits: the types that `plan_splits` and `read_records` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.features import TextFormat
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.samples.records import RejectedRecord

PIECE_ROWS = 65_536
"""The most samples in a piece. It is fixed, so that piece boundaries depend on the input alone."""

Format = Literal["criteo", "csv", "parquet", "synthetic"]
FORMATS: tuple[Format, ...] = ("criteo", "csv", "parquet", "synthetic")


@dataclass(frozen=True, slots=True)
class Source:
    """What to read.

    Attributes:
        patterns: paths or globs, in the order given. Empty for synthetic data.
        rows: the number of rows of synthetic data.
        seed: the seed of synthetic data.
        values: the most distinct values in a column of synthetic data. If None, as many as its
            table has ids.
    """

    format: Format
    patterns: tuple[str, ...] = ()
    rows: int = 0
    seed: int = 0
    values: int | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise SourceError(f"format: must be one of {', '.join(FORMATS)}, not {self.format!r}")
        if self.format == "synthetic":
            if self.patterns:
                raise SourceError(f"source: synthetic data has no files, but {self.patterns[0]!r} is given; leave it out")
            if self.rows < 1:
                raise SourceError(f"rows: synthetic data needs at least 1 row, not {self.rows}; say how many with --rows")
            if self.values is not None and self.values < 1:
                raise SourceError(f"values: a column needs at least 1 distinct value, not {self.values}")
        elif not self.patterns:
            raise SourceError(f"source: format {self.format} needs at least one file or glob; name it")


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a source that is read independently.

    The samples of all splits, in the order of the splits, are the samples of the source.

    Attributes:
        kind: "text" is the lines that start in bytes start .. end - 1 of a file. "stream" is a
            whole text file from byte `start` of its decompressed contents. "parquet" is row group
            `start`. "synthetic" is rows start .. end - 1.
        file_index: the place among the source's files, from 0.
        split_index: the place among the file's splits, from 0.
        text: how a text file is cut into fields, with delimiter and columns filled in.
        first_line: the number of the line at `start` of a stream.
        order_type: how order_by compares in a text file.
        source: the source of synthetic rows.
    """

    kind: Literal["text", "stream", "parquet", "synthetic"]
    path: str
    file_index: int
    split_index: int
    start: int
    end: int
    text: TextFormat = field(default_factory=TextFormat)
    first_line: int = 1
    order_type: Literal["text", "integer", "number"] | None = None
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive encoded samples of a split, at most PIECE_ROWS, without rejected records.

    Attributes:
        keys: as in `Records`.
        rejects: as in `Records`.
        rejected: as in `Records`.
    """

    samples: Samples
    keys: pa.Array | None
    rejects: tuple[RejectedRecord, ...]
    rejected: int
