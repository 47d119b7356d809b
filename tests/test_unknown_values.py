"""Values that a model has never seen are counted by feature, and warned of where hardly any is known: by `predict`, `evaluate` and the export."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import done, refused, run_here
from served_model import model_of

import foreload

FEATURES = """
label = "clicked"
[text]
missing = ["none"]
[[dense]]
name = "near"
transform = "standard"
[[feature]]
name = "word"
encoding = "vocabulary"
[[feature]]
name = "user"
rows = 100_000
[[feature]]
name = "ad"
encoding = "id"
rows = 1000
[[feature]]
name = "tags"
rows = 100_000
pooling = "mean"
"""
NAMES = ("word", "user", "ad", "tags")
Row = dict[str, str]


def rows_of(random: np.random.Generator, count: int, shift: int) -> list[Row]:
    """Values of 0 to 39, shifted; a tenth of each is missing, half of these written as "none"."""

    def some(value: str) -> str:
        return ("", "none")[int(random.integers(2))] if random.random() < 0.1 else value

    def number() -> int:
        return int(random.integers(40)) + shift

    return [
        {
            "clicked": str(int(random.integers(2))), "near": str(1.0 + 1e-9 * int(random.integers(2))), "word": some(f"w{number()}"),
            "user": some(f"u{number()}.0"), "ad": some(f"{number() + 1}.0"), "tags": some(f"t{number()}|t{number()}|"),
        }
        for _ in range(count)
    ]  # fmt: skip


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Case:
    """A run, what it was trained on, its exports, and logs with their rows: as for training, and with hardly a value of these."""

    home: Path
    run: Path
    training: list[Row]
    usual: list[Row]
    strange: list[Row]

    def expected(self, rows: list[Row]) -> dict[str, dict[str, int]]:
        """Counted with sets of the texts."""
        counts = {}
        for name in NAMES:
            known = {value for row in self.training for value in parts(row[name], name)}
            values = [value for row in rows for value in parts(row[name], name)]
            counts[name] = {"values": len(values), "unknown": sum(value not in known for value in values)}
        return counts


def parts(text: str, name: str) -> list[str]:
    pieces = [] if text == "none" else text.split("|") if name == "tags" else [text]
    return [piece for piece in pieces if piece]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    home = tmp_path_factory.mktemp("unknown")
    random = np.random.default_rng(8)
    training, usual, strange = rows_of(random, 400, 0), rows_of(random, 90, 10), rows_of(random, 60, 39)
    for name, rows in (("training", training), ("usual", usual), ("strange", strange)):
        write(home / f"{name}.csv", rows)
    (home / "features.toml").write_text(FEATURES)
    common = ("--format", "csv", "--batch-size", 32, "--lanes", 2, "--slots", "min")
    features = ("--features", home / "features.toml")
    done("prepare", home / "training.csv", *common, *features, "--eval-source", home / "usual.csv", "--out", home / "schedule")
    done("train", home / "schedule", "--run", home / "run", "--store", "local:1", "--dim", 4)
    for name in ("usual", "strange"):
        after = ("--after", home / "schedule", "--slots", "min", "--out", home / f"schedule-{name}")
        done("prepare", "--format", "csv", "--eval-source", home / f"{name}.csv", *after)
    for number, options in enumerate(([], ["--most-rows", 0])):
        done("export", home / "run", "--format", "torch", "--out", home / f"model-{number}", *options)
    return Case(home, home / "run", training, usual, strange)


def warned(err: str) -> list[str]:
    return [line for line in err.splitlines() if "unknown to the model" in line]


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_unknown_values_are_counted_and_warned_of(case: Case, tmp_path: Path, command: str) -> None:
    for name, rows in (("usual", case.usual), ("strange", case.strange)):
        what = [case.home / f"schedule-{name}"]
        if command == "predict":
            what = [case.home / f"{name}.csv", "--out", tmp_path / "scores.csv"]  # type: ignore[list-item]
        status, _, err = run_here(command, case.run, *what, "--json", tmp_path / "told.json")
        assert status == 0
        expected = case.expected(rows)
        assert json.loads((tmp_path / "told.json").read_text())["unknown"] == expected
        lines = warned(err)
        assert [line.partition("feature ")[2].partition(":")[0] for line in lines] == ([] if name == "usual" else list(NAMES))
        for line, feature in zip(lines, NAMES, strict=False):
            unknown, values = expected[feature]["unknown"], expected[feature]["values"]
            assert line.startswith(f"foreload: warning: {command}: feature {feature}: ")
            assert f"{'' if feature == 'word' else 'at least '}{unknown} of {values} values ({unknown / values:.2%})" in line


@pytest.mark.parametrize("number", [0, 1])
def test_an_exported_model_counts_and_warns_too(case: Case, number: int) -> None:
    folder = case.home / f"model-{number}"
    model = model_of(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(case.usual)
        assert told(model) == case.expected(case.usual)
        model.predict(case.strange[:1])  # too few to say
    with pytest.warns(UserWarning, match="unknown to the model") as caught:
        model.predict(case.strange, batch_size=7)
    assert len(caught) == len(NAMES)
    assert all(warning.filename == __file__ for warning in caught)
    lines = [str(warning.message) for warning in caught]
    assert [name for name in NAMES if any(f"feature {name}: at least " in line for line in lines)] == ["user", "ad", "tags"]
    assert told(model) == case.expected(case.strange)
    ran = subprocess.run(
        [sys.executable, folder / "model.py", case.home / "strange.csv"], capture_output=True, text=True, check=True
    )
    assert len(warned(ran.stderr)) == len(NAMES)
    assert len(ran.stdout.splitlines()) == len(case.strange) + 1


def told(model: Any) -> dict[str, dict[str, int]]:
    return {name: {"values": values, "unknown": unknown} for name, (unknown, values) in model.unknown.items()}


def test_rows_are_looked_up_by_values_as_they_are_written(case: Case) -> None:
    run = foreload.open_run(case.run)
    numbers = run.rows("ad", values=["5", "5.0", "5.00", 5, 5.0, "none", None, ""])
    assert numbers.ids.tolist() == [5] * 5 + [0] * 3
    users = run.rows("user", values=["7", "7.0", 7, 7.0, "07.0", "u7.0"])
    assert len(set(users.ids[:4].tolist())) == 1
    assert len(set(users.ids.tolist())) == 3
    told = done("lookup", case.run, "ad", "5.0", "none")
    assert [line.split("  ")[1] for line in told.splitlines()] == ["id 5", "id 0"]
    with pytest.raises(foreload.ForeloadError, match=r"a categorical value must be a text or a whole number; got 5\.5"):
        run.rows("user", values=[5.5])


@pytest.mark.parametrize("value", ["3e38", "-3e38", "1e31"])
def test_what_is_infinite_behind_its_transform_is_malformed(case: Case, tmp_path: Path, value: str) -> None:
    rows = [dict(row) for row in case.usual[:20]]
    rows[4]["near"] = value
    log = write(tmp_path / "log.csv", rows)
    rule = "near: a dense value must be finite after its transform"
    assert rule in refused("predict", case.run, log, "--out", tmp_path / "scores.csv")
    assert not (tmp_path / "scores.csv").exists()
    after = ("--after", case.home / "schedule", "--slots", "min", "--out", tmp_path / "schedule")
    said = refused("prepare", "--format", "csv", "--eval-source", log, *after)
    assert re.search(rf"log\.csv:6: {rule}, \(x - 1\) / (4\.99\d*|5)e-10, not '{value}'", said)
    model = model_of(case.home / "model-0")
    with pytest.raises(ValueError, match=r"records\[4\]: near: a dense value must be finite after its transform; got"):
        model.predict(rows)
    # Left out where that is allowed, and all others are there.
    done("prepare", "--format", "csv", "--eval-source", log, *after, "--max-rejects", 1, "--json", tmp_path / "told.json")
    assert json.loads((tmp_path / "told.json").read_text())["evaluation_samples"] == 19
