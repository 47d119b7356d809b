"""Saving a checkpoint of a run that rests: its rows, read from the store by lane, table and ordinal, its dense part, and, last, the manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from foreload.cache.repair.scrub import TableRows
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.base.at_work import at_work
from foreload.pipelines.base.files import is_full, remove_unfinished, replacing
from foreload.pipelines.schedule.format import RowColumns
from foreload.trainer.checkpoints.format import DENSE, Checkpoint, CheckpointRows, Contents, FileEntry, RowFile
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.directory import DENSE as RUN_DENSE
from foreload.trainer.run.expected_rows import given_ordinals, table_rows
from foreload.trainer.run.model_rows import lane_rows
from foreload.trainer.run.saved_run import SavedRun

FILE_BYTES = 1 << 26
"""About how large a file of rows is at most; as much again is held while one is written."""

LOCK = ".saving"  # in the folder of checkpoints, held while one is saved there


def folder_of(step: int | Literal["*"]) -> str:
    """What the folder of a checkpoint is called, or the pattern of these names. step: the last one trained."""
    return f"step-{step}"


def check_absent(folder: Path, step: int) -> None:
    """Raise CheckpointError where a checkpoint of this step cannot be saved in a folder of checkpoints, since there is one."""
    if (folder / folder_of(step)).exists():
        raise CheckpointError(
            f"checkpoint {folder / folder_of(step)}: exists already; delete it with `foreload checkpoint delete`, or choose another folder with --to"
        )


def save(saved: SavedRun, folder: Path, on_rows: Callable[[int, int], object]) -> Checkpoint:
    """Write a checkpoint into a folder of checkpoints, which is made if it is not there: whole, on the disk, or not at all.

    on_rows: called with how many rows are written, and how many there are. Raises CheckpointError, and what reading the store raises.
    """
    step = saved.status.step
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with at_work(folder / LOCK):
            check_absent(folder, step)
            # Of a call that was killed.
            remove_unfinished(folder, folder_of("*"))
            with replacing(folder / folder_of(step), durable=True) as temporary:
                temporary.mkdir()
                _write(saved, temporary, on_rows)
    except BlockingIOError as error:
        raise CheckpointError(f"--to: another checkpoint is being saved in {folder} right now; wait for it") from error
    except OSError as error:
        raise CheckpointError(_cannot_write(folder, error)) from error
    return Checkpoint.open(folder / folder_of(step))


def _cannot_write(folder: Path, error: OSError) -> str:
    if is_full(error):
        return f"--to: cannot write to {folder}: the disk is full, and nothing of the checkpoint is left there; free space, or choose another folder"
    return f"--to: cannot write to {folder}: {error.strerror or error}; make it writable, or choose another folder"


def _write(saved: SavedRun, folder: Path, on_rows: Callable[[int, int], object]) -> None:
    manifest, status = saved.manifest, saved.status
    saved.dense()  # raises where it is damaged, or of another step
    dense = _put(folder, DENSE, (saved.run.path / RUN_DENSE).read_bytes())
    ordinals = given_ordinals(saved.schedule, status.step)
    total, entries = int(ordinals.sum()), []
    on_rows(0, total)
    for lane, first, rows in _pieces(saved, ordinals):
        name = RowFile.name_of(lane, rows.table, first)
        written = _put(folder, name, _read(saved, lane, first, rows).encoded())
        entries.append(RowFile(name, written.bytes, written.sha256, lane, rows.table, first, len(rows.id)))
        on_rows(len(rows.id), total)
    entries.sort(key=lambda entry: (entry.table, entry.first, entry.lane))
    # A run that was broken off, and whose rows are still those of its last clean stop, has no state that says how that was.
    at_end = status.step == manifest.stages[-1].end_step - 1
    Contents(
        step=status.step,
        state="ended" if at_end else "stopped",
        totals=status.totals,
        run=manifest,
        tables=tuple(saved.layouts),
        rows=tuple(entries),
        dense=dense,
    ).write(folder)


def _pieces(saved: SavedRun, ordinals: np.ndarray) -> Iterator[tuple[int, int, TableRows]]:
    """What is known of the rows of each file: its lane, its first ordinal, and those rows."""
    for lane, rows in table_rows(saved.schedule, saved.status.step, ordinals):
        most = rows_of_a_file(saved.layouts[rows.table])
        for first in range(0, len(rows.id), most):
            yield lane, first, rows.part(first, min(most, len(rows.id) - first))


def rows_of_a_file(layout: RowLayout) -> int:
    """How many rows of a table stand in a file, at most."""
    return max(FILE_BYTES // layout.row_bytes, 1)


def _read(saved: SavedRun, lane: int, first: int, rows: TableRows) -> CheckpointRows:
    count, layout = len(rows.id), saved.layouts[rows.table]
    table = np.full(count, rows.table, np.int16)
    expected = RowColumns(table, np.arange(first, first + count), rows.id, rows.tag)
    stored = lane_rows(saved.stored, lane, expected, rows.exact, saved.last_batches[lane])
    return CheckpointRows(rows.id, stored.tag, stored.weights[:, : layout.width], stored.state[:, : layout.state_width])


def _put(folder: Path, name: str, data: bytes | pa.Buffer) -> FileEntry:
    """Write a file, and force it to the disk."""
    with open(folder / name, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
