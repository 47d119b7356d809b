"""Odd text files: the reader of the exported model.py gives the records that `predict` reads, or both refuse, in one line that names the file."""

from __future__ import annotations

import gzip
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foreload.base.errors import ForeloadError
from foreload.pipelines.samples.features import Feature, FeatureSpec, Table, TextFormat
from foreload.pipelines.sources import Source, plan_splits, read_records
from foreload.trainer.serving import standalone

HEAD = b"a,b\n"
ODD = {
    "nothing": b"",
    "a mark alone": b"\xef\xbb\xbf",
    "blank lines": b"\n\n\r\n",
    "a header alone": HEAD,
    "a column twice": b"a,b,a\n1,2,3\n",
    "another header": b"a,c\n1,2\n",
    "a header in quotes": b'"a","b"\n1,2\n',
    "spaces in the header": b"a, b\n1,2\n",
    "text behind a quote": HEAD + b'"x"y,1\n"x"y"z",1\n"x""y"z,1\n',
    "text before a quote": HEAD + b'x"y,1\n "x",1\n""x,1\n',
    "quotes alone": HEAD + b'"""",1\n"",1\n""""","\n',
    "a quote never closed": HEAD + b'1,2\n"x,1\n1,2\n',
    "a quote in the last field never closed": HEAD + b'1,2\n1,"x\n',
    "a quote at the end": HEAD + b'1,2\n1,"',
    "a quote that a later one closes": HEAD + b'1,"x\n3,"y"\n',
    "a line break in quotes": HEAD + b'"x\ny",1\n3,4\n',
    "many line breaks in quotes": HEAD + b'"' + b"\n" * 1200 + b'",1\n3,4\n',
    "a carriage return": HEAD + b"x\ry,1\n3,4\n",
    "a carriage return in quotes": HEAD + b'"x\ry",1\n3,4\n',
    "two carriage returns at the end": HEAD + b"1,2\n3,4\r\r",
    "carriage returns at line ends": b"a,b\r\n1,2\r\n3,4\r\n",
    "two carriage returns at line ends": b"a,b\n1,2\r\r\n3,4\n",
    "a carriage return at the end": HEAD + b"1,2\n3,4\r",
    "carriage returns alone": b"a,b\r1,2\r3,4\r",
    "NUL": HEAD + b'x\0y,1\n"x\0",2\n',
    "other breaks": HEAD + "x\v\fy,\x1c\u2028\x85\n".encode(),
    "no UTF-8": HEAD + b"1,2\n\xff,3\n",
    "a field too few": HEAD + b"1,2\n3\n",
    "a field too many": HEAD + b"1,2,\n",
    "a line of spaces": HEAD + b" \n1,2\n",
    "no line break at the end": HEAD + b"1,2",
}


def read(path: Path, text: TextFormat) -> list[tuple[Any, ...]] | str:
    """What `predict` reads, or why it does not."""
    spec = FeatureSpec(
        (), (), (Feature("a", 0, "a", "hash"), Feature("b", 1, "b", "hash")), (Table("a", 9), Table("b", 9)), text=text
    )
    rows: list[tuple[Any, ...]] = []
    try:
        for split in plan_splits(Source("csv", (str(path),)), spec):
            for records in read_records(split, spec):
                if records.rejects:
                    return str(records.rejects[0])
                rows += zip(*(column.fill_null("").to_pylist() for column in records.categorical), strict=True)
    except ForeloadError as error:
        return str(error)
    return rows


def read_alone(path: Path, text: TextFormat) -> list[tuple[str, ...]] | str:
    """What model.py reads, or why it does not."""
    features = [{"column": "a"}, {"column": "b"}]
    try:
        records = list(standalone.read_csv(str(path), {"text": asdict(text), "headers": [], "dense": [], "features": features}))
    except ValueError as error:
        return str(error)
    return [(record["a"], record["b"]) for record in records]


@pytest.mark.parametrize(
    "text",
    [TextFormat(), TextFormat(newlines_in_values=True), TextFormat(newlines_in_values=3), TextFormat(quoting=False)],
    ids=["lines", "line breaks", "three lines", "no quotes"],
)
@pytest.mark.parametrize("what", ODD)
def test_odd_files_are_read_alike_or_refused_by_both(tmp_path: Path, what: str, text: TextFormat) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(ODD[what])
    wanted, got = read(path, text), read_alone(path, text)
    if not isinstance(wanted, str):
        assert got == wanted
        return
    assert isinstance(got, str), got
    assert str(path) in got
    assert len(got.splitlines()) == 1


@pytest.mark.parametrize("name", ["log.csv.gz", "log.csv.zst"])
@pytest.mark.parametrize(
    "content",
    [b"a,b\n1,2\n", b"", gzip.compress(b"a,b\n1,2\n", mtime=0)[:-4], b"\x1f\x8b\x08broken"],
    ids=["text", "nothing", "cut off", "damaged"],
)
def test_what_is_not_compressed_as_its_name_says_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert isinstance(read(path, TextFormat()), str)
    told = read_alone(path, TextFormat())
    assert isinstance(told, str)
    assert str(path) in told
