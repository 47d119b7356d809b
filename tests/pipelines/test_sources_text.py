"""Text sources: however a log is stored, compressed, cut into splits or blocks, the samples are the same, and faults are located."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference_data as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import read_split

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.features import (
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
    TextFormat,
)
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.samples.records import Records
from foreload.pipelines.sources import (
    Source,
    plan_splits,
    read_records,
    splits,
)
from foreload.pipelines.sources.files import File, match_files
from foreload.pipelines.sources.heads import OrderType, first_row
from foreload.pipelines.sources.splits import Piece
from foreload.pipelines.sources.text import _read_exactly, plan_text, read_text

SPEC = FeatureSpec(
    labels=(Label("y", "y"),),
    dense=(Dense("d", "d", "none"),),
    features=(Feature("c", 0, "c", "hash"), Feature("m", 1, "m", "id", "sum"), Feature("c2", 0, "c", "hash")),
    tables=(Table("c", 1000), Table("m", 50)),
    order_by="c",
)
HEADER = "y,unused,d,c,m\n"
QUOTED = replace(SPEC, text=TextFormat(newlines_in_values=True))
HEADLESS = replace(SPEC, text=TextFormat(columns=tuple(HEADER.strip().split(","))))
Key = int | float | str | None
Reject = tuple[int, str, str]  # line, field, value
Found = tuple[list[tuple[object, ...]], list[Reject], int]  # rows, rejects, and how many were rejected
Criteo = tuple[FeatureSpec, list[Piece]]


def keys_of(piece: Records | Piece) -> list[Key]:
    """The order keys of a piece, which has some."""
    assert piece.keys is not None
    keys: list[Key] = piece.keys.to_pylist()
    return keys


def everything(pieces: Iterable[Records]) -> Found:
    """Records of all pieces as (labels, dense, categorical columns, keys) lists, and the rejects as (line, field, value)."""
    pieces = list(pieces)
    rows = [
        row
        for p in pieces
        for row in zip(
            p.labels[:, 0].tolist(), p.dense.tolist(), *(c.to_pylist() for c in p.categorical), keys_of(p), strict=True
        )
    ]
    return rows, [(r.line, r.field, r.value) for p in pieces for r in p.rejects], sum(p.rejected for p in pieces)


def read(path: Path, spec: FeatureSpec = SPEC, split_bytes: int = 1 << 24, block_bytes: int = 1 << 24) -> Found:
    planned = plan_text(match_files([str(path)]), spec, split_bytes)
    return everything(records for split in planned for records in read_text(split, spec, block_bytes))


GOOD = [f"{i % 2},x,{i}.5,c{i % 7},{i % 50}|{(i * 7) % 50}\n" for i in range(40)]
# Place in the file -> line put there, and the field and value that it is rejected for. Lines are put in from the top, each before what stands there.
FAULTS = {
    3: ("2,x,1,c,1\n", "y", "2"),
    9: ("1,x,abc,c,1\n", "d", "abc"),
    10: ("1,x,inf,c,1\n", "d", "inf"),
    17: ("0,x,1,c,50\n", "m", "50"),
    18: ("0,x,1,c,3|-1\n", "m", "-1"),
    22: ("0,x,1,c\n", "columns", "4"),
    23: ("0,x,1,c,3,4\n", "columns", "6"),
    30: (",x,1,c,3\n", "y", ""),
    31: ("1,x,nan,c,0x1\n", "d", "nan"),
    33: ("1,x,1,c,0x1\n", "m", "0x1"),
}
BLANK = {5, 6, 40}  # places where blank lines are put in afterwards


def faulty() -> tuple[str, list[Reject]]:
    """A file of good lines, faulty ones and blank ones, and where the faults are (the header is line 1)."""
    lines = list(GOOD)
    for at in sorted(FAULTS):
        lines.insert(at, FAULTS[at][0])
    for at in sorted(BLANK):
        lines.insert(at, "\n")
    text = [HEADER, *lines]
    located = [(text.index(line) + 1, field, value) for line, field, value in FAULTS.values()]
    return "".join(text), located


def expected_rows() -> list[tuple[object, ...]]:
    return [(float(i % 2), [i + 0.5], f"c{i % 7}", [i % 50, (i * 7) % 50], f"c{i % 7}", f"c{i % 7}") for i in range(40)]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("form", ["plain", "gzip", "zstd", "quoted"])
def test_any_cut_gives_the_same_rows_and_the_same_faults_on_their_lines(
    tmp_path: Path, newline: str, last: bool, form: str
) -> None:
    text, located = faulty()
    data = text.replace("\n", newline).removesuffix("" if last else newline).encode()
    spec = SPEC
    path = tmp_path / "log.csv"
    if form == "gzip":
        path = tmp_path / "log.csv.gz"
        data = gzip.compress(data[:100]) + gzip.compress(data[100:])  # as concatenated by many tools
    elif form == "zstd":
        path = tmp_path / "log.csv.zst"
        data = pa.compress(data, "zstd").to_pybytes()
    elif form == "quoted":
        spec = QUOTED
    path.write_bytes(data)
    sizes = [1, 7, 30, 64, 1000] if form == "plain" else [64, 100, 1000]
    for size in sizes:
        rows, rejects, rejected = read(path, spec, split_bytes=size, block_bytes=size)
        assert rows == expected_rows(), size
        assert rejects == located, size
        assert rejected == len(located)


def test_a_byte_order_mark_is_no_part_of_a_name_or_value(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" + (HEADER + "".join(GOOD)).encode())
    assert read(path)[0] == expected_rows()
    path.write_bytes(b"\xef\xbb\xbf" + "".join(GOOD).encode())
    assert read(path, HEADLESS)[0] == expected_rows()


cell = st.text("ab\"',é \r\n", max_size=4)


@settings(max_examples=60)
@given(st.lists(st.tuples(cell, cell), max_size=12), st.integers(40, 80), st.booleans())
def test_quoted_values_are_what_the_csv_module_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], block_bytes: int, newlines: bool
) -> None:
    rows = [(a, b) if newlines else (a.replace("\n", ""), b.replace("\n", "")) for a, b in rows]
    path = tmp_path_factory.mktemp("quoted") / "log.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\r\n")  # so that it quotes both
        writer.writerow(["a", "y", "b"])
        writer.writerows((a, "1", b) for a, b in rows)
    features = (Feature("a", 0, "a", "hash"), Feature("b", 1, "b", "hash"))
    spec = FeatureSpec(
        (Label("y", "y"),), (), features, (Table("a", 5), Table("b", 5)), text=TextFormat(newlines_in_values=newlines)
    )
    planned = plan_text(match_files([str(path)]), spec, 25)
    records = [r for split in planned for r in read_text(split, spec, block_bytes)]
    for place in (0, 1):
        values = [x or "" for r in records for x in r.categorical[place].to_pylist()]
        assert values == [row[place] for row in rows]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (['1,x,1,"a', 'b",1'], 2),
        (['1,x,1,"never closed,1'], 2),
        (["1,x,1,a,1", "1,x,1,a\rb,1"], 3),
        (["1,x,1,a,1", '1,x,1,a,"1'], 3),
    ],
)
def test_a_value_over_several_lines_is_refused_unless_it_is_announced(tmp_path: Path, lines: list[str], line: int) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes((HEADER + "\n".join(lines) + "\n").encode())
    with pytest.raises(SourceError, match=f"log.csv:{line}: .*newlines_in_values = true"):
        read(path)


LOG = [HEADER, *GOOD]


def with_line(number: int, line: str) -> bytes:
    """A log of good lines (the header is line 1), and another line in one's place."""
    return "".join([*LOG[: number - 1], line, *LOG[number:]]).encode()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (with_line(10, '1,x,1,c,"1\n'), 10),
        (with_line(10, '1,x,1,"c,1\n'), 10),
        (with_line(10, '1,x,1,"c ""quoted"" ,1\n'), 10),
        (with_line(10, '1,"two\nlines",1,c,"1\n'), 11),
        (with_line(41, '1,x,1,c,"1\n'), 41),
        (with_line(41, '1,x,1,c,"'), 41),
        (with_line(41, '1,x,1,c,""""'), None),
        (with_line(41, '1,x,1,c,"1""'), 41),
        (with_line(10, '1,x,1,c,"1\n').replace(b"\n", b"\r\n"), 10),
    ],
)
@pytest.mark.parametrize("block_bytes", [40, 64, 1000, 1 << 24])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_quote_that_never_closes_is_an_error_in_the_line_where_it_opens(
    tmp_path: Path, data: bytes, line: int | None, block_bytes: int, compressed: bool
) -> None:
    path = tmp_path / ("log.csv.gz" if compressed else "log.csv")
    path.write_bytes(gzip.compress(data) if compressed else data)
    if line is None:
        assert read(path, QUOTED, block_bytes=block_bytes)[1] == [(41, "m", '"')]
        return
    with pytest.raises(SourceError, match=rf"log.csv(.gz)?:{line}: the quote that opens here is never closed; close it"):
        read(path, QUOTED, block_bytes=block_bytes)


