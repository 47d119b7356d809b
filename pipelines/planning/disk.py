"""How much disk space preparing will take, estimated before anything is written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from foreload.pipelines.errors import DiskError
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.sources.files import (
    match_files,
    open_file,
    open_stream,
    reading,
)
from foreload.pipelines.sources.splits import Split

_SAMPLE_BYTES = 1 << 18
_COMPRESSED = 4  # a compressed log holds about this many bytes per byte
_VALUES = 4  # values of a multi-valued feature, about
_MOVES_BYTES = 8  # of a lookup: slots, masks and arrivals of the distinct rows, spread over all lookups
_ROW_BYTES = 44  # of a row ever trained: its record while compiling, and its line in the row table


@dataclass(frozen=True, slots=True)
class Shape:
    """What the size of a schedule depends on. samples: training and evaluation; epochs: of the training samples."""

    samples: int
    epochs: int
    shuffled: bool
    ordered: bool


def estimate_rows(splits: Sequence[Split]) -> int:
    """Rows of all splits, about: exact for synthetic data and Parquet, by the length of the first lines for text."""
    total = sum(split.end - split.start for split in splits if split.kind == "synthetic")
    files = dict.fromkeys((split.path, split.kind) for split in splits if split.kind != "synthetic")
    line_bytes = 0.0
    for path, kind in files:
        if kind == "parquet":
            with (
                reading(path),
                open_file(path) as file,
                contextlib.suppress(pa.ArrowException),
            ):  # reading it will say what is wrong
                total += pq.read_metadata(file).num_rows
            continue
        with open_stream(path) as stream, reading(path):
            start = stream.read(_SAMPLE_BYTES)
        if start.count(b"\n"):
            line_bytes = len(start) / start.count(b"\n")
        size = match_files([path])[0].size_bytes * (_COMPRESSED if path.endswith((".gz", ".zst")) else 1)
        total += int(size / line_bytes) if line_bytes else 1
    return total


def estimate_bytes(shape: Shape, spec: FeatureSpec) -> int:
    """The most that lies on the disk at once: pieces, the schedule and the row table."""
    lookups = sum(1 if feature.pooling == "single" else _VALUES for feature in spec.features)
    dense = 4 * len(spec.dense)
    piece = 4 + dense + 8 * lookups + (8 * len(spec.features) if spec.multi_valued else 0) + (24 if shape.ordered else 0)
    copies = 1 + (1 if shape.ordered else 0) + (2 * shape.epochs if shape.shuffled else 0)
    written = shape.samples * (shape.epochs if shape.shuffled else 1)
    schedule = written * (12 + dense + 4 * lookups) + shape.samples * shape.epochs * lookups * _MOVES_BYTES
    rows = sum(min(table.rows or shape.samples, shape.samples) for table in spec.tables)
    return shape.samples * piece * copies + schedule + rows * _ROW_BYTES


def check_disk(out: Path, needed_bytes: int) -> None:
    """Raise DiskError where the folder's disk has less room than that."""
    free = shutil.disk_usage(out).free
    if needed_bytes > free:
        raise DiskError(
            f"--out {out}: about {needed_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free; free space or choose another disk"
        )
