"""Text files, delimited: planned as byte ranges, parsed block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from pipelines.errors import SourceError
from pipelines.features import FeatureSpec, TextFormat
from pipelines.records import MOST_REJECTS, Records, RejectedRecord, convert, parses
from pipelines.sources.fields import Fields
from pipelines.sources.files import File, compression, open_file, open_stream, reading
from pipelines.sources.heads import delimiter_of, infer_order_type, read_header
from pipelines.sources.splits import PIECE_ROWS, Split

SPLIT_BYTES = 16 << 20
"""Bytes of a split of an uncompressed file, and of a block of a compressed one."""

_READ_BYTES = 1 << 20
_PEEK_BYTES = 1 << 13
_SHOWN_CHARACTERS = 80


def plan_text(files: list[File], spec: FeatureSpec, split_bytes: int = SPLIT_BYTES) -> list[Split]:
    """The splits of text files, cut as spec.text says; reads the beginnings of files only.

    Without an order_type of the spec's, that of all files is inferred from the first rows that have a value of order_by. Raises
    SourceError where a column is missing.
    """
    splits = []
    order_type = spec.order_type
    for place, file in enumerate(files):
        text = replace(spec.text, delimiter=spec.text.delimiter or delimiter_of(file.path))
        columns, start = read_header(file.path, spec, text)
        first_line = 1 if text.columns else 2
        text = replace(text, columns=columns)
        if order_type is None:
            order_type = infer_order_type(file.path, start, spec, text)
        if compression(file.path) or text.newlines_in_values:
            splits.append(Split("stream", file.path, place, 0, start, start, text, first_line))
            continue
        for number, at in enumerate(range(start, file.size_bytes, split_bytes)):
            end = min(at + split_bytes, file.size_bytes)
            splits.append(Split("text", file.path, place, number, at, end, text))
    return [replace(split, order_type=order_type) for split in splits]


def read_text(split: Split, spec: FeatureSpec, block_bytes: int = SPLIT_BYTES) -> Iterator[Records]:
    """The records of a split in order, in pieces of at most PIECE_ROWS. Raises SourceError.

    block_bytes: what is read and parsed at a time of a file that is one split.
    """
    layout = _Layout(split.path, split.text, replace(spec, order_type=split.order_type))
    if split.kind == "text":
        data, begin = _read_range(split)
        if data:
            yield from _pieces(_parse(data, layout, lambda: _lines_before(split.path, begin)), layout)
        return
    with open_stream(split.path) as stream:
        _read_exactly(stream, split.start, split.path)
        lines_before = split.first_line - 1
        if split.text.newlines_in_values:
            yield from _read_quoted(stream, layout, block_bytes, lines_before)
        else:
            yield from _read_blocks(stream, layout, block_bytes, lines_before)


@dataclass(frozen=True, slots=True)
class _Layout:
    path: str
    text: TextFormat
    spec: FeatureSpec

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the file's columns."""
        return self.text.columns

    @property
    def places(self) -> dict[str, int]:
        """Where the columns that the spec needs stand."""
        return {name: self.columns.index(name) for name in self.spec.columns}

    @property
    def numbers(self) -> set[int]:
        """Where the columns stand that are read as numbers and as nothing else, unless a number means a missing value."""
        if any(parses(text.strip(), pa.float64()) for text in self.text.missing):
            return set()
        names = {self.spec.label, *(entry.column for entry in self.spec.dense)}
        return {self.columns.index(name) for name in names - {f.column for f in self.spec.features} - {self.spec.order_by}}


@dataclass(frozen=True, slots=True)
class _Misfit:
    """A line, from 0 in its block, that is no row: what of it breaks which rule."""

    line: int
    field: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Block:
    """Parsed rows. columns: place -> string or float64 array [rows]. lines: where each row starts, from 0 in the block. misfits: the
    lines that are no rows, ascending. lines_before: how many lines of the file precede the block."""

    columns: dict[int, pa.Array]
    lines: np.ndarray
    misfits: list[_Misfit]
    lines_before: Callable[[], int]


def _read_range(split: Split) -> tuple[bytes, int]:
    """The lines that start in start .. end - 1, whole, and where the first of them starts."""
    with reading(split.path), open_file(split.path) as file:
        # The byte before a split tells whether a line starts there; the first split starts behind the header.
        begin = _line_start(file, split.start - 1) if split.split_index else split.start
        end = _line_start(file, split.end - 1)
        file.seek(begin)
        return _read_exactly(file, end - begin, split.path), begin


def _line_start(file: BinaryIO, place: int) -> int:
    """Where the line after the first line break from `place` on starts; the end of the file if there is none."""
    file.seek(place)
    while part := file.read(_PEEK_BYTES):
        cut = part.find(b"\n") + 1
        if cut:
            return place + cut
        place += len(part)
    return place


def _read_exactly(file: BinaryIO, size: int, path: str) -> bytes:
    """`size` bytes, or fewer at the end of the file: filesystems may return less than asked."""
    parts = []
    with reading(path):
        while size > 0 and (part := file.read(size)):
            parts.append(part)
            size -= len(part)
    return b"".join(parts)


