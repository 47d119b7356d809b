"""Arrow files of a schedule: written, and mapped into memory, each compared with its entry in a manifest."""

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
    """Write list columns, name -> (offsets int32 [events + 1], values), as one Arrow record batch with a row per event.

    Returns the file's entry in a manifest: name, bytes and CRC-32. Raises OSError.
    """
    arrays = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for offsets, values in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    crc32 = 0
    # Straight to the file: an entry state is as large as the slots, and is not held twice.
    with replacing(path) as temporary, open(temporary, "w+b") as file:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        size = file.tell()
        file.seek(0)
        while chunk := file.read(1 << 20):
            crc32 = zlib.crc32(chunk, crc32)
    return {"name": path.name, "bytes": size, "crc32": crc32}


def map_file(path: Path, entry: FileEntry, what: str) -> mmap.mmap:
    """A file mapped whole. Raises ScheduleError unless it is, byte for byte, what its entry in a manifest says.

    The mapping is a private one that could be written to without the file noticing, since numba takes arrays that are not writable only on
    a detour of some 0.1 ms a call.
    """
    try:
        with path.open("rb") as file:
            whole = os.fstat(file.fileno()).st_size == entry["bytes"]  # an empty file cannot be mapped
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if whole else None
    except OSError as error:
        raise ScheduleError(f"{what} {path}: {unreadable(error, 'prepare the schedule again')}") from None
    if source is None or zlib.crc32(source) != entry["crc32"]:
        raise ScheduleError(f"{what} {path}: its checksum is not the manifest's: the file is damaged; prepare the schedule again")
    return source


class MappedLists:
    """A mapped Arrow file of list columns: `column(name, row)` is a view. entry: the file's in a manifest. ScheduleError where it does not fit."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
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
        """Row `row` of a list column: a view. Raises ScheduleError if the file does not have the column."""
        offsets, values = self.whole(name)
        return values[offsets[row] : offsets[row + 1]]

    def whole(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """All rows of a list column: their offsets, one more than rows, and the values between them; views. Raises ScheduleError."""
        try:
            return self._columns[name]
        except KeyError as error:
            raise ScheduleError(f"schedule file {self._path}: must have a column {name!r}; prepare the schedule again") from error

    def has(self, name: str) -> bool:
        """Whether the file has this column."""
        return name in self._columns
