"""Write and read a checkpoint's files of rows (docs/checkpoints.md, The format).

Files are written in any order, and read piece by piece along a chain of increments. This module
does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foreload.cache.rows.layout import RowLayout
from foreload.trainer.checkpoints.contents import DENSE, Checkpoint, Contents, damaged
from foreload.trainer.checkpoints.draft import published
from foreload.trainer.checkpoints.files import EXACT_BITS, FileEntry, RowFile
from foreload.trainer.checkpoints.quantisation import QuantisedRows, decode, encode, packed_bytes
from foreload.trainer.errors import CheckpointError
from foreload.trainer.storage import AnyFolder, write_new

FILE_BYTES = 1 << 26
"""About how large a file of rows is at most; as many bytes are held while one is written."""

_GROUP_ROWS = 1 << 16  # rows of a Parquet row group, which is decoded at once
_ZSTD_LEVEL = 3
# Ordinals and ids are encoded by their differences. Every other column but the codes is split into
# bytes: the first bytes of all rows, then the second bytes, and so on.
_ENCODINGS = {"ordinal": "DELTA_BINARY_PACKED", "id": "DELTA_BINARY_PACKED", "codes": "PLAIN"}


@dataclass(frozen=True, slots=True)
class CheckpointRows:
    """Rows by ordinal.

    Attributes:
        id: int64 [n], -1 where only the base has the id.
        tag: int32 [n].
        weights: float32 [n, W].
        state: float32 [n, S].
    """

    id: np.ndarray
    tag: np.ndarray
    weights: np.ndarray
    state: np.ndarray

    @property
    def value_bytes(self) -> int:
        """The memory of the weights and the state, in bytes."""
        return self.weights.nbytes + self.state.nbytes

    def part(self, which: slice | np.ndarray) -> CheckpointRows:
        """Return the rows of a slice, of a mask or of places."""
        return CheckpointRows(self.id[which], self.tag[which], self.weights[which], self.state[which])

    @classmethod
    def joined(cls, pieces: list[CheckpointRows]) -> CheckpointRows:
        """Return the rows of at least one piece, one piece after the other."""
        if len(pieces) == 1:
            return pieces[0]
        return cls(*(np.concatenate([getattr(one, name) for one in pieces]) for name in cls.__slots__))

    @classmethod
    def zeros(cls, count: int, layout: RowLayout) -> CheckpointRows:
        """Return rows to be filled in. No row has the tag 0, so that marks those still missing."""
        weights, state = np.zeros((count, layout.width), np.float32), np.zeros((count, layout.state_width), np.float32)
        return cls(np.full(count, -1, np.int64), np.zeros(count, np.int32), weights, state)


def rows_of_a_file(layout: RowLayout) -> int:
    """Return how many rows of a table a file has at most."""
    return max(FILE_BYTES // layout.row_bytes, 1)


def write_rows(
    folder: AnyFolder,
    lane: int,
    layout: RowLayout,
    ordinals: np.ndarray,
    rows: CheckpointRows,
    bits: int = EXACT_BITS,
    known: int = 0,
) -> RowFile:
    """Write rows of one table and lane as a file of a checkpoint, forced to the disk.

    Several processes and threads may write to one folder, in any order and with gaps. A file is
    named by lane, table and first ordinal, so the only rule is that no ordinal of a lane and table
    comes twice. Nobody reads a file before a manifest names it. Raises OSError and
    CheckpointUnreachable.

    Args:
        folder: The checkpoint's folder.
        layout: The table's layout.
        ordinals: int64 [n], ascending, with n at least 1 and at most `rows_of_a_file`.
        rows: In the order of `ordinals`.
        bits: Bits per weight: 32 (exact), 8, 4, 3 or 2.
        known: The base has the ids of ordinals below this, so the file leaves them out.

    Returns:
        The file's entry for the manifest.
    """
    first, last, count = int(ordinals[0]), int(ordinals[-1]), len(ordinals)
    gapless = last - first + 1 == count
    plain = gapless and bits == EXACT_BITS and known <= first
    data = _arrow(rows) if plain else _parquet(None if gapless else ordinals, first, rows, layout, bits, known)
    name = f"rows-{lane:03d}-{layout.table:05d}-{first:012d}.{'arrow' if plain else 'parquet'}"
    written = write_file(folder, name, data)
    return RowFile(name, written.bytes, written.sha256, lane, layout.table, first, last, count, bits)


def write_file(folder: AnyFolder, name: str, data: bytes | pa.Buffer) -> FileEntry:
    """Write a file of a checkpoint, forced to the disk, and return its entry.

    Raises OSError and CheckpointUnreachable.
    """
    write_new(folder / name, data)
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


class RowSink:
    """Writes the rows of a checkpoint.

    The sink holds rows by lane and table, in whatever pieces they come, until a `write` puts them
    into files. The caller decides when that is, and so where files are cut. Every method that
    writes raises OSError and CheckpointUnreachable.

    Attributes:
        folder: Where the files go.
        files: The files written so far.
        held_bytes: The memory of the weights and the state of the rows held.
    """

    def __init__(
        self,
        folder: AnyFolder,
        layouts: Sequence[RowLayout],
        bits: int = EXACT_BITS,
        known: Sequence[Sequence[int]] = (),
        on_file: Callable[[RowFile], object] = lambda file: None,
    ) -> None:
        """Make a sink that holds no rows.

        Args:
            folder: Where the files go.
            layouts: The tables' layouts, in order.
            bits: Bits per weight, as for `write_rows`.
            known: For an increment, how many ordinals its base has, by lane and table.
            on_file: Called with each file after it is written.
        """
        self.folder, self.files, self.held_bytes = folder, list[RowFile](), 0
        self._layouts, self._bits, self._known, self._on_file = layouts, bits, known, on_file
        self._held: dict[tuple[int, int], list[tuple[np.ndarray, CheckpointRows]]] = {}

    def add(self, lane: int, table: int, ordinals: np.ndarray, rows: CheckpointRows) -> None:
        """Hold rows of a lane's table.

        Args:
            table: The number of the table.
            ordinals: int64 [n], in the order of the rows. No ordinal may come twice.
        """
        self._held.setdefault((lane, table), []).append((ordinals, rows))
        self.held_bytes += rows.value_bytes

    def write(self, lane: int, table: int, only_full_files: bool = False) -> None:
        """Write the rows held of a lane's table, sorted by ordinal, `rows_of_a_file` to a file.

        Args:
            table: The number of the table.
            only_full_files: If True, go on holding the last rows, which do not fill a file.
        """
        held, layout = self._held.get((lane, table), []), self._layouts[table]
        most, count = rows_of_a_file(layout), sum(len(ordinals) for ordinals, _ in held)
        end = count - count % most if only_full_files else count
        if not end:
            return
        ordinals, rows = np.concatenate([piece for piece, _ in held]), CheckpointRows.joined([piece for _, piece in held])
        if (ordinals[1:] < ordinals[:-1]).any():
            order = np.argsort(ordinals)
            ordinals, rows = ordinals[order], rows.part(order)
        del self._held[lane, table]
        self.held_bytes -= rows.value_bytes
        known = self._known[lane][table] if self._known else 0
        for first in range(0, end, most):
            part = slice(first, first + most)
            file = write_rows(self.folder, lane, layout, ordinals[part], rows.part(part), self._bits, known)
            self.files.append(file)
            self._on_file(file)
        if end < count:
            self.add(lane, table, ordinals[end:], rows.part(slice(end, None)))

    def write_largest(self) -> None:
        """Write the rows of the lane and table of which the sink holds the most bytes."""
        self.write(*max(self._held, key=lambda place: sum(rows.value_bytes for _, rows in self._held[place])))

    def write_all(self) -> None:
        """Write all rows that are held."""
        for place in sorted(self._held):
            self.write(*place)


def _arrow(rows: CheckpointRows) -> pa.Buffer:
    """Return an Arrow IPC file with one record batch.

    It is not compressed, so it costs next to nothing to write, and is read by mapping it.
    """
    columns = {"id": pa.array(rows.id), "tag": pa.array(rows.tag), "weights": _lists(rows.weights)}
    if rows.state.shape[1]:
        columns["state"] = _lists(rows.state)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _parquet(
    ordinals: np.ndarray | None, first: int, rows: CheckpointRows, layout: RowLayout, bits: int, known: int
) -> pa.Buffer:
    """Return a Parquet file in which the encoding of each column suits its values.

    Args:
        ordinals: As for `write_rows`. If None, they are first, first + 1, and so on.
        first: The first ordinal.
        layout: The table's layout.
        bits: As for `write_rows`.
        known: As for `write_rows`.
    """
    columns: dict[str, pa.Array] = {}
    if ordinals is not None:
        columns["ordinal"] = pa.array(ordinals)
    in_base = np.arange(first, first + len(rows.id)) < known if ordinals is None else ordinals < known
    if not in_base.all():
        columns["id"] = pa.array(rows.id, mask=in_base)
    columns["tag"] = pa.array(rows.tag)
    if bits == EXACT_BITS:
        columns["weights"] = _binary(rows.weights)
    else:
        quantised = encode(rows.weights, [width for _, width in layout.parts], bits)
        columns |= {name: _binary(getattr(quantised, name)) for name in ("codes", "scale", "bias")}
        if len(quantised.exact):
            columns["exact"] = _some(quantised, layout.width)
    if rows.state.shape[1]:
        columns["state"] = _binary(rows.state)
    encodings = {name: _ENCODINGS.get(name, "BYTE_STREAM_SPLIT") for name in columns}
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns),
        sink,
        row_group_size=_GROUP_ROWS,
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        use_dictionary=False,
        column_encoding=encodings,
        write_statistics=False,
        store_schema=False,
    )
    return sink.getvalue()


def _lists(values: np.ndarray) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), values.shape[1])


def _binary(values: np.ndarray) -> pa.Array:
    """Return the rows of an array as binaries of a fixed size."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.binary(values.strides[0]), len(values), [None, pa.py_buffer(values)])


