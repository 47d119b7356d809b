"""Whether there is the disk space that preparing will take; `sizing` says how much from the number of rows, which is estimated here."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from foreload.pipelines.errors import DiskError
from foreload.pipelines.sources.files import (
    match_files,
    open_file,
    open_stream,
    reading,
)
from foreload.pipelines.sources.splits import Split

_HEAD_BYTES = 1 << 18  # of a text file, by whose lines the others are reckoned
_COMPRESSED = 4  # a compressed log holds about this many bytes per byte


def is_counted(split: Split) -> bool:
    """Whether its source says how many rows there are."""
    return split.kind in ("synthetic", "parquet")


def estimate_rows(splits: Sequence[Split]) -> int:
    """Rows of all splits, about: exact where a source says it (`is_counted`), by the length of the first lines for text."""
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
            head = stream.read(_HEAD_BYTES)
        if head.count(b"\n"):  # else its lines are taken for as long as those of the file before
            line_bytes = len(head) / head.count(b"\n")
        size = match_files([path])[0].size_bytes * (_COMPRESSED if path.endswith((".gz", ".zst")) else 1)
        total += int(size / line_bytes) if line_bytes else 1
    return total


def check_disk(out: Path, needed_bytes: int) -> None:
    """Raise DiskError where the folder's disk has less room than that."""
    free = shutil.disk_usage(out).free
    if needed_bytes > free:
        raise DiskError(
            f"--out {out}: about {needed_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free; free space or choose another disk"
        )
