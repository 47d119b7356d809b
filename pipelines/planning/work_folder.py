"""The work folder of one call of `prepare`, and the disk space that the call will take.

The folder lies inside the schedule's folder. The call and its workers write there, and workers
write nowhere else. A worker that was given up, because its call was stopped or killed or its host
was cut off, may go on writing to its own call's folder. That folder has been removed, and no other
call reads it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from foreload.pipelines.errors import DiskError
from foreload.pipelines.planning.plan import FOLDERS, RESERVE, RESERVE_BYTES, Plan
from foreload.pipelines.samples.features import ENCODING_FOLDER
from foreload.pipelines.schedule.format import FAILED, LOCK, REJECTS_FILE, WORK
from foreload.pipelines.sources.files import (
    match_files,
    open_file,
    open_stream,
    reading,
)
from foreload.pipelines.sources.splits import Split


def make(plan: Plan) -> None:
    """Create the folder of a call. The schedule's own folder exists."""
    plan.work.mkdir()
    for folder in FOLDERS:
        (plan.work / folder).mkdir()
    (plan.work / RESERVE).write_bytes(bytes(RESERVE_BYTES))


def clear(out: Path) -> None:
    """Remove the folders of all calls, but not the lock."""
    for path in sorted((out / WORK).iterdir()):
        if path.name == LOCK:
            continue
        # Rename the folder first, which is atomic. A worker that still writes there no longer finds
        # its folder, and cannot add files while the folder is being removed.
        gone = path.with_name(f"{path.name}.gone")
        with contextlib.suppress(OSError):
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def give_encoding(plan: Plan) -> None:
    """Give the schedule its vocabularies and scales, if it has any. Workers still read theirs."""
    if plan.encoding.exists():
        shutil.copytree(plan.encoding, plan.out / ENCODING_FOLDER, copy_function=_linked, dirs_exist_ok=True)


def give_rejects(plan: Plan) -> None:
    """Move the malformed records that were found, if any, to the schedule's folder."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(plan.written / REJECTS_FILE, plan.out / REJECTS_FILE)


def give_lanes(plan: Plan) -> None:
    """Move to the schedule's folder what workers wrote for it, once all of it exists.

    The schedule's manifest is not among these files.
    """
    give_encoding(plan)
    for path in sorted(plan.written.iterdir()):
        # Skip what a failed attempt left behind: its failure record and its temporary files.
        # Another attempt has done its work.
        if path.is_file() and path.name != FAILED and not path.name.startswith("."):
            os.replace(path, plan.out / path.name)


def _linked(source: str, target: str) -> None:
    """Give a file another name by a hard link, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


_HEAD_BYTES = 1 << 18  # the part of a text file from whose lines the row count is estimated
_COMPRESSED = 4  # a compressed log holds about this many bytes per byte


def is_counted(split: Split) -> bool:
    """Return whether a split's source states how many rows it has."""
    return split.kind in ("synthetic", "parquet")


def estimate_rows(splits: Sequence[Split]) -> int:
    """Estimate the rows of all splits.

    The number is exact for sources that state it (`is_counted`). For text it follows from the
    length of the first lines.
    """
    total = sum(split.end - split.start for split in splits if split.kind == "synthetic")
    files = dict.fromkeys((split.path, split.kind) for split in splits if split.kind != "synthetic")
    line_bytes = 0.0
    for path, kind in files:
        if kind == "parquet":
            # A file that is not valid Parquet is reported when it is read.
            with reading(path), open_file(path) as file, contextlib.suppress(pa.ArrowException):
                total += pq.read_metadata(file).num_rows
            continue
        with open_stream(path) as stream, reading(path):
            head = stream.read(_HEAD_BYTES)
        # If no line ends within the head, the lines are assumed to be as long as those of the file
        # before.
        if head.count(b"\n"):
            line_bytes = len(head) / head.count(b"\n")
        size = match_files([path])[0].size_bytes * (_COMPRESSED if path.endswith((".gz", ".zst")) else 1)
        total += int(size / line_bytes) if line_bytes else 1
    return total


def check_disk(out: Path, needed_bytes: int) -> None:
    """Raise DiskError if the folder's disk has less free space than needed."""
    free = shutil.disk_usage(out).free
    if needed_bytes > free:
        raise DiskError(
            f"--out {out}: about {needed_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free; free space or choose another disk"
        )