def _some(quantised: QuantisedRows, width: int) -> pa.Array:
    """Return the weights of the rows that are kept exactly, and nulls for the others."""
    present = np.zeros(len(quantised), bool)
    present[quantised.exact] = True
    values = np.zeros((len(quantised), width), np.float32)
    values[quantised.exact] = quantised.weights
    # Arrow's validity bitmap has the bit of the first row lowest.
    bits = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(4 * width), len(quantised), [bits, pa.py_buffer(values)])


class OpenRows:
    """The rows of a file that was read; `part` returns them piece by piece.

    The constructor and `part` raise pyarrow.ArrowException, KeyError and ValueError if the data is
    not what `write_rows` writes for such an entry.

    Attributes:
        ordinals: int64 [rows], ascending.
    """

    def __init__(self, data: pa.Buffer, file: RowFile, layout: RowLayout) -> None:
        self._file, self._layout = file, layout
        self._batch: CheckpointRows | None = None
        self._parquet: pq.ParquetFile | None = None
        self._groups: dict[int, CheckpointRows] = {}
        if file.name.endswith(".arrow"):
            self._batch = _of_arrow(pa.ipc.open_file(data).get_batch(0), layout)
            count = len(self._batch.id)
        else:
            self._parquet = pq.ParquetFile(pa.BufferReader(data))
            count = self._parquet.metadata.num_rows
        if count != file.rows:
            raise ValueError(f"has {count} rows instead of {file.rows}")
        self.ordinals = np.arange(file.first, file.first + count)
        if self._parquet is not None and not file.gapless:
            self.ordinals = self._parquet.read(["ordinal"]).column("ordinal").to_numpy()

    def part(self, first: int, end: int) -> CheckpointRows:
        """Return the rows at places first .. end - 1 of the file, as views where possible."""
        if self._batch is not None:
            return self._batch.part(slice(first, end))
        groups = range(first // _GROUP_ROWS, -(-end // _GROUP_ROWS))
        # Callers read forwards, so decoded groups that lie before these are not needed again.
        self._groups = {number: rows for number, rows in self._groups.items() if number in groups}
        pieces = []
        for number in groups:
            if number not in self._groups:
                self._groups[number] = self._decoded(number)
            begin = number * _GROUP_ROWS
            pieces.append(self._groups[number].part(slice(max(first - begin, 0), end - begin)))
        return CheckpointRows.joined(pieces)

    def _decoded(self, group: int) -> CheckpointRows:
        assert self._parquet is not None
        layout, table = self._layout, self._parquet.read_row_group(group, use_threads=False)
        present = set(table.column_names)
        count = len(table)
        row_id = table.column("id").fill_null(-1).to_numpy() if "id" in present else np.full(count, -1, np.int64)
        state = _floats(table, "state", layout.state_width) if layout.state_width else np.empty((count, 0), np.float32)
        if self._file.bits == EXACT_BITS:
            weights = _floats(table, "weights", layout.width)
        else:
            parts, bits = [width for _, width in layout.parts], self._file.bits
            scale, bias = (_floats(table, name, len(parts)) for name in ("scale", "bias"))
            codes = _bytes(table.column("codes"), packed_bytes(layout.width, bits)).copy()
            exact, values = np.empty(0, np.int64), np.empty((0, layout.width), np.float32)
            if "exact" in present:
                column = table.column("exact")
                exact = np.flatnonzero(column.is_valid().to_numpy())
                values = _bytes(column.drop_null(), 4 * layout.width).view(np.float32)
            weights = decode(QuantisedRows(bits, codes, scale.copy(), bias.copy(), exact, values), parts)
        return CheckpointRows(row_id, table.column("tag").to_numpy(), weights, state)


def _of_arrow(batch: pa.RecordBatch, layout: RowLayout) -> CheckpointRows:
    for name, width in (("weights", layout.width), ("state", layout.state_width)):
        if width and getattr(batch.column(name).type, "list_size", 0) != width:
            raise ValueError(f"{name}: must have {width} columns; got {batch.column(name).type}")
    state = np.empty((len(batch), 0), np.float32)
    if layout.state_width:
        state = batch.column("state").flatten().to_numpy().reshape(-1, layout.state_width)
    weights = batch.column("weights").flatten().to_numpy().reshape(-1, layout.width)
    return CheckpointRows(batch.column("id").to_numpy(), batch.column("tag").to_numpy(), weights, state)


def _floats(table: pa.Table, name: str, width: int) -> np.ndarray:
    return _bytes(table.column(name), 4 * width).view(np.float32)


def _bytes(column: pa.ChunkedArray, width: int) -> np.ndarray:
    """Return a column of fixed-size binaries without nulls: uint8 [n, width]."""
    if column.type != pa.binary(width):
        raise ValueError(f"a column is {column.type} instead of {width} bytes a row")
    pieces = [
        np.frombuffer(chunk.buffers()[1], np.uint8, len(chunk) * width, chunk.offset * width).reshape(-1, width)
        for chunk in column.chunks
    ]
    return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]


