"""Reading a checkpoint's model without a store or a schedule: its dense part, its rows by table and id, its digest."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from foreload.base.files import is_full
from foreload.trainer.assembly.saved_dense import read_dense
from foreload.trainer.checkpoints.chain import whole_copy
from foreload.trainer.checkpoints.format import Checkpoint
from foreload.trainer.checkpoints.row_files import CheckpointRows, OpenRows
from foreload.trainer.errors import CheckpointError
from foreload.trainer.saved.digest import Digest
from foreload.trainer.saved.model_rows import ModelRows

_ROWS = 1 << 16  # that are given at once


def dense_of(checkpoint: Checkpoint) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parameters by name, and optimizer state by "<parameter>/<key>". Raises RunError."""
    with checkpoint.local_dense() as path:
        return read_dense(path, checkpoint.contents.step)


def rows_by_id(checkpoint: Checkpoint, tables: Collection[int] | None = None) -> Iterator[ModelRows]:
    """Every row by (table, id), of files that were verified; 16 bytes a row of one table are held, the rest is mapped. tables: of these only.

    Of an increment, and of rounded weights, from a copy in a temporary folder (TMPDIR) that has all rows as they are read. Raises CheckpointError.
    """
    if checkpoint.is_mappable:
        yield from _mapped_by_id(checkpoint, tables)
        return
    with tempfile.TemporaryDirectory(prefix="foreload-") as folder:
        try:
            copy = whole_copy(checkpoint, Path(folder))
        except OSError as error:
            why = "is full" if is_full(error) else f"cannot be written to: {error.strerror}"
            raise CheckpointError(
                f"checkpoint {checkpoint.place}: its rows are put together in {folder}, which {why}; give TMPDIR a folder with room for a checkpoint"
            ) from error
        yield from _mapped_by_id(copy, tables)


def _mapped_by_id(checkpoint: Checkpoint, tables: Collection[int] | None) -> Iterator[ModelRows]:
    for table, layout in enumerate(checkpoint.contents.tables):
        if tables is not None and table not in tables:
            continue
        files = mapped_rows(checkpoint, table)
        if not files:
            continue
        ids = np.concatenate([file.id for file in files])
        starts = np.cumsum([0, *(len(file.id) for file in files)])
        order = np.argsort(ids, kind="stable")
        for first in range(0, len(order), _ROWS):
            places = order[first : first + _ROWS]
            weights = np.empty((len(places), layout.width), np.float32)
            state = np.empty((len(places), layout.state_width), np.float32)
            tags = np.empty(len(places), np.int32)
            file_of = np.searchsorted(starts, places, side="right") - 1
            for number in np.unique(file_of):
                own = np.flatnonzero(file_of == number)
                at = places[own] - starts[number]
                tags[own], weights[own], state[own] = files[number].tag[at], files[number].weights[at], files[number].state[at]
            yield ModelRows(table, ids[places], tags, weights, state)


def mapped_rows(checkpoint: Checkpoint, table: int) -> list[CheckpointRows]:
    """The rows of a table's files, mapped, of a checkpoint that `is_mappable`; whoever asks has verified them."""
    of_table = (file for file in checkpoint.contents.rows if file.table == table)
    layout = checkpoint.contents.tables[table]
    return [OpenRows(pa.memory_map(str(checkpoint.at(file))).read_buffer(), file, layout).part(0, file.rows) for file in of_table]


def digest_of(checkpoint: Checkpoint) -> str:
    """The digest of the model (docs/definitions.md, Digest), 64 hexadecimal digits; of files that were verified. Raises CheckpointError."""
    tables = [layout.name for layout in checkpoint.contents.tables]
    return Digest().model(dense_of(checkpoint), tables, rows_by_id(checkpoint))