def _lines_before(path: str, end: int) -> int:
    with reading(path), open_file(path) as file:
        lines = 0
        while end > 0 and (part := file.read(min(end, _READ_BYTES))):
            lines += part.count(b"\n")
            end -= len(part)
        return lines


def _read_blocks(stream: BinaryIO, layout: _Layout, block_bytes: int, lines_before: int) -> Iterator[Records]:
    """Blocks of whole lines, one after the other."""
    carry = b""
    more = True
    while more:
        part = _read_exactly(stream, block_bytes, layout.path)
        more = len(part) == block_bytes
        data = carry + part
        cut = data.rfind(b"\n") + 1 if more else len(data)
        data, carry = data[:cut], data[cut:]
        if data:
            yield from _pieces(_parse(data, layout, partial(int, lines_before)), layout)
            lines_before += data.count(b"\n")


def _parse(data: bytes, layout: _Layout, lines_before: Callable[[], int]) -> _Block:
    """Whole lines -> rows, one a line. Blank lines are no records. SourceError where a value spans lines."""
    data, misfits = _only_utf8(data)
    places = sorted(layout.places.values())
    fields = None if misfits else Fields.of(data, layout.text.delimiter or ",", len(layout.columns), layout.text.quoting)
    if fields is not None:
        columns = fields.columns(places, layout.numbers, {layout.columns.index(layout.spec.label)})
        return _Block(columns, np.arange(len(fields)), [], lines_before)
    wrong: list[arrow_csv.InvalidRow] = []
    try:
        table = arrow_csv.read_csv(pa.BufferReader(data), *_options(layout, places, len(data), wrong))
    except pa.ArrowInvalid as error:
        raise SourceError(f"{layout.path}: not readable as delimited text ({error}); check quoting and delimiter") from error
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if table.num_rows + len(wrong) != lines or _open_quote(data[data.rfind(b"\n", 0, -1) + 1 :], layout):
        line = lines_before() + 1 + next((n for n, text in enumerate(data.split(b"\n")) if _open_quote(text, layout)), 0)
        raise SourceError(
            f"{layout.path}:{line}: a value holds a line break or a carriage return, or a quote is never closed; if that is meant, "
            "set newlines_in_values = true under [text] of the feature file"
        )
    not_rows = [row.number - 1 for row in wrong]
    blank = _blank_lines(data)
    is_row = np.ones(lines, bool)
    is_row[not_rows] = False
    chosen = is_row.copy()
    chosen[blank] = False
    columns = {place: _one_chunk(table.column(str(place))) for place in places}
    if len(blank):
        mask = pa.array(chosen[is_row])
        columns = {place: column.filter(mask) for place, column in columns.items()}
        not_rows = sorted(set(not_rows) - set(blank.tolist()))
    counts = {row.number - 1: row.actual_columns for row in wrong}
    misfits = sorted([*misfits, *(_miscount(layout, line, counts[line]) for line in not_rows)], key=lambda m: m.line)
    return _Block(columns, np.flatnonzero(chosen), misfits, lines_before)


def _only_utf8(data: bytes) -> tuple[bytes, list[_Misfit]]:
    """The block with every line that is not UTF-8 blanked, and those lines."""
    try:
        if not data.isascii():
            data.decode()
        return data, []
    except UnicodeDecodeError:
        pass
    misfits = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines):
        try:
            line.decode()
        except UnicodeDecodeError:
            shown = line.decode(errors="backslashreplace")[:_SHOWN_CHARACTERS]
            misfits.append(_Misfit(number, "text", shown, "a line must be UTF-8"))
            lines[number] = b""
    return b"\n".join(lines), misfits


def _blank_lines(data: bytes) -> np.ndarray:
    """The lines without a character, int64, ascending."""
    if not (b"\n\n" in data or data.startswith((b"\n", b"\r\n")) or (b"\r" in data and b"\n\r\n" in data)):
        return np.empty(0, np.int64)
    characters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    lengths = np.diff(ends, prepend=-1) - 1
    returns = (lengths == 1) & (characters[np.maximum(ends - 1, 0)] == ord("\r"))
    return np.flatnonzero((lengths == 0) | returns)


def _open_quote(line: bytes, layout: _Layout) -> bool:
    """Whether a line, with or without its end, holds a value that goes on in the next line, or a carriage return inside."""
    unclosed = layout.text.quoting and line.count(b'"') % 2 == 1
    return unclosed or b"\r" in line.removesuffix(b"\n").removesuffix(b"\r")


