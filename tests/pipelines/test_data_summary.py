"""What prepare tells of the data equals what a plain count finds; rejects are summed up, most frequent first, with what would help."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreload.pipelines import prepare
from foreload.pipelines.errors import RecordError
from foreload.pipelines.planning.data_summary import data_lines
from foreload.pipelines.samples.convert import (
    MOST_CAUSES,
    add_causes,
    by_frequency,
    remedy,
    summed_up,
)
from foreload.pipelines.samples.features import (
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
    TextFormat,
)
from foreload.pipelines.samples.records import Cause

FEATURES = """
label = "clicked"
order_by = "time"
order_type = "integer"
[[dense]]
name = "price"
transform = "{transform}"
[[feature]]
name = "word"
encoding = "vocabulary"
min_count = 3
[[feature]]
name = "ad"
encoding = "id"
rows = 100
[[feature]]
name = "tags"
encoding = "id"
rows = 30
pooling = "sum"
[[feature]]
name = "site"
rows = 1000000
"""
COLUMNS = ("clicked", "time", "price", "word", "ad", "tags", "site")
Rows = list[dict[str, str]]


def write(path: Path, rows: Rows) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def clicks(count: int, seed: int) -> Rows:
    """Rows in which values are missing here and there."""
    draw = random.Random(seed)

    def some(value: str) -> str:
        return "" if draw.random() < 0.1 else value

    def tags() -> str:
        return "|".join(some(str(draw.randrange(30))) for _ in range(draw.randrange(4)))

    return [
        {
            "clicked": str(int(draw.random() < 0.3)),
            "time": str(draw.randrange(1000)),
            "price": some(str(draw.randrange(50))),
            "word": some(f"w{int(draw.paretovariate(0.7))}"),
            "ad": some(str(draw.randrange(100))),
            "tags": tags(),
            "site": some(f"s{draw.randrange(9)}"),
        }
        for _ in range(count)
    ]


def run(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """Prepare; returns the summary, as --json has it."""
    out = tmp_path / "out"
    options = (f"--out={out}", f"--json={tmp_path / 'told.json'}", "--format=csv", "--batch-size=64", "--lanes=2", "--slots=300")
    prepare.run([*options, *map(str, arguments)])
    told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
    return told


def expected(rows: Rows, known: set[str]) -> dict[str, Any]:
    """What is told of rows, where the vocabulary has known words."""
    tags = [tag for row in rows for tag in row["tags"].split("|")]
    missing = {name: sum(not row[name] for row in rows) for name in ("price", "word", "ad", "site")}
    return {
        "samples": len(rows),
        "label_rate": sum(row["clicked"] == "1" for row in rows) / len(rows),
        "columns": [
            {"name": "price", "values": len(rows), "missing": missing["price"]},
            {
                "name": "word",
                "table": "word",
                "values": len(rows),
                "missing": missing["word"],
                "unknown": sum(bool(row["word"]) and row["word"] not in known for row in rows),
            },
            {"name": "ad", "table": "ad", "values": len(rows), "missing": missing["ad"]},
            {"name": "tags", "table": "tags", "values": len(tags), "missing": sum(set(row["tags"]) <= {"|"} for row in rows)},
            {"name": "site", "table": "site", "values": len(rows), "missing": missing["site"]},
        ],
    }


def test_what_is_told_of_the_data_is_what_a_plain_count_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, other = [clicks(500, 1), clicks(300, 2)], clicks(200, 3)
    logs = [write(tmp_path / f"{k}.csv", rows) for k, rows in enumerate(parts)]
    features = tmp_path / "features.toml"
    features.write_text(FEATURES.format(transform="standard"))
    told = run(tmp_path, *logs, "--features", features, "--eval-source", write(tmp_path / "other.csv", other))
    rows = parts[0] + parts[1]
    words = Counter(row["word"] for row in rows if row["word"])
    known = {word for word, count in words.items() if count >= 3}
    assert told["data"] == {"training": expected(rows, known), "evaluation": expected(other, known)}
    tags = {tag or "0" for row in rows for tag in row["tags"].split("|")}
    assert told["tables"] == [
        {"name": "word", "rows": len(known) + 2},
        {"name": "ad", "rows": len({row["ad"] or "0" for row in rows})},
        {"name": "tags", "rows": len(tags)},
        {"name": "site", "rows": 10},
    ]
    lines = capsys.readouterr().out.splitlines()
    rate = told["data"]["training"]["label_rate"]
    assert any(line.startswith(f"labels        {rate:.2%}, ") and line.endswith(" of --eval-source are 1") for line in lines)
    assert any(line.startswith("missing       tags ") and "price" in line for line in lines)
    assert any(line.startswith("unknown       word ") and line.endswith(" of --eval-source") for line in lines)
    assert any(line.startswith("distinct ids  ad 100, ") for line in lines)


def test_rejects_are_summed_up_with_the_line_that_would_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = clicks(400, 4)
    for k in range(40):
        rows[k * 7]["price"] = "\\N"
    for k in range(12):
        rows[k * 7 + 1]["ad"] = "none yet"
    rows[2]["ad"], rows[3]["clicked"], rows[4]["time"] = "100", "N/A", "N/A"
    log = write(tmp_path / "log.csv", rows)
    with log.open("ab") as file:
        file.write(b"1,2\n\xff,1,1,a,1,1,a\n")
    features = tmp_path / "features.toml"
    features.write_text(FEATURES.format(transform="log"))
    with pytest.raises(RecordError) as caught:
        run(tmp_path, log, "--features", features)
    assert "\n" not in str(caught.value)
    assert "log.csv:2: price: a dense value must be a finite number within float32, not '\\\\N'; " in str(caught.value)
    most = "price '\\\\N' 40 times, ad 'none yet' 12 times, ad '100' 1 time, clicked 'N/A' 1 time, columns '2' 1 time, 2 others"
    line = 'missing = ["\\\\N", "none yet", "N/A"] under [text] of the feature file'
    assert str(caught.value).endswith(f"; of those read: {most}; if these stand for missing values, write {line}")
    told = run(tmp_path, log, "--features", features, "--max-rejects", "100")
    # 40 prices, 12 + 1 ads, a label, a time, and two lines at the end: one of two columns, one that is not UTF-8.
    assert told["rejected"] == sum(cause["records"] for cause in told["malformed"]) == 57
    assert told["malformed"][0] == {
        "column": "price",
        "value": "\\N",
        "rule": "a dense value must be a finite number within float32",
        "records": 40,
    }
    out = capsys.readouterr().out
    assert f"malformed     {most}\n              if these stand for missing values, write {line}\n" in out
    # With these two texts for missing values, the other five records are malformed still.
    missing = line.partition(" under")[0].replace(', "N/A"', "")
    features.write_text(FEATURES.format(transform="log") + f"[text]\n{missing}\n")
    told = run(tmp_path, log, "--features", features, "--max-rejects", "100", "--overwrite")
    assert told["rejected"] == 5
    assert told["data"]["training"]["columns"][0]["missing"] >= 40


def warned(
    tmp_path: Path, features: str, columns: Mapping[str, Sequence[Any]], *options: str
) -> tuple[list[str], dict[str, Any]]:
    """What `prepare` warns of, and its summary. columns: those of a Parquet file."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "features.toml").write_text(features)
    pq.write_table(pa.table({"y": [0, 1] * (len(next(iter(columns.values()))) // 2), **columns}), tmp_path / "log.parquet")
    out = (
        f"--out={tmp_path / 'out'}",
        f"--json={tmp_path / 'told.json'}",
        "--slots=min",
        "--batch-size=8",
        f"--features={tmp_path / 'features.toml'}",
    )
    prepare.run([str(tmp_path / "log.parquet"), "--format=parquet", *out, *options])
    told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
    return told["warnings"], told


def test_values_that_a_transform_clips_are_told_and_warned_of_beyond_one_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = 'label = "y"\n' + "".join(
        f'[[dense]]\nname = "{name}"\ntransform = "{transform}"\n'
        for name, transform in (("few", "log"), ("many", "log"), ("standard", "standard"), ("none", "none"))
    )
    features += '[[feature]]\nname = "a"\nrows = 9\n'
    few = [-1.0, *[1.0] * 99, *[None] * 100]
    many = [-1.0, -2.0, *[0.0] * 98, *[None] * 100]
    below = [-1.0] * 200
    told: dict[str, Any] = {"few": few, "many": many, "standard": below, "none": below, "a": ["x"] * 200}
    warnings, summary = warned(tmp_path, features, told)
    line = 'dense many: 2 of 100 (2.00%) values are negative, and transform = "log" reads them as 0; give it transform = "standard" or "none"'
    assert warnings == [line]
    columns = {column["name"]: column for column in summary["data"]["training"]["columns"]}
    assert (columns["few"]["clipped"], columns["many"]["clipped"]) == (1, 2)
    assert "clipped" not in columns["none"]
    printed = capsys.readouterr()
    assert "clipped       many 1.00%, few 0.50%\n" in printed.out
    assert printed.err.endswith(f"foreload: warning: {line}\n")


def test_odd_numbers_are_warned_of_with_counts(tmp_path: Path) -> None:
    features = 'label = "y"\ngroup = "g"\n' + "".join(
        f'[[feature]]\nname = "{name}"\nrows = 99\n' for name in ("text", "large", "small")
    )
    columns: dict[str, Any] = {
        "text": ["1e+05", "2.5e17", "12e34567", "abc", "26.0", "1e5", "", "x"],
        "large": pa.array([2.0**53, 2.0**60, 1.0, 2.0, None, 3.0, 4.0, 5.0]),
        "small": pa.array([2.0**24 - 1] * 8, pa.float32()),
        "g": pa.array([2.0**24] * 8, pa.float32()),
    }
    (text, large, group), _ = warned(tmp_path, features, columns)
    assert text.startswith(
        "feature text: 3 of 7 values are numbers written with an exponent, such as 1e+05, and encoded as text;"
    )
    assert large.startswith("feature large: 2 of 7 values are floats of at least 2^53 (float32: 2^24), ")
    assert group.startswith("group: 8 of 8 values are floats of at least 2^53")


@pytest.mark.parametrize("separator", ["|", " ", "::"])
def test_a_separator_that_never_occurs_is_told_with_the_one_that_does(tmp_path: Path, separator: str) -> None:
    features = f'label = "y"\n[[feature]]\nname = "tags"\nrows = 99\npooling = "mean"\nseparator = "{separator}"\n'
    fields = ["a,b", "c,d,e", "f", "", "g,h", "i"]
    (line,), _ = warned(tmp_path / "wrong", features, {"tags": fields})
    said = f"feature tags: its separator {separator!r} is in none of 5 fields, and ',' is in 3 of them; "
    assert line == said + 'check separator, or give it pooling = "single"'
    # It does occur, if only once; most fields have one value; there are lists.
    assert warned(tmp_path / "once", features, {"tags": [*fields, "j" + separator + "k", "l"]})[0] == []
    assert warned(tmp_path / "few", features, {"tags": ["a", "b", "c,d", "e"]})[0] == []
    assert warned(tmp_path / "lists", features, {"tags": [["a,b"], ["c,d"]]})[0] == []


def test_a_feature_of_whole_numbers_and_text_is_told(tmp_path: Path) -> None:
    features = 'label = "y"\n[[feature]]\nname = "a"\nrows = 99\n'
    warned(tmp_path / "numbers", features, {"a": [26, 7, 8, 9]})
    table = pa.table({"y": [0, 1], "a": ["26", "7.0"]})
    pq.write_table(table, tmp_path / "numbers" / "texts.parquet")
    more = [str(tmp_path / "numbers" / "texts.parquet"), "--overwrite"]
    (line,), told = warned(tmp_path / "numbers", features, {"a": [26, 7, 8, 9]}, *more)
    assert line == "feature a: 4 values are whole numbers and 2 are text, depending on the file; both count as the same value"
    assert told["tables"] == [{"name": "a", "rows": 4}]


def test_only_what_may_be_missing_is_taken_for_missing() -> None:
    features = (Feature("ad", 0, "ad_id", "id"), Feature("word", 1, "word", "hash"))
    spec = FeatureSpec(
        (Label("y", "y"),),
        (Dense("d", "d", "log"),),
        features,
        (Table("ad", 9), Table("word", 9)),
        "t",
        text=TextFormat(missing=("x",)),
    )

    def line(field: str, value: str, count: int = 1) -> str | None:
        return remedy([(Cause(field, value, "rule"), count)], spec)

    helps = 'missing = ["x", {}] under [text] of the feature file'
    assert line("d", "NULL") == line("ad_id", "NULL") == line("t", "NULL") == helps.format('"NULL"')
    assert line("ad_id", "-1") == helps.format('"-1"')
    assert line("d", 'a "quoted" é', 10) == helps.format('"a \\"quoted\\" é"')
    for field, value, count in (
        ("y", "NULL", 99),
        ("text", "NULL", 99),
        ("columns", "4", 99),
        ("d", "cheap", 9),
        ("ad_id", "10", 99),
        ("d", "inf", 99),
        ("d", "", 99),
        ("d", "\x1b[2J", 99),
        ("d", "x" * 41, 99),
    ):
        assert line(field, value, count) is None, (field, value)


def test_any_number_of_causes_and_columns_takes_a_few_lines() -> None:
    causes: Counter[Cause] = Counter()
    for k in range(30_000):
        add_causes(causes, {Cause("d", str(k), "rule"): 1, Cause("d", "often", "rule"): 1})
    ordered = by_frequency(causes)
    assert len(ordered) <= MOST_CAUSES
    assert ordered[0] == (Cause("d", "often", "rule"), 30_000)
    assert len(summed_up([(Cause("d", "\n" * 80, "rule"), 2)] * 9, 100)) < 1000
    names = [f"{k}" * 20 for k in range(5000)]
    told = {
        "samples": 9,
        "label_rate": 0.5,
        "columns": [{"name": name, "values": 9, "missing": 1, "unknown": 1} for name in names],
    }
    summary = {
        "data": {"training": told, "evaluation": told},
        "tables": [{"name": name, "rows": 5} for name in names],
        "rejected": 60_000,
        "malformed": [{"column": c.field, "value": c.value, "rule": c.reason, "records": n} for c, n in ordered],
    }
    spec = FeatureSpec((Label("y", "y"),), (), (Feature("ad", 0, "ad_id", "id"),), (Table("ad", 9),))
    lines = data_lines(summary, spec)
    assert len(lines) <= 8
    assert max(map(len, lines)) < 400


@pytest.mark.parametrize(
    ("format", "delimiter", "header", "said"),
    [
        ("criteo", ",", False, "columns: a line must have 40 columns, separated by tabs (this one has commas), not '1'"),
        (
            "criteo", "\t", True,
            "log:1 looks like a header line, which files of --format criteo do not have: remove it, or give --format csv or tsv and a feature file",
        ),
        ("csv", ";", False, "columns: a line must have 40 columns, separated by commas (this one has semicolons), not '1'"),
        ("csv", ",", True, "log:1 looks like a header line: leave out columns under [text] of the feature file"),
    ],
)  # fmt: skip
def test_another_delimiter_and_a_header_line_are_recognised(
    tmp_path: Path, format: str, delimiter: str, header: bool, said: str
) -> None:
    names = ["label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27))]
    names = names if format == "criteo" else [name.lower() for name in names]
    lines = [delimiter.join(map(str, (k % 2, *range(13), *range(26)))) for k in range(20)]
    log, features = tmp_path / "log", tmp_path / "features.toml"
    log.write_text("\n".join([delimiter.join(names)] * header + lines) + "\n")
    features.write_text(f'label = "label"\n[[feature]]\nname = "c1"\nrows = 9\n[text]\ncolumns = {json.dumps(names)}\n')
    given = [] if format == "criteo" else [f"--features={features}"]
    with pytest.raises(RecordError) as caught:
        prepare.run([str(log), f"--format={format}", *given, "--batch-size=8", f"--out={tmp_path / 'out'}"])
    assert said in str(caught.value)
