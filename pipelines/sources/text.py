"""Delimited text files, planned as byte ranges and parsed in blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.cells import parses
from foreload.pipelines.samples.convert import Rule, convert, required_numbers
from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.features import FeatureSpec, TextFormat
from foreload.pipelines.samples.records import (
    MOST_REJECTS,
    Cause,
    Records,
    RejectedRecord,
)
from foreload.pipelines.sources.fields import Bounds, Fields
from foreload.pipelines.sources.files import (
    File,
    compression,
    open_file,
    open_stream,
    reading,
)
from foreload.pipelines.sources.heads import (
    OrderType,
    check_one_kind,
    delimiter_of,
    first_order_values,
    order_type_of,
    read_header,
)
from foreload.pipelines.sources.splits import PIECE_ROWS, Split

SPLIT_BYTES = 16 << 20
"""The bytes of a split of an uncompressed file, and of a block of a compressed file."""

_READ_BYTES = 1 << 20
_PEEK_BYTES = 1 << 13
_SHOWN_CHARACTERS = 80
# Values from which the type of order_by is inferred if the first rows have none.
_MOST_VALUES = 1000
_WORDS: dict[OrderType, str] = {"text": "text", "integer": "whole numbers", "number": "numbers"}


def plan_text(files: list[File], spec: FeatureSpec, split_bytes: int = SPLIT_BYTES) -> list[Split]:
    """Return the splits of text files, cut into fields as spec.text says.

    Only the beginnings of files are read. If the spec has no order_type, it is inferred from the
    first rows of all files. A file whose first rows have no value of order_by is read on until one
    is found.

    Args:
        split_bytes: the size of a split of an uncompressed file.

    Raises:
        SourceError: a file lacks a column, or files differ in the kind of values of order_by.
    """
    splits: list[Split] = []
    inferred: list[tuple[str, OrderType]] = []
    for place, file in enumerate(files):
        text = replace(spec.text, delimiter=spec.text.delimiter or delimiter_of(file.path))
        columns, start, first_line = read_header(file.path, spec, text)
        text = replace(text, columns=columns)
        if compression(file.path) or text.newlines_in_values:
            of_file = [Split("stream", file.path, place, 0, start, start, text, first_line)]
        else:
            starts = range(start, file.size_bytes, split_bytes)
            ends = [min(at + split_bytes, file.size_bytes) for at in starts]
            of_file = [
                Split("text", file.path, place, k, *bounds, text) for k, bounds in enumerate(zip(starts, ends, strict=True))
            ]
        splits += of_file
        if spec.order_by is not None and spec.order_type is None:
            values = first_order_values(file.path, start, spec, text) or _later_order_values(of_file, spec, spec.order_by)
            if (kind := order_type_of(values)) is not None:
                inferred.append((file.path, kind))
    order_type = spec.order_type or _widest(spec.order_by or "", inferred)
    return [replace(split, order_type=order_type) for split in splits]


def _widest(column: str, inferred: list[tuple[str, OrderType]]) -> OrderType | None:
    """Return the type by which order_by compares in all files. None if no file has a value.

    Raises:
        SourceError: some files hold numbers and others do not.
    """
    check_one_kind(column, [(path, "text" if kind == "text" else "number", _WORDS[kind]) for path, kind in inferred])
    types = {kind for _, kind in inferred}
    return "number" if "number" in types else next(iter(types), None)


def _later_order_values(splits: list[Split], spec: FeatureSpec, column: str) -> set[str]:
    """Return the first distinct values of order_by in a file whose first rows have none.

    They are those of the first block with any value that is not missing. Empty if there is no such
    block.
    """
    for split in splits:
        layout = _Layout(split.path, split.text, spec)
        for block in _blocks(split, layout, SPLIT_BYTES):
            distinct = pc.unique(block.columns[layout.places[column]]).to_pylist()
            known = (text for text in distinct if text is not None and spec.text_of(text) is not None)
            if values := {text.strip() for text in islice(known, _MOST_VALUES)}:
                return values
    return set()


def read_text(split: Split, spec: FeatureSpec, block_bytes: int = SPLIT_BYTES, scales: Sequence[Scale] = ()) -> Iterator[Records]:
    """Yield the records of a split in order, in pieces of at most PIECE_ROWS.

    Args:
        block_bytes: the bytes to read and parse at a time, if the whole file is one split.
        scales: as in `convert`.

    Raises:
        SourceError: the file cannot be read, or a whole column has a type that does not fit its
            use.
    """
    layout = _Layout(split.path, split.text, replace(spec, order_type=split.order_type), scales)
    for block in _blocks(split, layout, block_bytes):
        yield from _pieces(block, layout)


def _blocks(split: Split, layout: _Layout, block_bytes: int) -> Iterator[_Block]:
    """Yield the parsed rows of a split, in order.

    Args:
        block_bytes: as in `read_text`.
    """
    if split.kind == "text":
        data, begin = _read_range(split)
        if data:
            yield _parse(data, layout, lambda: _lines_before(split.path, begin))
        return
    with open_stream(split.path) as stream:
        _read_exactly(stream, split.start, split.path)
        yield from _read_blocks(stream, layout, block_bytes, split.first_line - 1)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a file is read.

    Attributes:
        text: with delimiter and columns filled in.
        spec: with the order_type of all files.
        scales: as in `convert`.
    """

    path: str
    text: TextFormat
    spec: FeatureSpec
    scales: Sequence[Scale] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the file."""
        return self.text.columns

    @property
    def places(self) -> dict[str, int]:
        """The place of each column that the spec needs, by name."""
        return {name: self.columns.index(name) for name in self.spec.columns}

    @property
    def numbers(self) -> set[int]:
        """The places of the columns that are used as numbers only.

        Empty if a number may mean a missing value, because such values must be compared as text.
        """
        if any(parses(text.strip(), pa.float64()) for text in self.text.missing):
            return set()
        names = {*(column for column, _ in required_numbers(self.spec)), *(entry.column for entry in self.spec.dense)}
        texts = {
            *(entry.column for entry in self.spec.dense if not entry.numeric),
            *(feature.column for feature in self.spec.features),
            self.spec.group,
            self.spec.order_by,
        }
        return {self.columns.index(name) for name in names - texts}

    @property
    def rules(self) -> list[tuple[int, Rule]]:
        """The places of the columns whose numbers no record may lack, each with its rule.

        A column may occur with several rules.
        """
        return [(self.columns.index(column), rule) for column, rule in required_numbers(self.spec)]


@dataclass(frozen=True, slots=True)
class _Misfit:
    """One or several lines that are malformed as a whole.

    Attributes:
        line: the line in the block where they begin, from 0.
        cause: why they are malformed.
    """

    line: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class _Block:
    """Parsed rows.

    Attributes:
        columns: place -> string or float64 array [rows].
        lines: int64 [rows], the line in the block where each row starts, from 0.
        misfits: by ascending line. They have no row.
        lines_before: returns how many lines of the file precede the block. For a split this reads
            the file up to the block, so it is called only for an error.
    """

    columns: dict[int, pa.Array]
    lines: np.ndarray
    misfits: list[_Misfit]
    lines_before: Callable[[], int]


def _read_range(split: Split) -> tuple[bytes, int]:
    """Return the lines that start in start .. end - 1, and where the first of them starts."""
    with reading(split.path), open_file(split.path) as file:
        # A line starts at the beginning of a split if the byte before it is a line break. The first
        # split starts behind the header.
        begin = _line_start(file, split.start - 1) if split.split_index else split.start
        end = _line_start(file, split.end - 1)
        file.seek(begin)
        return _read_exactly(file, end - begin, split.path), begin


def _line_start(file: BinaryIO, place: int) -> int:
    """Return the byte after the first line break from `place` on.

    Without a line break, that is the end of the file.
    """
    file.seek(place)
    while part := file.read(_PEEK_BYTES):
        cut = part.find(b"\n") + 1
        if cut:
            return place + cut
        place += len(part)
    return place


def _read_exactly(file: BinaryIO, size: int, path: str) -> bytes:
    """Read `size` bytes, or fewer at the end of the file.

    Filesystems may return less than requested, so this reads on until all bytes arrived.
    """
    parts = []
    with reading(path):
        while size > 0 and (part := file.read(size)):
            parts.append(part)
            size -= len(part)
    return b"".join(parts)


def _lines_before(path: str, end: int) -> int:
    """Return how many lines end before byte `end` of a file.

    Raises:
        SourceError: the file cannot be read.
    """
    with reading(path), open_file(path) as file:
        lines = 0
        while end > 0 and (part := file.read(min(end, _READ_BYTES))):
            lines += part.count(b"\n")
            end -= len(part)
        return lines


def _read_blocks(stream: BinaryIO, layout: _Layout, block_bytes: int, lines_before: int) -> Iterator[_Block]:
    """Yield the parsed rows of a stream, in blocks that end with a row.

    Args:
        lines_before: the lines of the file before the stream's position.

    Raises:
        SourceError: a quote is not closed in time.
    """
    text = layout.text
    # The beginning of a row whose rest is in the next block.
    carry = b""
    more = True
    while more:
        part = _read_exactly(stream, block_bytes, layout.path)
        more = len(part) == block_bytes
        data = carry + part
        bounds = None
        cut = data.rfind(b"\n") + 1 if more else len(data)
        if text.most_lines and (b'"' in data or b"\r" in data):
            bounds = Bounds.of(data, text.delimiter or ",", text.quoting, text.most_lines, last=not more)
            _check_closed(bounds, layout, lines_before, last=not more)
            cut = int(bounds.starts[-1])
        data, carry = data[:cut], data[cut:]
        if data:
            yield _parse(data, layout, partial(int, lines_before), bounds)
            lines_before += data.count(b"\n") if bounds is None else bounds.end_line


def _check_closed(bounds: Bounds, layout: _Layout, lines_before: int, last: bool) -> None:
    """Check that every quote is closed.

    Raises:
        SourceError: a quoted value spans too many lines, or the file ends within one.
    """
    if bounds.long_line >= 0:
        most = layout.text.most_lines
        raise SourceError(
            f"{layout.path}:{lines_before + bounds.long_line + 1}: the quote that opens here is not closed within {most:,} lines; close "
            f"it, or say how many lines a value may span, as in newlines_in_values = {10 * most} under [text] of the feature file"
        )
    if last and bounds.open_line >= 0:
        raise SourceError(
            f"{layout.path}:{lines_before + bounds.open_line + 1}: the quote that opens here is never closed; close it, or set quoting = "
            "false and no newlines_in_values under [text] of the feature file, if quotes are ordinary characters"
        )


def _parse(data: bytes, layout: _Layout, lines_before: Callable[[], int], bounds: Bounds | None = None) -> _Block:
    """Parse whole rows into columns of text or numbers. Blank lines are skipped.

    Plain data goes through the compiled loops of `Fields`, and other data through Arrow's reader.
    Arrow numbers only the rows that it skips. So `Bounds` counts lines, and must cut rows exactly
    where Arrow does.

    Args:
        bounds: the bounds of the rows, if they are already known.

    Raises:
        SourceError: a value spans several lines and may not, or the data cannot be parsed.
    """
    text = layout.text
    delimiter = text.delimiter or ","
    places = sorted(layout.places.values())
    valid = _is_utf8(data)
    fields = Fields.of(data, delimiter, len(layout.columns), text.quoting) if valid else None
    if fields is not None:
        # A column of labels or weights with a value that breaks a rule stays text, so that an error
        # shows the value as the file has it.
        columns = fields.columns(places, layout.numbers, [(place, rule.holds) for place, rule in layout.rules])
        return _Block(columns, np.arange(len(fields)), [], lines_before)
    bounds = bounds or Bounds.of(data, delimiter, text.quoting, text.most_lines)
    characters = np.frombuffer(data, np.uint8)
    firsts = characters[bounds.starts[:-1]]
    blank = (firsts == ord("\n")) | (firsts == ord("\r"))
    misfits = [] if valid else _not_utf8(data, bounds)
    # Rows with wrong bytes are already reported, so they are not reported as broken as well.
    wrong_bytes = np.isin(bounds.lines, [misfit.line for misfit in misfits])
    broken = np.flatnonzero(bounds.broken & ~wrong_bytes)
    if len(broken):
        raise SourceError(
            f"{layout.path}:{lines_before() + 1 + bounds.lines[broken[0]]}: a value holds a line break or a carriage return, or a quote "
            "is never closed; if that is meant, set newlines_in_values = true under [text] of the feature file, or quoting = false, if "
            "quotes are ordinary characters"
        )
    # Cut out the rows that Arrow's reader must not see, so that its row numbers match `lines`.
    chosen = ~(blank | wrong_bytes)
    if not chosen.all():
        data = characters[np.repeat(chosen, np.diff(bounds.starts))].tobytes()
    lines = bounds.lines[chosen]
    if not len(lines):
        return _Block({place: pa.array([], pa.string()) for place in places}, lines, misfits, lines_before)
    wrong: list[arrow_csv.InvalidRow] = []
    try:
        table = arrow_csv.read_csv(pa.BufferReader(data), *_options(layout, places, len(data), wrong))
    except pa.ArrowInvalid as error:
        raise SourceError(f"{layout.path}: not readable as delimited text ({error}); check quoting and delimiter") from error
    assert table.num_rows + len(wrong) == len(lines), "rows end where Arrow's reader ends them"
    is_row = np.ones(len(lines), bool)
    is_row[[row.number - 1 for row in wrong]] = False
    misfits += [_miscount(layout, int(lines[row.number - 1]), row) for row in wrong]
    columns = {place: _one_chunk(table.column(str(place))) for place in places}
    return _Block(columns, lines[is_row], sorted(misfits, key=lambda misfit: misfit.line), lines_before)


def _is_utf8(data: bytes) -> bool:
    try:
        if not data.isascii():
            data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _not_utf8(data: bytes, bounds: Bounds) -> list[_Misfit]:
    """Return the rows that are not UTF-8."""
    misfits = []
    for start, end, line in zip(bounds.starts[:-1].tolist(), bounds.starts[1:].tolist(), bounds.lines.tolist(), strict=True):
        row = data[start:end]
        if not _is_utf8(row):
            shown = row.rstrip(b"\r\n").decode(errors="backslashreplace")[:_SHOWN_CHARACTERS]
            misfits.append(_Misfit(line, Cause("text", shown, "a line must be UTF-8")))
    return misfits


_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars", " ": "spaces"}


def _miscount(layout: _Layout, line: int, row: arrow_csv.InvalidRow) -> _Misfit:
    """Return a row with too few or too many columns. A row of one column may have another delimiter."""
    reason = f"a line must have {len(layout.columns)} columns"
    delimiter = layout.text.delimiter or ","
    others = {other: (row.text or "").count(other) for other in _DELIMITERS if other != delimiter}
    most = max(others, key=others.__getitem__)
    if row.actual_columns == 1 and others[most]:
        reason += f", separated by {_DELIMITERS.get(delimiter, repr(delimiter))} (this one has {_DELIMITERS[most]})"
    return _Misfit(line, Cause("columns", str(row.actual_columns), reason))


def _options(
    layout: _Layout, places: Iterable[int], block_bytes: int, wrong: list[arrow_csv.InvalidRow]
) -> tuple[arrow_csv.ReadOptions, arrow_csv.ParseOptions, arrow_csv.ConvertOptions]:
    """Return Arrow's options for reading the columns at places, as text, named by their places.

    Args:
        wrong: rows with a wrong number of fields are appended to it.
    """

    def skip(row: arrow_csv.InvalidRow) -> str:
        wrong.append(row)
        return "skip"

    text = layout.text
    names = [str(place) for place in range(len(layout.columns))]
    chosen = [str(place) for place in places]
    return (
        # Arrow numbers the rows of a wrong length only with one thread.
        arrow_csv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=names),
        arrow_csv.ParseOptions(
            delimiter=text.delimiter,
            quote_char='"' if text.quoting else False,
            newlines_in_values=bool(text.most_lines),
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
    """Yield the rows of a block in pieces of equal size, at most PIECE_ROWS.

    Each piece has the misfits before the first row of the next one.
    """
    rows = len(block.lines)
    if not rows and not block.misfits:
        return
    count = max(1, -(-rows // PIECE_ROWS))
    misfits = block.misfits
    for number in range(count):
        start, end = number * rows // count, (number + 1) * rows // count
        columns = {name: block.columns[place].slice(start, end - start) for name, place in layout.places.items()}
        lines = block.lines[start:end]
        line_of = partial(_lines_of, lines, block)
        records = convert(columns, layout.spec, layout.path, line_of, layout.scales)
        here = misfits if number == count - 1 else [m for m in misfits if m.line < block.lines[end]]
        misfits = misfits[len(here) :]
        yield _with_misfits(records, here, layout.path, block.lines_before) if here else records


def _lines_of(lines: np.ndarray, block: _Block, rows: np.ndarray) -> np.ndarray:
    """Return the lines of rows, from 1 in the file.

    Args:
        lines: the lines of the piece's rows, from 0 in the block.
    """
    return lines[rows] + block.lines_before() + 1


def _with_misfits(records: Records, misfits: list[_Misfit], path: str, lines_before: Callable[[], int]) -> Records:
    before = lines_before() + 1
    misfit_rejects = [RejectedRecord(path, m.line + before, *m.cause) for m in misfits[:MOST_REJECTS]]
    rejects = sorted([*records.rejects, *misfit_rejects], key=lambda reject: reject.line)[:MOST_REJECTS]
    return replace(records, rejects=tuple(rejects), causes=Counter(m.cause for m in misfits) + Counter(records.causes))