@pytest.mark.parametrize("block_bytes", [40, 1000, 1 << 24])
def test_a_value_spans_only_so_many_lines(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "log.csv"
    # A quote that opens in line 5, and one that stands in line 25 by accident, and closes it.
    path.write_bytes("".join([*LOG[:4], '1,x,1,"c,1\n', *LOG[5:24], '1,x,1,5",1\n', *LOG[25:]]).encode())
    for allowed in (1, 19, 20):
        with pytest.raises(SourceError, match=rf"log.csv:5: the quote that opens here is not closed within {allowed} lines; .*"):
            read(path, replace(SPEC, text=TextFormat(newlines_in_values=allowed)), block_bytes=block_bytes)
    for enough in (21, True):
        rows, rejects, _ = read(path, replace(SPEC, text=TextFormat(newlines_in_values=enough)), block_bytes=block_bytes)
        assert len(rows) == len(GOOD) - 21 + 1, "one value has taken the place of 21 lines"
        assert not rejects
    path.write_bytes("".join([*LOG[:4], '1,x,1,"c,1\n', *LOG[5:] * 50]).encode())
    # Allowed without a number, it may span 1,000 lines; the remedy offers ten times as many.
    with pytest.raises(SourceError, match=r"log.csv:5: the quote that opens here is not closed within 1,000 lines; .* = 10000"):
        read(path, QUOTED, block_bytes=block_bytes)


@pytest.mark.parametrize("text", [TextFormat(), TextFormat(newlines_in_values=True)])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_quote_within_a_value_is_a_character(tmp_path: Path, text: TextFormat, end: str) -> None:
    path = tmp_path / "log.csv"
    for value, meant in (('5" disk', '5" disk'), ('x"', 'x"'), ('"a\rb"', "a\rb"), ('"a"b"c', 'ab"c')):
        path.write_bytes((HEADER + f"1,x,1,{value},1\n" * 2 + f"1,x,1,{value},1" + end).encode())
        for split_bytes in (10, 1 << 24):
            rows, rejects, _ = read(path, replace(SPEC, text=text), split_bytes)
            assert [row[2] for row in rows] == [meant] * 3
            assert not rejects


def test_lines_that_are_not_utf8_are_rejected_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    good, bad, spanning = b"1,x,1,a,1\n", b'0,x,2,"\xff,2\n', b'1,x,1,"a\nb\xff\nc",1\n'
    for lines in ([bad.rstrip()], [good, bad.rstrip()], [bad, bad.rstrip()], [bad], [good, bad, good]):
        path.write_bytes(HEADER.encode() + b"".join(lines))
        for split_bytes in (1, 10, 1 << 24):
            rows, rejects, _ = read(path, split_bytes=split_bytes)
            assert len(rows) == lines.count(good)
            assert [(line, field) for line, field, _ in rejects] == [
                (number, "text") for number, line in enumerate(lines, 2) if line != good
            ]
    path.write_bytes(HEADER.encode() + good + spanning + good + b"1,x,1,\xff,1")
    for block_bytes in (40, 1 << 24):
        rows, rejects, _ = read(path, QUOTED, block_bytes=block_bytes)
        assert len(rows) == 2
        assert rejects == [(3, "text", '1,x,1,"a\nb\\xff\nc",1'), (7, "text", "1,x,1,\\xff,1")]


def test_a_row_of_empty_values_is_no_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes((HEADER + "1,x,1,a,1\n,,,,\n\n").encode())
    for spec in (SPEC, QUOTED):
        assert read(path, spec)[1:] == ([(3, "y", "")], 1)


def test_zero_bytes_behind_a_compressed_part_are_nothing(tmp_path: Path) -> None:
    data = "".join(LOG).encode()
    parts = [gzip.compress(data[:300]), gzip.compress(data[300:])]
    for number, padding in enumerate((b"\0", bytes(512), bytes(3 << 20))):
        path = tmp_path / f"{number}.csv.gz"
        path.write_bytes(parts[0] + padding + parts[1] + padding)
        assert read(path)[0] == expected_rows()
        assert read(path, block_bytes=64)[0] == expected_rows()
    for number, rest in enumerate((b"\0x", b"\0" + parts[1][:-1], b"\x1f")):
        path = tmp_path / f"bad-{number}.csv.gz"
        path.write_bytes(parts[0] + parts[1] + rest)
        with pytest.raises(SourceError, match=r"csv\.gz: cannot be read to its end"):
            read(path)


def test_a_line_that_is_not_utf8_is_told_in_ascii_and_others_keep_their_characters(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(HEADER.encode() + b"1,x,1,a\xff,1\n0,x,2,\xc3\xa9,2\n\xfe\xff,1\n")
    rows, rejects, rejected = read(path)
    assert rows == [(0.0, [2.0], "é", [2], "é", "é")]
    assert rejects == [(2, "text", "1,x,1,a\\xff,1"), (4, "text", "\\xfe\\xff,1")]
    assert rejected == 2


def test_texts_that_mean_missing_are_missing_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text("y\td\tc\tm\n1\tNULL\t\\N\t1|NULL|\n0\t 2 \t\tNULL\n")
    spec = replace(SPEC, text=TextFormat(missing=("NULL", "\\N")))
    rows, rejects, _ = read(path, spec)
    assert not rejects
    assert str(rows) == str([(1.0, [float("nan")], None, [1, None, None], None, None), (0.0, [2.0], None, [], None, None)])
    planned = plan_splits(Source("csv", (str(path),)), spec)
    (piece,) = (p for s in planned for p in read_split(s, spec))
    assert piece.samples.ids.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert piece.samples.offsets is not None
    assert piece.samples.offsets.tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert piece.keys is not None
    assert piece.keys.null_count == 2


@pytest.mark.parametrize(
    ("order_type", "keys", "bad"),
    [
        ("integer", [9, None, 10, -1], "1.5"),
        ("number", [9.0, None, 10.0, -1.0], "x"),
        ("text", ["9", None, "10", "-1"], None),
        (None, ["9", None, "10", "-1"], None),
    ],
)
def test_order_keys_have_the_type_asked_for(
    tmp_path: Path, order_type: Literal["text", "integer", "number"] | None, keys: list[Key], bad: str | None
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("y,t,a\n" + "".join(f"1,{t},a\n" for t in ["9", "", "10", "-1", bad or "x"]))
    spec = FeatureSpec((Label("y", "y"),), (), (Feature("a", 0, "a", "hash"),), (Table("a", 5),), "t", order_type)
    (records,) = (r for s in plan_splits(Source("csv", (str(path),)), spec) for r in read_records(s, spec))
    assert keys_of(records) == keys + ([] if bad else ["x"])
    assert [(r.line, r.field, r.value) for r in records.rejects] == ([(6, "t", bad)] if bad else [])


def ordered(order_type: OrderType | None = None, **text: Any) -> FeatureSpec:
    """A label y, a feature a, ordered by t. text: of the TextFormat."""
    features = (Feature("a", 0, "a", "hash"),)
    return FeatureSpec((Label("y", "y"),), (), features, (Table("a", 5),), "t", order_type, text=TextFormat(**text))


def planned_types(folder: Path, spec: FeatureSpec) -> tuple[list[OrderType | None], set[Key], list[str]]:
    """Of the files of a folder: the order_type of each split, the keys of all records, and what is said of those rejected."""
    planned = plan_splits(Source("csv", (str(folder / "*"),)), spec)
    records = [r for s in planned for r in read_records(s, spec)]
    rejects = [str(reject) for r in records for reject in r.rejects]
    return [s.order_type for s in planned], {k for r in records for k in keys_of(r)}, rejects


@pytest.mark.parametrize(
    ("first", "order_type", "keys"),
    [
        (["2017-11-07 09:30:38"], "text", {"2017-11-07 09:30:38", None}),
        (["", "NULL", "17", "-4 "], "integer", {None, 17, -4}),
        (["1", "2.5", "1e3"], "number", {1.0, 2.5, 1000.0, None}),
        (["1", "2", "0x10"], "text", {"1", "2", "0x10", None}),
        (["NULL"], None, {None}),
        (['"1\n2"', "3"], "text", {"1\n2", "3", None}),
    ],
)
def test_without_an_order_type_the_first_rows_that_have_values_tell_it(
    tmp_path: Path, first: list[str], order_type: OrderType | None, keys: set[Key]
) -> None:
    (tmp_path / "a.csv").write_text("y,t,a\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(("y,t,a\n" + "".join(f"1,{t},a\n" for t in first)).encode()))
    (tmp_path / "c.csv").write_text("t,y,a\n,1,a\n")
    told = planned_types(tmp_path, ordered(missing=("NULL",), newlines_in_values=True))
    assert told == ([order_type] * 3, keys, [])


def test_of_files_with_whole_and_other_numbers_all_are_compared_as_numbers(tmp_path: Path) -> None:
    for name, value in (("a", "17"), ("b", "1.5"), ("c", "")):
        (tmp_path / f"{name}.csv").write_text(f"y,t,a\n1,{value},a\n")
    assert planned_types(tmp_path, ordered()) == (["number"] * 3, {17.0, 1.5, None}, [])


@pytest.mark.parametrize(("first", "second"), [("2017-11-07", "17"), ("1.5", "2017-11-07")])
def test_files_with_numbers_and_with_text_in_the_column_that_orders_are_refused_unless_it_is_said(
    tmp_path: Path, first: str, second: str
) -> None:
    for name, value in (("a", first), ("b", ""), ("c", second)):
        (tmp_path / f"{name}.csv").write_text(f"y,t,a\n1,{value},a\n")
    kinds = {"17": "whole numbers", "1.5": "numbers", "2017-11-07": "text"}
    with pytest.raises(SourceError) as refused:
        planned_types(tmp_path, ordered())
    assert str(refused.value) == (
        f"order_by: column t must be of one kind, numbers, times or text, in all files; got {kinds[first]} in {tmp_path}/a.csv and "
        f"{kinds[second]} in {tmp_path}/c.csv; convert one of them"
    )
    assert planned_types(tmp_path, ordered("text")) == (["text"] * 3, {first, second, None}, [])


LATE = {
    "a first row of 2 MiB": f"1,9,{'x' * (2 << 20)}\n1,10,a\n",
    "1 MiB of blank lines": "\n" * (1 << 20) + "1,9,a\n1,10,a\n",
    "rows without a value": "1,,a\n" * 1200 + "1,9,a\n1,10,a\n",
    "rows without a value, many": "1,NULL,a\n" * 100_000 + "1,9,a\n1,10,a\n",
    "malformed rows": "1,x\n" * 1000 + "1,9,a\n1,10,a\n",
    "rows that are not UTF-8": "1,x,\udcff\n" + "1,9,a\n1,10,a\n",
}
"""The first rows of files, in which there is no value to be seen, and the first that have one."""


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("text", [{}, {"newlines_in_values": True}], ids=["lines", "line breaks"])
@pytest.mark.parametrize("what", LATE)
def test_a_file_whose_first_rows_have_no_value_is_read_on(
    tmp_path: Path, what: str, text: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreload.pipelines.sources.text.SPLIT_BYTES", 1 << 18)  # so that there are several blocks
    data = ("y,t,a\n" + LATE[what]).encode(errors="surrogateescape")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    types, keys, _ = planned_types(tmp_path, ordered(missing=("NULL",), **text))
    assert (set(types), keys - {None}) == ({"integer"}, {9, 10})


def test_the_first_values_that_are_found_tell_the_type(tmp_path: Path) -> None:
    nothing = "1,,a\n" * 1200
    (tmp_path / "a.csv").write_text("y,t,a\n" + nothing)
    assert planned_types(tmp_path, ordered()) == ([None], {None}, [])
    (tmp_path / "b.csv").write_text("y,t,a\n" + nothing + "1,9.5,a\n")
    assert planned_types(tmp_path, ordered()) == (["number"] * 2, {None, 9.5}, [])
    (tmp_path / "c.csv").write_text("y,t,a\n" + nothing + "1,noon,a\n")
    with pytest.raises(SourceError, match=r"got numbers in .*b\.csv and text in .*c\.csv"):
        planned_types(tmp_path, ordered())


NO_BREAKS = ["\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
"""Characters at which Python cuts lines, and no reader of delimited files does."""


@pytest.mark.parametrize("quoting", [True, False])
@pytest.mark.parametrize("character", NO_BREAKS, ids=ascii)
def test_rows_end_at_line_breaks_alone(tmp_path: Path, character: str, quoting: bool) -> None:
    values = [f'"x{character}y"' if quoting else f"x{character}y", f"{character}z", f"z{character}"]
    rows = "".join(f"1,{t},{values[t % 3]}\n" for t in range(8, 12))
    (tmp_path / "log.csv").write_bytes(("y,t,a\n" + rows).encode())
    assert planned_types(tmp_path, ordered(quoting=quoting)) == (["integer"], {8, 9, 10, 11}, [])


def test_a_long_field_hides_no_number(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("y,t,a\n" + f"1,17,{'x' * 200_000}\n" + f'1,4,"{"x" * 200_000}"\n')
    assert planned_types(tmp_path, ordered()) == (["integer"], {17, 4}, [])


@pytest.mark.parametrize("before", ["\n", "\r\n", "\n\n\r\n", "\ufeff\n", "\ufeff"])
def test_blank_lines_before_the_header_are_skipped(tmp_path: Path, before: str) -> None:
    (tmp_path / "log.csv").write_bytes(f"{before}y,t,a\n1,7,a\n1,x,a\n\n1,8,b\n".encode())
    types, keys, rejects = planned_types(tmp_path, ordered("integer"))
    assert (types, keys) == (["integer"], {7, 8})
    (reject,) = rejects
    assert f"log.csv:{before.count(chr(10)) + 3}: t: " in reject


@pytest.mark.parametrize(
    ("begins", "fields"),
    [
        ('"a,b",c\n', ["a,b", "c"]),
        ("\ufeffa,c\n", ["a", "c"]),
        ("\n\r\na,\n", ["a", ""]),
        ('"a\nb",c,d\n', ["a\nb", "c", "d"]),
        ("a\u2028b,c", ["a\u2028b", "c"]),
        ("", []),
    ],
)
def test_the_first_row_is_cut_as_all_others_are(tmp_path: Path, begins: str, fields: list[str]) -> None:
    (tmp_path / "log.csv").write_bytes(begins.encode())
    assert first_row(str(tmp_path / "log.csv"), TextFormat(delimiter=",")) == fields


def test_pieces_are_equal_parts_of_at_most_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreload.pipelines.sources.text.PIECE_ROWS", 16)
    text, located = faulty()
    path = tmp_path / "log.csv"
    path.write_text(text)
    (split,) = plan_text(match_files([str(path)]), SPEC)
    pieces = list(read_text(split, SPEC))
    # 48 lines have five fields and make three pieces of 16; those of other lengths come on top, to the piece before or after them.
    assert len(pieces) == 3
    assert max(len(p) + p.rejected for p in pieces) <= 20
    assert everything(pieces)[:2] == (expected_rows(), located)


def test_a_file_without_a_row_gives_nothing(tmp_path: Path) -> None:
    for name, content in (("header.csv", HEADER), ("blank.csv", HEADER + "\n\n"), ("none.csv.gz", HEADER)):
        path = tmp_path / name
        path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
        assert read(path) == ([], [], 0)


def test_only_so_many_rejects_are_kept_but_all_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "3,x,1,a,1\n" * 300 + "1,2\n" * 200)
    rows, rejects, rejected = read(path)
    assert (rows, len(rejects), rejected) == ([], 100, 500)


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    def message(path: Path | str, spec: FeatureSpec = SPEC) -> str:
        with pytest.raises(SourceError) as caught:
            [r for s in plan_splits(Source("csv", (str(path),)), spec) for r in read_records(s, spec)]
        text = str(caught.value)
        assert "\n" not in text
        return text

    assert "no file matches" in message(tmp_path / "*.csv")
    (tmp_path / "a.csv").write_text("y,d,m\n")
    assert "a.csv: no column 'c' among its header: y, d, m" in message(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("y,d,m,c,c\n")
    assert "b.csv: more than one column 'c'" in message(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text("")
    assert "no column 'y' among its header: none" in message(tmp_path / "c.csv")
    whole = gzip.compress((HEADER + "".join(GOOD)).encode())
    (tmp_path / "d.csv.gz").write_bytes(whole[:-30])
    assert "d.csv.gz: cannot be read to its end" in message(tmp_path / "d.csv.gz")
    (tmp_path / "e.csv.gz").write_text(HEADER)
    assert "e.csv.gz: is text, not gzip; check --format and the file's name" in message(tmp_path / "e.csv.gz")
    (tmp_path / "f.csv").mkdir()
    assert "f.csv: cannot be opened" in message(tmp_path / "f.csv")
    assert "nowhere://x" in message("nowhere://x")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    def message(name: str, content: bytes, spec: FeatureSpec = SPEC) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(SourceError) as caught:
            plan_splits(Source("csv", (str(path),)), spec)
        text = str(caught.value)
        assert text.isprintable()
        assert len(text) < 2000
        return text

    text = (HEADER + "".join(GOOD)).encode()
    parquet = io.BytesIO()
    pq.write_table(pa.table({"y": [1], "d": [1.5], "c": ["a"], "m": [[1]]}), parquet)
    for spec in (SPEC, HEADLESS):
        assert "a.csv: is Parquet, not text; check --format and" in message("a.csv", parquet.getvalue(), spec)
        assert "or give --format parquet" in message("a.csv", parquet.getvalue(), spec)
        assert "b.csv: is gzip, not text; " in message("b.csv", gzip.compress(text), spec)
        assert "a name that ends in .zst" in message("c.csv", pa.compress(text, "zstd").to_pybytes(), spec)
        assert "d.csv: is bzip2, not text" in message("d.csv", bz2.compress(text), spec)
        assert "e.csv: is xz, not text" in message("e.csv", lzma.compress(text), spec)
        assert "f.csv: is UTF-16, not text; check --format and the file's name, or convert it to UTF-8" in message(
            "f.csv", text.decode().encode("utf-16"), spec
        )
        assert "g.csv.gz: is zstd, not gzip" in message("g.csv.gz", pa.compress(text, "zstd").to_pybytes(), spec)
        assert "h.csv.zst: is gzip, not zstd" in message("h.csv.zst", gzip.compress(text), spec)
    noise = np.random.default_rng(1).bytes(300_000).replace(b"\n", b"")
    assert "i.csv: no column 'y' among its header: " in message("i.csv", noise.replace(b'"', b""))
    assert "i.csv: no column 'y' among its header: " in message("i.csv", b'"' + noise.replace(b'"', b"").replace(b",", b""))
    assert "i.csv:3: the header cannot be split into names" in message("i.csv", b'\n\r\n"y",a\rb\n')
    # Names may begin like anything.
    for name in ("ORC", "PAR1", "BZh", "ARROW1"):
        (tmp_path / "j.csv").write_bytes(text.replace(b"unused", name.encode()).replace(b"y,", b"", 1))
        assert "no column 'y' among its header: " + name in message("j.csv", (tmp_path / "j.csv").read_bytes())


def test_a_quote_that_never_closes_in_the_column_that_orders(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + '1,x,1,"' + "c,1\n1,x,1," * 20_000)
    for spec in (SPEC, QUOTED):
        with pytest.raises(SourceError, match=r"log\.csv:2: "):
            read(path, spec)


def test_files_come_in_the_order_of_patterns_and_then_of_paths(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "c.csv"):
        (tmp_path / name).write_text(HEADER + "".join(GOOD))
    files = match_files([str(tmp_path / "c.csv"), str(tmp_path / "[ab].csv")])
    assert [(f.path[-5:], f.size_bytes) for f in files] == [
        (n, (tmp_path / n).stat().st_size) for n in ("c.csv", "a.csv", "b.csv")
    ]
    planned = plan_splits(Source("csv", tuple(str(tmp_path / p) for p in ("c.csv", "[ab].csv"))), SPEC)
    assert [(s.path[-5:], s.file_index, s.split_index) for s in planned] == [("c.csv", 0, 0), ("a.csv", 1, 0), ("b.csv", 2, 0)]


def test_a_source_says_what_is_wrong_with_it() -> None:
    for source, message in (
        (("tsv", ("x",)), "format: must be one of"),
        (("csv",), "needs at least one file"),
        (("synthetic", ("x",)), "synthetic data has no files"),
        (("synthetic",), "at least 1 row"),
    ):
        with pytest.raises(SourceError, match=message):
            Source(*source)


@pytest.fixture(scope="module")
def criteo(data: Path) -> Criteo:
    spec = FeatureSpec.criteo()
    planned = plan_splits(Source("criteo", (str(data / "criteo" / "train.tsv"),)), spec)
    return spec, [p for s in planned for p in read_split(s, spec)]


def test_criteo_is_read_as_the_reference_reads_it(data: Path, criteo: Criteo) -> None:
    spec, pieces = criteo
    samples = Samples.concat([p.samples for p in pieces])
    log = reference.Log(
        (reference.Label("label", "label"),),
        tuple(reference.Dense(d.name, d.column, d.transform) for d in spec.dense),
        tuple(reference.Feature(f.name, f.table, f.column, f.encoding) for f in spec.features),
        tuple(reference.Table(t.name, t.rows) for t in spec.tables),
        columns=spec.text.columns,
        delimiter="\t",
        quoting=False,
    )
    expected = reference.load(log, [data / "criteo" / "train.tsv"]).training
    assert np.array_equal(samples.labels, expected.labels)
    assert np.array_equal(samples.dense, expected.dense)
    assert np.array_equal(samples.ids, np.concatenate([ids for bags in expected.bags for ids in bags]))


def test_criteo_in_small_splits_or_compressed_is_the_same(data: Path, criteo: Criteo, tmp_path: Path) -> None:
    spec, pieces = criteo
    whole = Samples.concat([p.samples for p in pieces])
    raw = (data / "criteo" / "train.tsv").read_bytes()
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(raw, 1))
    cut = plan_text([File(str(data / "criteo" / "train.tsv"), len(raw))], spec, 200_000)
    packed = plan_splits(Source("criteo", (str(tmp_path / "train.tsv.gz"),)), spec)
    assert len(cut) == 9
    for planned in (cut, packed):
        again = Samples.concat([p.samples for s in planned for p in read_split(s, spec)])
        for name in ("labels", "dense", "ids"):
            assert np.array_equal(getattr(again, name), getattr(whole, name))


def test_talkingdata_is_read_as_the_csv_module_reads_it(data: Path) -> None:
    path = data / "talkingdata" / "train_sample.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("..ip", "app", "device", "os", "channel")
    features = tuple(Feature(n.strip("."), k, n, "id") for k, n in enumerate(names))
    spec = FeatureSpec(
        (Label("is_attributed", "is_attributed"),), (), features, tuple(Table(f.name, 400_000) for f in features), "click_time"
    )
    for size in (splits.PIECE_ROWS, 1 << 24):
        planned = plan_text(match_files([str(path)]), spec, size)
        records = [r for s in planned for r in read_text(s, spec)]
        assert [x for r in records for x in keys_of(r)] == [row["click_time"] for row in rows]
        for place, name in enumerate(names):
            values = np.concatenate([r.categorical[place].to_numpy() for r in records])
            assert np.array_equal(values, np.array([int(row[name]) for row in rows]))


def test_a_stream_that_returns_less_than_asked_is_read_whole() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None
            return super().read(min(size, 3))

    assert _read_exactly(Slow(b"0123456789"), 8, "x") == b"01234567"