def _read_quoted(stream: BinaryIO, layout: _Layout, block_bytes: int, lines_before: int) -> Iterator[Records]:
    """Rows that may span lines. All columns are read, since a row's line depends on the line breaks in every value before it."""
    wrong: list[arrow_csv.InvalidRow] = []
    rows_before = 0
    options = _options(layout, range(len(layout.columns)), block_bytes, wrong)
    with reading(layout.path):
        try:
            for batch in arrow_csv.open_csv(pa.PythonFile(stream, "r"), *options):
                block, rows, lines = _quoted_block(batch, layout, wrong, rows_before, lines_before)
                yield from _pieces(block, layout)
                rows_before += rows
                lines_before += lines
                wrong[:] = [row for row in wrong if row.number > rows_before]
        except pa.ArrowInvalid as error:
            if "Empty CSV file" not in str(error):
                raise SourceError(
                    f"{layout.path}: not readable as delimited text ({error}); check quoting and delimiter"
                ) from error
    if wrong:  # behind the last row that was one
        nothing = pa.record_batch([pa.array([], pa.string())] * len(layout.columns), [str(n) for n in range(len(layout.columns))])
        yield from _pieces(_quoted_block(nothing, layout, wrong, rows_before, lines_before, last=True)[0], layout)


def _quoted_block(
    batch: pa.RecordBatch,
    layout: _Layout,
    wrong: list[arrow_csv.InvalidRow],
    rows_before: int,
    lines_before: int,
    last: bool = False,
) -> tuple[_Block, int, int]:
    """A batch of rows with the wrong ones that stand before and among them (all that are left, with `last`), how many rows and how many
    lines that is."""
    among = []
    rows = batch.num_rows
    for row in wrong:
        if row.number - 1 >= rows_before + rows and not last:
            break
        among.append(row)
        rows += 1
    is_row = np.ones(rows, bool)
    spanned = np.ones(rows, np.int64)
    for row in among:
        place = row.number - 1 - rows_before
        is_row[place] = False
        spanned[place] += row.text.count("\n")
    empty = np.ones(batch.num_rows, bool)
    for column in batch.columns:
        spanned[is_row] += pc.fill_null(pc.count_substring(column, "\n"), 0).to_numpy(zero_copy_only=False)
        empty &= np.asarray(column.is_null())
    starts = np.cumsum(spanned) - spanned
    chosen = pa.array(~empty)  # a blank line reads as a row without values
    columns = {place: batch.column(place).filter(chosen) for place in layout.places.values()}
    misfits = [_miscount(layout, int(starts[row.number - 1 - rows_before]), row.actual_columns) for row in among]
    return _Block(columns, starts[is_row][~empty], misfits, partial(int, lines_before)), rows, int(spanned.sum())


def _miscount(layout: _Layout, line: int, columns: int) -> _Misfit:
    return _Misfit(line, "columns", str(columns), f"a line must have {len(layout.columns)} columns")


def _options(
    layout: _Layout, places: Iterable[int], block_bytes: int, wrong: list[arrow_csv.InvalidRow]
) -> tuple[arrow_csv.ReadOptions, arrow_csv.ParseOptions, arrow_csv.ConvertOptions]:
    """How Arrow reads the columns at places, all as text, named by place. Rows of a wrong length are appended to wrong."""

    def skip(row: arrow_csv.InvalidRow) -> str:
        wrong.append(row)
        return "skip"

    text = layout.text
    names = [str(place) for place in range(len(layout.columns))]
    chosen = [str(place) for place in places]
    return (
        # One thread, since only then are the rows of a wrong length numbered.
        arrow_csv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=names),
        arrow_csv.ParseOptions(
            delimiter=text.delimiter,
            quote_char='"' if text.quoting else False,
            newlines_in_values=text.newlines_in_values,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        ),
        arrow_csv.ConvertOptions(
            include_columns=chosen,
            column_types={name: pa.string() for name in chosen},
            null_values=["", *text.missing],
            strings_can_be_null=True,
        ),
    )


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _pieces(block: _Block, layout: _Layout) -> Iterator[Records]:
    """A block's rows in equal pieces of at most PIECE_ROWS, each with the misfits before the next one's first row."""
    rows = len(block.lines)
    if not rows and not block.misfits:
        return
    count = max(1, -(-rows // PIECE_ROWS))
    misfits = block.misfits
    for number in range(count):
        start, end = number * rows // count, (number + 1) * rows // count
        columns = {name: block.columns[place].slice(start, end - start) for name, place in layout.places.items()}
        lines = block.lines[start:end]
        records = convert(columns, layout.spec, layout.path, lambda at, lines=lines: lines[at] + block.lines_before() + 1)  # type: ignore[misc]
        here = misfits if number == count - 1 else [m for m in misfits if m.line < block.lines[end]]
        misfits = misfits[len(here) :]
        yield _with_misfits(records, here, layout.path, block.lines_before) if here else records


def _with_misfits(records: Records, misfits: list[_Misfit], path: str, lines_before: Callable[[], int]) -> Records:
    before = lines_before() + 1
    found = [RejectedRecord(path, m.line + before, m.field, m.value, m.reason) for m in misfits[:MOST_REJECTS]]
    rejects = sorted([*records.rejects, *found], key=lambda reject: reject.line)[:MOST_REJECTS]
    return replace(records, rejects=tuple(rejects), rejected=records.rejected + len(misfits))
