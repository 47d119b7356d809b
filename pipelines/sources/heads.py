"""The beginning of a text file: column names, and the first values of the order_by column."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Literal

import pyarrow as pa

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.cells import parses
from foreload.pipelines.samples.features import FeatureSpec, TextFormat
from foreload.pipelines.sources.files import open_stream, printable

OrderType = Literal["text", "integer", "number"]

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 20
_HEAD_ROWS = 1000
_SHOWN_COLUMNS = 50
_SHOWN_CHARACTERS = 1000


def delimiter_of(path: str) -> str:
    """Return the delimiter that a file's name implies.

    It is a tab for .tsv and .tab files, else a comma. A suffix for compression is ignored.
    """
    name = path.removesuffix(".gz").removesuffix(".zst")
    return "\t" if name.endswith((".tsv", ".tab")) else ","


def shown_names(names: Sequence[str]) -> str:
    """Return column names as an error shows them.

    Only the first ones are shown, with control characters escaped for the terminal.
    """
    text = ", ".join(names[:_SHOWN_COLUMNS])
    return printable(text[:_SHOWN_CHARACTERS]) + (", ..." if len(names) > _SHOWN_COLUMNS or len(text) > _SHOWN_CHARACTERS else "")


def read_header(path: str, spec: FeatureSpec, text: TextFormat) -> tuple[tuple[str, ...], int, int]:
    """Return the names of a file's columns, and where its records begin.

    Args:
        text: with the delimiter filled in. If it has columns, they are the names, and the file has
            no header.

    Returns:
        The names, the byte at which the records begin in the decompressed file, and that line's
        number from 1.

    Raises:
        SourceError: a column that the spec needs does not occur exactly once, or the header cannot
            be parsed.
    """
    start, number = 0, 1
    with open_stream(path) as stream:
        head = stream.read(len(_BOM)) if text.columns else stream.readline(_HEAD_BYTES)
        if head.startswith(_BOM):
            head, start = head[len(_BOM) :], len(_BOM)
        if not text.columns:
            while head and not head.strip(b"\r\n"):
                start, number, head = start + len(head), number + 1, stream.readline(_HEAD_BYTES)
    if text.columns:
        columns = list(text.columns)
        given = "the columns given for it"
    else:
        try:
            columns = next(_rows(head, text), [""])
        except csv.Error as error:
            raise SourceError(
                f"{path}:{number}: the header cannot be split into names ({error}); check quoting and --format"
            ) from error
        start, number = start + len(head), number + 1
        given = "its header"
    for name in spec.columns:
        if columns.count(name) != 1:
            how_many = "no" if name not in columns else "more than one"
            shown = shown_names(columns)
            raise SourceError(
                f"{path}: {how_many} column {name!r} among {given}: {shown or 'none'}; check the feature file and the delimiter"
            )
    return tuple(columns), start, number


def first_row(path: str, text: TextFormat) -> list[str]:
    """Return the first row of a file that is not blank. Empty if the file has none.

    Args:
        text: with the delimiter filled in.
    """
    with open_stream(path) as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(_BOM)
    # Reading the file later reports what is wrong, and where.
    with suppress(csv.Error):
        return next(filter(None, _rows(head, text)), [])
    return []


def first_order_values(path: str, start: int, spec: FeatureSpec, text: TextFormat) -> set[str]:
    """Return the values of order_by in the first 1,000 rows of a file, without missing ones.

    Only rows that lie wholly in the first MiB of records count. Rows with too few or too many
    fields, or with bytes that are not UTF-8, are malformed and have no values.

    Args:
        start: the byte at which the records begin in the decompressed file.
        text: with delimiter and columns filled in.
    """
    assert spec.order_by is not None
    with open_stream(path) as stream:
        head = stream.read(start + _HEAD_BYTES)[start:]
    if len(head) == _HEAD_BYTES:
        # The last row may be cut short.
        head = head[: head.rfind(b"\n") + 1]
    place = text.columns.index(spec.order_by)
    values = set()
    # Reading the file later reports what is wrong, and where.
    with suppress(csv.Error):
        for row in islice(_rows(head, text, "surrogateescape"), _HEAD_ROWS):
            if len(row) == len(text.columns) and _is_valid(row) and spec.text_of(row[place]) is not None:
                values.add(row[place].strip())
    return values


def order_type_of(values: set[str]) -> OrderType | None:
    """Return the narrowest type that fits all values of order_by. None without values.

    Args:
        values: texts without spaces around them.
    """
    if not values:
        return None
    if all(parses(value, pa.int64()) for value in values):
        return "integer"
    return "number" if all(parses(value, pa.float64()) for value in values) else "text"


def check_one_kind(column: str, kinds: Iterable[tuple[str, str, str]]) -> None:
    """Check that the order_by column holds one kind of value in all files.

    Values of different kinds would still compare, but not by what they stand for.

    Args:
        column: the name of the column.
        kinds: for each file its path, its kind, and the word for the kind in an error.

    Raises:
        SourceError: two files differ.
    """
    of_first: tuple[str, str, str] | None = None
    for path, kind, word in kinds:
        if of_first is None:
            of_first = path, kind, word
        elif kind != of_first[1]:
            raise SourceError(
                f"order_by: column {column} must be of one kind, numbers, times or text, in all files; got {of_first[2]} in {of_first[0]} and "
                f"{word} in {path}; convert one of them"
            )


def _rows(head: bytes, text: TextFormat, errors: str = "replace") -> Iterator[list[str]]:
    """Yield the rows at the beginning of a file.

    They are cut at line breaks only, as the reader of the whole file cuts them.

    Args:
        errors: how to decode bytes that are not UTF-8, as in `bytes.decode`.

    Raises:
        csv.Error: quoted text cannot be parsed.
    """
    lines = io.StringIO(head.decode(errors=errors), newline="\n")
    delimiter = text.delimiter or ","
    if text.quoting and b'"' in head:
        csv.field_size_limit(max(csv.field_size_limit(), _HEAD_BYTES))
        return csv.reader(lines, delimiter=delimiter)
    plain = (line.rstrip("\r\n") for line in lines)
    return (line.split(delimiter) if line else [] for line in plain)


def _is_valid(row: list[str]) -> bool:
    """Return whether all of a row was UTF-8.

    The row was decoded with surrogates for bytes that are not.
    """
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return False
    return True
