"""The folder inside a schedule's in which one call of `prepare` and its workers write, and the disk space that they will take.

Workers write there alone. Whatever one does that was given up (of a call that was stopped or killed, on a host that was cut off) is in the folder of
its own call, which is gone, and no other call reads it.
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
    """Make a call's folder; the schedule's own exists."""
    plan.work.mkdir()
    for folder in FOLDERS:
        (plan.work / folder).mkdir()
    (plan.work / RESERVE).write_bytes(bytes(RESERVE_BYTES))


def clear(out: Path) -> None:
    """Remove the folders of all calls but the lock."""
    for path in sorted((out / WORK).iterdir()):
        if path.name == LOCK:
            continue
        # At one stroke: a worker that still writes there finds its folder no more, and cannot put anything into what is being removed.
        gone = path.with_name(f"{path.name}.gone")
        with contextlib.suppress(OSError):
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def give_encoding(plan: Plan) -> None:
    """Give the schedule its vocabularies and scales, if there are any; workers still read theirs."""
    if plan.encoding.exists():
        shutil.copytree(plan.encoding, plan.out / ENCODING_FOLDER, copy_function=_linked, dirs_exist_ok=True)


def give_rejects(plan: Plan) -> None:
    """Give the schedule's folder the malformed records that were found, if any were."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(plan.written / REJECTS_FILE, plan.out / REJECTS_FILE)


def give_lanes(plan: Plan) -> None:
    """Give the schedule what workers have written for it, once all of it is there: all but what makes it one."""
    give_encoding(plan)
    for path in sorted(plan.written.iterdir()):
        # What an attempt left that another one has made good is not of it.
        if path.is_file() and path.name != FAILED and not path.name.startswith("."):
            os.replace(path, plan.out / path.name)


def _linked(source: str, target: str) -> None:
    """The same file under another name, where the file system has that; else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


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