_ROWS = 1 << 16  # rows that are yielded at once


@dataclass(slots=True)
class _Reading:
    """A file of rows that is read along the ordinals.

    Attributes:
        checkpoint: The checkpoint that has the file.
        rows: Its open rows. None before its first ordinal is reached, and after its last.
    """

    checkpoint: Checkpoint
    file: RowFile
    rows: OpenRows | None = None

    def _open(self) -> OpenRows:
        """Read the file into memory, and compare it with the manifest. Raises CheckpointError."""
        data = self.checkpoint.read(self.file)
        try:
            return OpenRows(pa.py_buffer(data), self.file, self.checkpoint.contents.tables[self.file.table])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise damaged(self.checkpoint.place, self.file.name, str(error)) from error

    def _part(self, first: int, end: int) -> CheckpointRows:
        """Return the rows at places first .. end - 1 of the file. Raises CheckpointError."""
        assert self.rows is not None
        try:
            return self.rows.part(first, end)
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise damaged(self.checkpoint.place, self.file.name, str(error)) from error

    def put(self, first: int, end: int, out: CheckpointRows) -> None:
        """Put the file's rows with ordinals first .. end - 1 into `out`, at ordinal - first."""
        # Drop a file's rows once all are read, so that one file of each checkpoint is held at a
        # time.
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
        # Where this file has no id, an older file of the chain has put it already.
        with_id = part.id != -1
        out.id[places[with_id]] = part.id[with_id]
        out.tag[places], out.weights[places], out.state[places] = part.tag, part.weights, part.state


