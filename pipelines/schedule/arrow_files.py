"""Writes and maps the Arrow files of a schedule, each checked against its entry in a manifest."""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from foreload.base.files import replacing, unreadable
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import FileEntry


def write_lists(path: Path, columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> FileEntry:
    """Write list columns as one Arrow record batch with a row for each event.

    Args:
        columns: name -> (offsets int32 [events + 1], values).

    Returns:
        The file's entry in a manifest: name, bytes and CRC-32.

    Raises:
        OSError: If the file cannot be written.
    """
    arrays = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for offsets, values in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    crc32 = 0
    # Write straight to the file and read it back for the checksum. An entry state is as large as
    # the slots, and a second copy in memory would be costly.
    with replacing(path) as temporary, open(temporary, "w+b") as file:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        size = file.tell()
        file.seek(0)
        while chunk := file.read(1 << 20):
            crc32 = zlib.crc32(chunk, crc32)
    return {"name": path.name, "bytes": size, "crc32": crc32}


def map_file(path: Path, entry: FileEntry, what: str) -> mmap.mmap:
    """Map a whole file and check it against its manifest entry.

    The mapping is private and writable, and writes to it would not reach the file. numba takes
    arrays that are not writable only by a detour of about 0.1 ms a call.

    Args:
        entry: Its entry in a manifest.
        what: What the file is, for error messages.

    Raises:
        ScheduleError: If the file is not, byte for byte, what the entry says.
    """
    try:
        with path.open("rb") as file:
            # Compare the size first, because an empty file cannot be mapped.
            whole = os.fstat(file.fileno()).st_size == entry["bytes"]
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if whole else None
    except OSError as error:
        raise ScheduleError(f"{what} {path}: {unreadable(error, 'prepare the schedule again')}") from None
    if source is None or zlib.crc32(source) != entry["crc32"]:
        raise ScheduleError(
            f"{what} {path}: its checksum does not match the manifest: the file is damaged; prepare the schedule again"
        )
    return source


class MappedLists:
    """A mapped Arrow file of list columns; `column(name, row)` is a view.

    Attributes:
        rows: The number of rows, one for each event.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        """Map the file.

        Args:
            entry: Its entry in a manifest.

        Raises:
            ScheduleError: If the file does not match the entry, or is not a file of a schedule.
        """
        self._path = path
        source = map_file(path, entry, "schedule file")
        start = np.frombuffer(source, np.uint8).ctypes.data
        try:
            batch = pa.ipc.open_file(pa.py_buffer(source)).get_batch(0)
        except pa.ArrowException as error:
            raise ScheduleError(
                f"schedule file {path}: is not one of a schedule ({error}); prepare the schedule again"
            ) from error
        self.rows = batch.num_rows

        def view(values: pa.Array) -> np.ndarray:
            kind = values.to_numpy().dtype
            if not len(values):
                return np.empty(0, kind)
            first = values.buffers()[1].address - start + values.offset * kind.itemsize
            return np.frombuffer(source, kind, len(values), first)

        self._columns = {name: (view(batch.column(name).offsets), view(batch.column(name).values)) for name in batch.schema.names}

    def column(self, name: str, row: int) -> np.ndarray:
        """Return one row of a list column, as a view.

        Raises:
            ScheduleError: If the file does not have the column.
        """
        offsets, values = self.whole(name)
        return values[offsets[row] : offsets[row + 1]]

    def whole(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return all rows of a list column, as views: offsets [rows + 1], and values.

        Raises:
            ScheduleError: If the file does not have the column.
        """
        try:
            return self._columns[name]
        except KeyError as error:
            raise ScheduleError(f"schedule file {self._path}: must have a column {name!r}; prepare the schedule again") from error

    def has(self, name: str) -> bool:
        """Return whether the file has the column."""
        return name in self._columns
