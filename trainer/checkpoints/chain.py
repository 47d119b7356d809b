"""The rows of a checkpoint and of those that it needs, each once, in its newest version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from foreload.trainer.checkpoints.contents import DENSE, Contents
from foreload.trainer.checkpoints.draft import published
from foreload.trainer.checkpoints.files import RowFile
from foreload.trainer.checkpoints.format import Checkpoint, damaged
from foreload.trainer.checkpoints.row_files import CheckpointRows, OpenRows, RowSink, rows_of_a_file, write_file
from foreload.trainer.errors import CheckpointError
from foreload.trainer.storage import AnyFolder

_ROWS = 1 << 16  # that are given at once


@dataclass(slots=True)
class _Reading:
    """A file of rows that is read along the ordinals. rows: None before the first and after the last of these."""

    checkpoint: Checkpoint
    file: RowFile
    rows: OpenRows | None = None

    def _open(self) -> OpenRows:
        """Its rows, compared with the manifest, in memory. Raises CheckpointError."""
        data = self.checkpoint.read(self.file)
        try:
            return OpenRows(pa.py_buffer(data), self.file, self.checkpoint.contents.tables[self.file.table])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise damaged(self.checkpoint.place, self.file.name, str(error)) from error

    def _part(self, first: int, end: int) -> CheckpointRows:
        """Rows `first` .. `end` - 1 of the file. Raises CheckpointError."""
        assert self.rows is not None
        try:
            return self.rows.part(first, end)
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise damaged(self.checkpoint.place, self.file.name, str(error)) from error

    def put(self, first: int, end: int, out: CheckpointRows) -> None:
        """Put its rows with ordinals first .. end - 1 into their places of these."""
        if self.file.last < first or self.file.first >= end:
            self.rows = None
            return
        if self.rows is None:
            self.rows = self._open()
        begin, stop = np.searchsorted(self.rows.ordinals, (first, end))
        if begin == stop:
            return
        part = self._part(int(begin), int(stop))
        places = self.rows.ordinals[begin:stop] - first
        with_id = part.id != -1
        out.id[places[with_id]] = part.id[with_id]
        out.tag[places], out.weights[places], out.state[places] = part.tag, part.weights, part.state


def newest_rows(checkpoint: Checkpoint, lane: int, table: int, most: int = _ROWS) -> Iterator[tuple[int, CheckpointRows]]:
    """All rows of a table in a lane by ordinal, at most so many at once, with the first one's ordinal; files are compared with their manifests.

    What is held: the file that is being read of each checkpoint of the chain, as it is on the disk, and some 65,536 rows of each. Raises
    CheckpointError, also where a row is in no file.
    """
    layout, count = checkpoint.contents.tables[table], checkpoint.contents.ordinals[lane][table]
    # The oldest first, so that newer versions come over older ones.
    readings = [
        _Reading(one, file)
        for one in reversed(checkpoint.chain)
        for file in one.contents.rows
        if (file.lane, file.table) == (lane, table)
    ]
    most = min(most, rows_of_a_file(layout))
    for first in range(0, count, most):
        end = min(first + most, count)
        rows = CheckpointRows.zeros(end - first, layout)
        for reading in readings:
            reading.put(first, end, rows)
        missing = int(np.count_nonzero((rows.tag == 0) | (rows.id == -1)))
        if missing:
            raise CheckpointError(
                f"checkpoint {checkpoint.place}: its files must have all rows; {missing} of lane {lane}, table {table} are in none; use another "
                "checkpoint"
            )
        yield first, rows


def compact(checkpoint: Checkpoint, folder: AnyFolder, on_rows: Callable[[int], object] = lambda count: None) -> Checkpoint:
    """Write a checkpoint that needs no other, of the same step with the same rows, into a folder of checkpoints, as `published` does.

    Of an exact one it is, byte for byte, what saving all rows would have written. on_rows: called with how many more were written.
    """

    def write(temporary: AnyFolder) -> Contents:
        return _write(checkpoint, temporary, on_rows)

    return published(folder, "--to", checkpoint.contents.step, write)


def _write(checkpoint: Checkpoint, folder: AnyFolder, on_rows: Callable[[int], object]) -> Contents:
    contents = checkpoint.contents
    dense = write_file(folder, DENSE, checkpoint.read(contents.dense))
    sink = RowSink(folder, contents.tables, on_file=lambda file: on_rows(file.rows))
    for table, layout in enumerate(contents.tables):
        for lane in range(len(contents.ordinals)):
            for first, rows in newest_rows(checkpoint, lane, table, rows_of_a_file(layout)):
                sink.add(lane, table, np.arange(first, first + len(rows.id)), rows)
                sink.write(lane, table)
    files = sorted(sink.files, key=lambda file: (file.table, file.first, file.lane))
    return replace(contents, rows=tuple(files), dense=dense, base=None, sizes=())


def whole_copy(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """A copy with all rows, in which every file can be mapped; it has no manifest, so that nobody opens it. Raises CheckpointError and OSError."""
    contents = _write(checkpoint, folder, lambda count: None)
    return Checkpoint(folder, contents, "", None)