def newest_rows(checkpoint: Checkpoint, lane: int, table: int, most: int = _ROWS) -> Iterator[tuple[int, CheckpointRows]]:
    """Yield all rows of a lane's table in their newest version, by ordinal.

    Files are compared with their manifests. For each checkpoint of the chain, the file being read
    is held as it is on the disk, and some 65,536 of its rows.

    Args:
        table: The number of the table.
        most: How many rows to yield at once, at most.

    Yields:
        The ordinal of the first row, and rows without gaps from there.

    Raises:
        CheckpointError: A file is damaged, or a row is in no file.
    """
    layout, count = checkpoint.contents.tables[table], checkpoint.contents.ordinals[lane][table]
    # Oldest first, so that newer versions of a row overwrite older ones.
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
        # A row is complete once a file gave its values, and a file, not always the same, its id.
        missing = int(np.count_nonzero((rows.tag == 0) | (rows.id == -1)))
        if missing:
            raise CheckpointError(
                f"checkpoint {checkpoint.place}: its files must have all rows; {missing} of lane {lane}, table {table} are missing; use another "
                "checkpoint"
            )
        yield first, rows


def compact(checkpoint: Checkpoint, folder: AnyFolder, on_rows: Callable[[int], object] = lambda count: None) -> Checkpoint:
    """Write a checkpoint of the same step and rows that needs no other one, as `published` does.

    For an exact checkpoint, the result equals, byte for byte, what saving all rows would have
    written.

    Args:
        checkpoint: The checkpoint to read.
        folder: The folder of checkpoints to write to.
        on_rows: Called with the number of rows just written.
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
    """Write a copy of a checkpoint that has all rows and can be mapped into a folder.

    The copy has no manifest on the disk, so that nothing opens it. Raises CheckpointError and
    OSError.
    """
    contents = _write(checkpoint, folder, lambda count: None)
    return Checkpoint(folder, contents, "", None)
