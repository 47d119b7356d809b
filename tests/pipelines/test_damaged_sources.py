"""However a file is damaged, what follows is samples with rejects, or one line: never another exception, nor what a terminal obeys."""

from __future__ import annotations

import gzip
import io
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
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
from foreload.pipelines.sources import Source, plan_splits
from foreload.pipelines.sources.splits import Format

ROWS = 200
COLUMNS = {
    "y": [k % 2 for k in range(ROWS)],
    "d": [k + 0.5 for k in range(ROWS)],
    "c": [f"c{k % 7}\n" for k in range(ROWS)],
    "m": [[k % 50, 3] for k in range(ROWS)],
    "t": [1000 - k for k in range(ROWS)],
}
TEXT = "y,d,c,m,t\n" + "".join(f'{k % 2},{k}.5,"c{k % 7}",{k % 50}|3,{1000 - k}\n' for k in range(ROWS))
SPEC = FeatureSpec(
    (Label("y", "y"),),
    (Dense("d", "d", "none"),),
    (Feature("c", 0, "c", "hash"), Feature("m", 1, "m", "id", "sum")),
    (Table("c", 1000), Table("m", 50)),
    order_by="t",
)


def parquet_bytes(compression: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(COLUMNS), sink, row_group_size=70, compression=compression)
    return sink.getvalue()


FORMS: dict[str, bytes] = {
    "a.csv": TEXT.encode(),
    "quoted.csv": TEXT.replace('"c3"', '"c\n3"').encode(),
    "a.csv.gz": gzip.compress(TEXT.encode()),
    "a.csv.zst": pa.compress(TEXT.encode(), "zstd").to_pybytes(),
    "a.parquet": parquet_bytes("snappy"),
    "plain.parquet": parquet_bytes("none"),
}


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """A file with bytes changed, removed, added, or its end cut off."""
    data = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        at, kind = draw.randrange(len(data) + 1), draw.random()
        if kind < 0.5:
            data[at : at + 1] = bytes([draw.choice([0, 10, 13, 34, 44, 255, draw.randrange(256)])])
        elif kind < 0.7:
            del data[at : at + draw.randrange(1, 40)]
        elif kind < 0.9:
            data[at:at] = bytes(draw.choices([0, 10, 13, 34, 44, 49, 200, 255], k=draw.randrange(1, 10)))
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("files", [30, pytest.param(500, marks=pytest.mark.full)])
def test_damage_ends_in_rejects_or_one_line(tmp_path: Path, name: str, files: int) -> None:
    draw = random.Random(f"{name} {files}")
    spec = replace(SPEC, text=TextFormat(newlines_in_values=name.startswith("quoted")))
    kind: Format = "parquet" if name.endswith("parquet") else "csv"
    path = tmp_path / name
    errors = []
    for _ in range(files):
        path.write_bytes(damaged(FORMS[name], draw))
        try:
            for split in plan_splits(Source(kind, (str(path),)), spec):
                for piece in read_split(split, spec):
                    assert all(0 <= i < 1000 for i in piece.samples.ids.tolist())
        except SourceError as error:
            errors.append(str(error))
    assert errors
    assert all(error.startswith(str(path)) and error.isprintable() and len(error) < 3000 for error in errors)
