"""A checkpoint on disk: its manifest, its files, and what can be asked of it without a store or a schedule (docs/checkpoints.md).

Knows no torch, for the settings of a call of `train` are read from it before torch is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.base.files import read_sealed, write_sealed
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.manifest import Manifest

FORMAT = 1
MANIFEST, DENSE = "checkpoint.json", "dense.safetensors"

_ELSEWHERE = ("store_urls", "local_stores")
"""What a run's manifest says of where its rows are, which a checkpoint does not keep."""

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint, as its manifest has it: name, size, SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RowFile(FileEntry):
    """A file of rows: `rows` of them, of consecutive ordinals from `first` on, of a table in a lane."""

    lane: int
    table: int
    first: int
    rows: int

    @staticmethod
    def name_of(lane: int, table: int, first: int) -> str:
        """What such a file is called."""
        return f"rows-{lane:03d}-{table:05d}-{first:012d}.arrow"


@dataclass(frozen=True, slots=True)
class CheckpointRows:
    """Rows of a file, in the order of their ordinals: id int64 [n], tag int32 [n], weights float32 [n, W], state float32 [n, S]."""

    id: np.ndarray
    tag: np.ndarray
    weights: np.ndarray
    state: np.ndarray

    def encoded(self) -> pa.Buffer:
        """The contents of an Arrow IPC file with one record batch of these rows."""
        columns = {"id": pa.array(self.id), "tag": pa.array(self.tag), "weights": _lists(self.weights)}
        if self.state.shape[1]:
            columns["state"] = _lists(self.state)
        batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return sink.getvalue()

    @classmethod
    def decoded(cls, source: pa.Buffer | pa.MemoryMappedFile, layout: RowLayout) -> CheckpointRows:
        """The inverse of `encoded`, as views. Raises ValueError for what is none, or of another layout."""
        batch = pa.ipc.open_file(source).get_batch(0)
        state = _array(batch, "state", layout.state_width) if layout.state_width else np.empty((len(batch), 0), np.float32)
        return cls(batch.column("id").to_numpy(), batch.column("tag").to_numpy(), _array(batch, "weights", layout.width), state)


def _lists(values: np.ndarray) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), values.shape[1])


