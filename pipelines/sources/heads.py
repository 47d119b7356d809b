"""What the beginning of a text file tells: the names of its columns, and how the order_by column is compared."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Literal

import pyarrow as pa

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.convert import parses
from foreload.pipelines.samples.features import FeatureSpec, TextFormat
from foreload.pipelines.sources.files import open_stream, printable

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 20
_HEAD_ROWS = 1000
_SHOWN_COLUMNS = 50
_SHOWN_CHARACTERS = 1000


def delimiter_of(path: str) -> str:
    """The delimiter that a file's name tells, whatever it is compressed by: a tab in .tsv and .tab files, else a comma."""
    name = path.removesuffix(".gz").removesuffix(".zst")
    return "\t" if name.endswith((".tsv", ".tab")) else ","


def shown_names(names: Sequence[str]) -> str:
    """The names of columns as an error tells them: the first ones, without what a terminal would take for a command."""
    text = ", ".join(names[:_SHOWN_COLUMNS])
    return printable(text[:_SHOWN_CHARACTERS]) + (", ..." if len(names) > _SHOWN_COLUMNS or len(text) > _SHOWN_CHARACTERS else "")


def read_header(path: str, spec: FeatureSpec, text: TextFormat) -> tuple[tuple[str, ...], int]:
    """The names of a file's columns, and where its records begin (bytes of the decompressed file).

    text: with the delimiter filled in; its columns are the names where it has some. SourceError where a column that the spec needs is not there once.
    """
    with open_stream(path) as stream:
        head = stream.read(len(_BOM)) if text.columns else stream.readline(_HEAD_BYTES)
    start = len(_BOM) if head.startswith(_BOM) else 0
    if text.columns:
        columns = list(text.columns)
        given = "the columns given for it"
    else:
        line = head[start:].decode(errors="replace").rstrip("\r\n")
        delimiter = text.delimiter or ","
        quoted = text.quoting and '"' in line
        try:
            columns = next(csv.reader([line], delimiter=delimiter)) if quoted else line.split(delimiter)
        except csv.Error as error:
            raise SourceError(f"{path}:1: the header cannot be cut into names ({error}); check quoting and --format") from error
        start = len(head)
        given = "its header"
    for name in spec.columns:
        if columns.count(name) != 1:
            how_many = "no" if name not in columns else "more than one"
            shown = shown_names(columns)
            raise SourceError(
                f"{path}: {how_many} column {name!r} among {given}: {shown or 'none'}; check the feature file and the delimiter"
            )
    return tuple(columns), start


def infer_order_type(path: str, start: int, spec: FeatureSpec, text: TextFormat) -> Literal["text", "integer", "number"] | None:
    """How the values of order_by in the first rows of a file compare: as the narrowest kind that all are; None where none is given.

    start: where the records begin, decompressed. text: with delimiter and columns filled in.
    """
    if spec.order_by is None:
        return None
    with open_stream(path) as stream:
        head = stream.read(start + _HEAD_BYTES)[start:]
    lines = head.decode(errors="replace").splitlines(keepends=True)
    if len(head) == _HEAD_BYTES:
        lines.pop()  # cut short
    delimiter = text.delimiter or ","
    rows = csv.reader(lines, delimiter=delimiter) if text.quoting else (line.rstrip("\r\n").split(delimiter) for line in lines)
    place = text.columns.index(spec.order_by)
    values = set()
    with suppress(csv.Error):  # reading the file says what is wrong with it, and where
        for row in islice(rows, _HEAD_ROWS):
            if len(row) == len(text.columns) and row[place] not in ("", *text.missing):
                values.add(row[place].strip())
    if not values:
        return None
    if all(parses(value, pa.int64()) for value in values):
        return "integer"
    return "number" if all(parses(value, pa.float64()) for value in values) else "text"
