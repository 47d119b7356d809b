"""Several labels, numbers, weights and groups: what files of any kind say of them is what the schedule has, and what breaks a rule is malformed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import reference_data

from foreload.pipelines import prepare
from foreload.pipelines.errors import FeatureError, RecordError, ScheduleError, SourceError
from foreload.pipelines.planning.data_summary import data_lines
from foreload.pipelines.samples.feature_file import load_features, parse
from foreload.pipelines.samples.features import Label, features_of, features_stored
from foreload.pipelines.schedule.reader import Schedule

FEATURES = """
weight = "importance"
group = "user"
[[label]]
name = "clicked"
[[label]]
name = "liked"
column = "rating"
at_least = 4
[[label]]
name = "rating"
kind = "number"
[[feature]]
name = "user"
rows = 90
[[feature]]
name = "ad"
encoding = "id"
rows = 60
[[dense]]
name = "price"
column = "importance"
transform = "standard"
"""
COLUMNS = ("clicked", "rating", "importance", "user", "ad")
FEATURE = {"name": "a", "rows": 5}


def rows(count: int, seed: int = 0) -> list[list[str]]:
    """Rows of a log, of which the users and ads may be missing."""
    draw = random.Random(seed)
    return [
        [
            draw.choice("01"),
            draw.choice(["4", "3.99", "-1e3", "0.1", "16777217"]),
            draw.choice(["0", "1", "0.3", "12.75"]),
            draw.choice(["", "anna", "Zoë", "7", "a user of a longer name"]),
            draw.choice(["", "3", "59", str(draw.randrange(60))]),
        ]
        for _ in range(count)
    ]


def written(path: Path, log: list[list[str]]) -> Path:
    """The log in the format that the name says, beside its feature file."""
    (path.parent / "features.toml").write_text(FEATURES)
    between = "\t" if path.suffix == ".tsv" else ","
    text = "".join(between.join(row) + "\n" for row in [list(COLUMNS), *log])
    if path.suffix == ".parquet":
        path.with_suffix(".csv").write_text(text)
        pq.write_table(arrow_csv.read_csv(path.with_suffix(".csv")), path, row_group_size=40)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def prepared(source: Path | None, out: Path, *further: str) -> dict[str, Any]:
    """Prepare; returns the summary. source: None where the flags say what there is."""
    flags = ["--batch-size=16", "--lanes=2", f"--out={out}", f"--features={out.parent / 'features.toml'}"]
    return prepare.run([*([] if source is None else [str(source), f"--format={source.suffix[1:]}"]), *flags, *further])


def kept(schedule: Schedule, kind: str, epoch: int = 0) -> dict[str, np.ndarray]:
    """Labels, weights and, of an evaluation, groups of all samples of an epoch by number."""
    events = [event for event in schedule.events() if event.kind == kind and event.epoch == epoch]
    parts = [schedule.lane(event, lane) for event in events for lane in range(schedule.header.lanes)]
    order = np.argsort(np.concatenate([part.numbers for part in parts]))
    names = ("labels", "weights", "groups") if kind == "evaluate" else ("labels", "weights")
    assert all((part.groups is None) == (kind == "train") for part in parts)
    return {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}


def assert_has(schedule: Schedule, kind: str, expected: reference_data.Samples, epoch: int = 0) -> None:
    for name, values in kept(schedule, kind, epoch).items():
        of_reference = getattr(expected, name)
        assert values.dtype == of_reference.dtype
        assert values.tobytes() == of_reference.tobytes(), name


@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "log.parquet"])
def test_every_format_gives_what_the_reference_reads(name: str, tmp_path: Path) -> None:
    source = written(tmp_path / name, rows(90))
    prepared(source, tmp_path / "out", "--eval-fraction=0.3", "--epochs=2", "--shuffle-seed=3")
    text = source if name == "log.tsv" else tmp_path / "log.csv"
    log = reference_data.read_features(tmp_path / "features.toml", "\t" if text is source else ",")
    data = reference_data.load(log, (text,), (), 0.3)
    schedule = Schedule(tmp_path / "out")
    assert_has(schedule, "evaluate", data.evaluation)
    for epoch in range(2):
        assert_has(schedule, "train", data.training, epoch)


def test_compiled_as_the_data_is_read_it_is_the_same(tmp_path: Path) -> None:
    source = written(tmp_path / "log.parquet", rows(90))
    prepared(source, tmp_path / "out", "--window=2", f"--eval-source={source}")
    data = reference_data.load(reference_data.read_features(tmp_path / "features.toml"), (tmp_path / "log.csv",))
    for kind in ("train", "evaluate"):
        assert_has(Schedule(tmp_path / "out"), kind, data.training)


def test_after_needs_the_same_labels_and_weights(tmp_path: Path) -> None:
    prepared(written(tmp_path / "a.csv", rows(40, 1)), tmp_path / "a")
    second = written(tmp_path / "b.csv", rows(40, 2))
    prepared(second, tmp_path / "b", f"--after={tmp_path / 'a'}", "--eval-fraction=0.25")
    log = reference_data.read_features(tmp_path / "features.toml")
    data = reference_data.load(log, (second,), (), 0.25)
    assert_has(Schedule(tmp_path / "b"), "train", data.training)
    assert_has(Schedule(tmp_path / "b"), "evaluate", data.evaluation)
    for old, new in (("at_least = 4", "at_least = 3"), ('weight = "importance"\n', ""), ('kind = "number"', "")):
        (tmp_path / "features.toml").write_text(FEATURES.replace(old, new))
        with pytest.raises(ScheduleError, match="--features: must be those of"):
            prepared(second, tmp_path / "c", f"--after={tmp_path / 'a'}")


PLAIN_FAULTS = [
    ("clicked", "2", "a label must be 0 or 1, or throughout -1 or 1"),
    ("clicked", "", "a label must be 0 or 1, or throughout -1 or 1"),
    ("rating", "", "a label must be a finite number"),
    ("importance", "", "a weight must be a finite number of at least 0 within float32"),
    ("importance", "-0.50", "a weight must be a finite number of at least 0 within float32"),
]
OTHER_FAULTS = [
    ("rating", "nan", "a label must be a finite number"),
    ("rating", "3e39", "a label must be a finite number within float32"),
    ("rating", "good", "a label must be a finite number"),
    ("importance", "inf", "a weight must be a finite number of at least 0 within float32"),
    ("importance", "1e39", "a weight must be a finite number of at least 0 within float32"),
]


@pytest.mark.parametrize("faults", [PLAIN_FAULTS, OTHER_FAULTS], ids=["plain", "other"])
def test_what_breaks_a_rule_is_malformed_and_shown_as_it_stands(faults: list[tuple[str, str, str]], tmp_path: Path) -> None:
    log = rows(30)
    for k, (column, value, _) in enumerate(faults):
        log[3 * k][COLUMNS.index(column)] = value
    source = written(tmp_path / "log.csv", log)
    with pytest.raises(RecordError) as told:
        prepared(source, tmp_path / "refused")
    column, value, rule = faults[0]
    assert f"log.csv:2: {column}: {rule}, not {value!r}" in str(told.value)
    prepared(source, tmp_path / "out", "--max-rejects=5")
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    told_faults = [(reject["line"], reject["field"], reject["value"], reject["reason"]) for reject in rejects]
    assert told_faults == [(3 * k + 2, *fault) for k, fault in enumerate(faults)]
    assert len(kept(Schedule(tmp_path / "out"), "train")["labels"]) == 25


def test_a_column_of_groups_holds_texts_or_whole_numbers(tmp_path: Path) -> None:
    log = rows(20)
    written(tmp_path / "log.parquet", log)
    table = pq.read_table(tmp_path / "log.parquet")
    users = [float(k % 4) if k % 5 else None for k in range(20)]
    floats = table.set_column(3, "user", pa.array(users, pa.float64()))
    pq.write_table(floats, tmp_path / "floats.parquet")
    prepared(tmp_path / "floats.parquet", tmp_path / "floats", f"--eval-source={tmp_path / 'floats.parquet'}")
    expected = [reference_data.hash64(str(int(u)).encode()) if u is not None else 0 for u in users]
    groups = kept(Schedule(tmp_path / "floats"), "evaluate")["groups"]
    assert groups.view(np.uint64).tolist() == expected
    users[3] = 0.5
    pq.write_table(table.set_column(3, "user", pa.array(users)), tmp_path / "fraction.parquet")
    with pytest.raises(RecordError, match=r"fraction.parquet:4: user: .* must be a text or a whole number, not '0.5'"):
        prepared(tmp_path / "fraction.parquet", tmp_path / "fraction")
    (tmp_path / "features.toml").write_text(FEATURES.replace('group = "user"', 'group = "users"'))
    lists = table.append_column("users", pa.array([["a"]] * 20))
    pq.write_table(lists, tmp_path / "lists.parquet")
    with pytest.raises(SourceError, match="column users holds lists; group needs a column of single values"):
        prepared(tmp_path / "lists.parquet", tmp_path / "lists")


def test_the_summary_tells_what_a_plain_count_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = rows(200, 5)
    summary = prepared(written(tmp_path / "log.csv", log), tmp_path / "out", f"--eval-source={tmp_path / 'log.csv'}")
    told = summary["data"]["training"]
    ratings, weights = (np.array([row[k] for row in log], np.float32).astype(np.float64) for k in (1, 2))
    clicked, liked, rating = told["labels"]
    assert clicked == {"name": "clicked", "rate": sum(row[0] == "1" for row in log) / 200}
    assert liked == {"name": "liked", "rate": np.count_nonzero(ratings >= 4) / 200}
    assert (rating["name"], rating["least"], rating["largest"]) == ("rating", ratings.min(), ratings.max())
    assert (rating["mean"], rating["deviation"]) == (pytest.approx(ratings.mean()), pytest.approx(ratings.std()))
    assert told["weights"] == {"sum": math.fsum(weights), "least": 0.0, "largest": 12.75}
    assert summary["data"]["evaluation"] == told
    out = capsys.readouterr().out
    line = f"labels        clicked {clicked['rate']:.2%}, liked {liked['rate']:.2%}"
    assert f"{line} are 1\nnumbers       rating " in out
    assert f"{line} of --eval-source are 1\nnumbers       rating " in out
    assert "-1000 to 1.67772e+07\nweights       " in out


def test_any_number_of_labels_takes_a_few_lines() -> None:
    labels = [{"name": f"{k}" * 60, "rate": 0.5} for k in range(999)]
    labels += [{"name": f"{k}" * 60, "mean": 0.5, "deviation": 1.0, "least": 0.0, "largest": 1.0} for k in range(999)]
    told = {"samples": 9, "labels": labels, "columns": []}
    lines = data_lines({"data": {"training": told}, "tables": [], "malformed": []}, parse({"label": "y", "feature": [FEATURE]}))
    assert len(lines) == 2
    assert all("and 994 more" in line and len(line) < 600 for line in lines)


def test_one_label_is_the_same_schedule_however_it_is_written(tmp_path: Path) -> None:
    source = written(tmp_path / "log.csv", rows(60))
    features = '[[feature]]\nname = "user"\nrows = 90\n'
    for out, label in (
        ("line", 'label = "rating"\nlabel_at_least = 4\n'),
        ("entry", '[[label]]\nname = "rating"\nat_least = 4\n'),
    ):
        (tmp_path / "features.toml").write_text(label + features)
        prepared(source, tmp_path / out, "--eval-fraction=0.2")
    line, entry = Schedule(tmp_path / "line"), Schedule(tmp_path / "entry")
    assert line.checksum == entry.checksum
    header = json.loads((tmp_path / "line" / "header.json").read_bytes())["features"]
    assert header == {
        "dense": [],
        "features": [
            {
                "column": "user",
                "encoding": "hash",
                "min_count": 1,
                "name": "user",
                "pooling": "single",
                "separator": "|",
                "table": 0,
            }
        ],
        "label": "rating",
        "label_at_least": 4,
        "order_by": None,
        "order_type": None,
        "rule": 2,
        "tables": [{"dimension": None, "name": "user", "rows": 90}],
        "text": {"columns": [], "delimiter": None, "missing": [], "newlines_in_values": False, "quoting": True},
    }
    with pa.memory_map(str(tmp_path / "line" / "evaluation-000000-00.arrow")) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    assert batch.schema.names == ["labels", "dense", "index", "numbers", "users"]


@pytest.mark.parametrize(
    "document",
    [
        {"label": "y"},
        {"label": "y", "label_at_least": 3.5},
        {"label": "y", "label_kind": "number"},
        {"label": "y", "weight": "w"},
        {"label": "y", "group": "g"},
        {"label": [{"name": "y"}, {"name": "z", "column": "y", "kind": "number"}], "weight": "w", "group": "g"},
    ],
    ids=str,
)
def test_a_spec_survives_json_and_earlier_versions_refuse_what_they_do_not_know(document: dict[str, Any]) -> None:
    spec = parse(document | {"feature": [FEATURE]})
    told = json.loads(json.dumps(features_stored(spec)))
    assert features_of(told) == spec
    known = set(document) <= {"label", "label_at_least"}
    assert ("label" in told, "labels" in told, "weight" in told, "group" in told) == (known, not known, not known, not known)
    without = spec.unlabelled()
    assert (without.labels, without.weight, without.group, without.columns) == ((), None, None, ("a",))
    assert features_of(features_stored(without)) == without


def test_labels_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "features.toml").write_text(FEATURES)
    spec = load_features(tmp_path / "features.toml")
    assert spec.labels == (Label("clicked", "clicked"), Label("liked", "rating", at_least=4), Label("rating", "rating", "number"))
    assert (spec.weight, spec.group) == ("importance", "user")
    assert spec.columns == ("clicked", "rating", "importance", "user", "ad")


WRONG: dict[str, dict[str, Any]] = {
    r"label liked: at_least must be a finite number, not 'x'": {"label": [{"name": "liked", "at_least": "x"}]},
    r"label t: kind must be one of click, number, not 'time'": {"label": [{"name": "t", "kind": "time"}]},
    r"label t: kind must be one of click, number, not \[1\]": {"label": "t", "label_kind": [1]},
    r'label t: at_least turns a number into a click, so a label of kind "number" cannot have it': {
        "label": "t",
        "label_kind": "number",
        "label_at_least": 1,
    },
    r"label y: two have this name": {"label": [{"name": "y"}, {"name": "y", "column": "z"}]},
    r"label y: unknown entry 'weight'": {"label": [{"name": "y", "weight": "w"}]},
    r"\[\[label\]\]: name must be a text": {"label": [{"column": "y"}]},
    r"label: write each as \[\[label\]\]": {"label": {"name": "y"}},
    r"label: at least one is needed": {"label": []},
    r"label_at_least goes with label = .* in a \[\[label\]\], set at_least": {"label": [{"name": "y"}], "label_at_least": 4},
    r"weight must be a text": {"label": "y", "weight": 3},
    r"group must be a text": {"label": "y", "group": ""},
}


@pytest.mark.parametrize("rule", WRONG)
def test_what_a_feature_file_may_not_say_of_labels(rule: str) -> None:
    with pytest.raises(FeatureError, match=rule):
        parse(WRONG[rule] | {"feature": [FEATURE]})