def _array(batch: pa.RecordBatch, name: str, width: int) -> np.ndarray:
    values: np.ndarray = batch.column(name).flatten().to_numpy().reshape(-1, width)
    return values


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint's manifest says. step, state, totals: of the run's status; run: its manifest; tables: in order; rows: its files of rows,
    of each lane and table by ordinal; dense: the dense part with its optimizer.
    """

    step: int
    state: Literal["stopped", "ended"]
    totals: dict[str, float]
    run: Manifest
    tables: tuple[RowLayout, ...]
    rows: tuple[RowFile, ...]
    dense: FileEntry

    def write(self, folder: Path) -> None:
        """Put the manifest into the folder of a checkpoint, last of all, durably. Raises OSError."""
        run = {name: value for name, value in asdict(self.run).items() if name not in _ELSEWHERE}
        told = asdict(self) | {"format": FORMAT, "run": run, "tables": [asdict(table) for table in self.tables]}
        write_sealed(folder / MANIFEST, told, durable=True)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Contents:
        """The inverse of what `write` wrote. Raises TypeError and KeyError for what is none."""
        tables = (table | {"parts": tuple((name, columns) for name, columns in table["parts"])} for table in stored["tables"])
        return cls(
            step=stored["step"],
            state=stored["state"],
            totals=stored["totals"],
            run=Manifest.of(stored["run"] | {"local_stores": None}),
            tables=tuple(RowLayout(**table) for table in tables),
            rows=tuple(RowFile(**entry) for entry in stored["rows"]),
            dense=FileEntry(**stored["dense"]),
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole as far as its manifest tells: its folder, and what that says."""

    path: Path
    contents: Contents

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """The checkpoint in a folder. Raises CheckpointError."""
        path = Path(path)
        try:
            stored = read_sealed(path / MANIFEST)[0]
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"checkpoint {path}: has no {MANIFEST}, so it is none, or was never finished; give a folder that `foreload checkpoint save` wrote"
            ) from None
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: cannot read {MANIFEST}: {error.strerror}; make it readable") from error
        except ValueError as error:
            raise _damaged(path, MANIFEST, str(error)) from error
        if stored.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {path}: its format must be {FORMAT}; got {stored.get('format')!r}; use the foreload that wrote it"
            )
        try:
            return cls(path, Contents.of(stored))
        except (TypeError, KeyError) as error:
            raise _damaged(path, MANIFEST, str(error)) from error

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file but the manifest."""
        return (*self.contents.rows, self.contents.dense)

    @property
    def row_count(self) -> int:
        """How many rows it has, of all tables."""
        return sum(file.rows for file in self.contents.rows)

    @property
    def total_bytes(self) -> int:
        """How much it takes, but for the manifest."""
        return sum(file.bytes for file in self.files)

    def verify(self, on_bytes: Callable[[int], object] = lambda count: None) -> None:
        """Read every file and compare its size and checksum with the manifest's. on_bytes: called with how many more were read.

        Raises CheckpointError that names the damaged files.
        """
        wrong = [(file.name, why) for file in self.files if (why := self._why_damaged(file, on_bytes))]
        if wrong:
            more = f", and {len(wrong) - 1} more: {', '.join(name for name, _ in wrong[1:6])}" if len(wrong) > 1 else ""
            raise _damaged(self.path, wrong[0][0], wrong[0][1] + more)

    def _why_damaged(self, file: FileEntry, on_bytes: Callable[[int], object]) -> str:
        """What is wrong with a file; "" where it is as it was written."""
        checksum = hashlib.sha256()
        try:
            with open(self.path / file.name, "rb") as source:
                size = os.fstat(source.fileno()).st_size
                if size != file.bytes:
                    return f"has {size} bytes instead of {file.bytes}"
                while chunk := source.read(_CHUNK_BYTES):
                    checksum.update(chunk)
                    on_bytes(len(chunk))
        except OSError as error:
            return error.strerror or str(error)
        return "" if checksum.hexdigest() == file.sha256 else "its checksum is not the manifest's"

    def read(self, file: FileEntry) -> bytes:
        """The contents of a file, compared with the manifest. Raises CheckpointError."""
        try:
            data = (self.path / file.name).read_bytes()
        except OSError as error:
            raise _damaged(self.path, file.name, error.strerror or str(error)) from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise _damaged(self.path, file.name, "its checksum is not the manifest's")
        return data

    def rows(self, file: RowFile) -> CheckpointRows:
        """The rows of a file, compared with the manifest, in memory of their own. Raises CheckpointError."""
        data = self.read(file)
        try:
            rows = CheckpointRows.decoded(pa.py_buffer(data), self.contents.tables[file.table])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise _damaged(self.path, file.name, str(error)) from error
        return CheckpointRows(rows.id.copy(), rows.tag.copy(), rows.weights.copy(), rows.state.copy())

    def mapped_rows(self, table: int) -> list[CheckpointRows]:
        """The rows of a table's files, mapped; whoever asks has verified them."""
        of_table = (file for file in self.contents.rows if file.table == table)
        layout = self.contents.tables[table]
        return [CheckpointRows.decoded(pa.memory_map(str(self.path / file.name)), layout) for file in of_table]


def checkpoints_in(folder: Path) -> Iterator[Path]:
    """The folders in a folder that have a checkpoint's manifest, by the number of the step, then by name. Raises OSError."""
    paths = [path for path in folder.iterdir() if not path.name.startswith(".") and (path / MANIFEST).is_file()]
    yield from sorted(paths, key=lambda path: (len(path.name), path.name))


def _damaged(path: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path}: {name} is damaged: {why}; use another checkpoint, or a copy of this one")
