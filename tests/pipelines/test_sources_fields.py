"""The reader of plain lines beside the general one: what it takes, it reads as the other does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import (
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
    TextFormat,
)
from foreload.pipelines.samples.records import RejectedRecord
from foreload.pipelines.sources.fields import Fields
from foreload.pipelines.sources.files import match_files
from foreload.pipelines.sources.text import plan_text, read_text

VALUES = ["", "0", "1", "1.5", "-3", "12345678901234567", "1e3", "2", "inf", "x", " 1"]
PLAIN_WORDS = ["", "a", "é", "abcdefghi", "7", " "]
WORDS = [*PLAIN_WORDS, '"q"', '"a"""', "\xff"]


Values = tuple[list[float], list[list[float]], list[int]]  # labels, dense values and ids of a piece
Found = tuple[list[Values], list[RejectedRecord], list[int]]


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, TextFormat]:
    """A file of lines of four fields, plain ones in half of them, and how it is to be read."""
    values = st.one_of(st.sampled_from(["0", "1"]), st.sampled_from(VALUES))
    plain = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(["row"] * 8 + ([] if plain else ["short", "long", "blank"])), max_size=12))
    texts = st.sampled_from(PLAIN_WORDS if plain else WORDS)
    line = st.tuples(values, values, texts, st.sampled_from(["", "0", "49", "x"]))
    lines = []
    for kind in kinds:
        row = draw(line)
        fields: tuple[str, ...] = {"row": row, "short": row[:-1], "long": (*row, "1"), "blank": ()}[kind]
        lines.append(b",".join(field.encode("latin-1" if field == "\xff" else "utf-8") for field in fields))
    newline = draw(st.sampled_from([b"\n", b"\r\n"]))
    data = newline.join(lines) + (newline if draw(st.booleans()) else b"")
    missing = draw(st.sampled_from([(), ("x",), ("1",)]))
    return data, TextFormat(",", ("y", "d", "c", "m"), missing=missing, quoting=draw(st.booleans()))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files(), st.integers(10, 400))
def test_plain_lines_read_as_the_general_reader_reads_them(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, file: tuple[bytes, TextFormat], split_bytes: int
) -> None:
    data, text = file
    path = tmp_path_factory.getbasetemp() / "either.csv"
    path.write_bytes(data)
    features = (Feature("c", 0, "c", "hash"), Feature("m", 1, "m", "id"))
    spec = FeatureSpec((Label("y", "y"),), (Dense("d", "d", "none"),), features, (Table("c", 1000), Table("m", 50)), text=text)

    def found() -> Found:
        pieces = [r for split in plan_text(match_files([str(path)]), spec, split_bytes) for r in read_text(split, spec)]
        samples = [Encoder(spec).encode(records) for records in pieces]
        values = [(s.labels.tolist(), s.dense.tolist(), s.ids.tolist()) for s in samples]
        return values, [record for r in pieces for record in r.rejects], [r.rejected for r in pieces]

    def outcome() -> Found | str:
        try:
            return found()
        except SourceError as error:
            return str(error)

    fast = outcome()
    with monkeypatch.context() as patch:
        patch.setattr(Fields, "of", lambda *arguments: None)
        assert outcome() == fast
