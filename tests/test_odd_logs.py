"""Odd logs, as text and as Parquet, computed another way: ids, counts, means, deviations, models, AUC, predictions and exports.

Whole numbers are written as floats here and there, missing values in several ways; texts look like numbers and are none; dense values are moments
within a minute, nearly constant, or negative.
"""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference
import reference_config
import reference_data
from command_line import done
from grids import covering
from served_model import model_of

from foreload.trainer.models.building import load_model

LOGS, IN_SHORT = 24, 11
TRAINING, HELD_OUT = 150, 70
BATCH, LANES, DIM = 32, 3, 4
MISSING = ("NULL", "-1", "-999.0")
WILD = (
    "007",
    "+5",
    "1e5",
    "1E+05",
    "26.",
    "3.7",
    ".5",
    "-0",
    "12e34567",
    "é",
    "a b",
    'a "quoted" one',
    "a,b",
    "NaN",
    "00.0",
    "x" * 40,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Columns:
    """A log: what a record has by column, as text, and as Parquet has it."""

    texts: dict[str, list[str]]
    typed: dict[str, pa.Array]


def written(random: np.random.Generator, number: int) -> str:
    """A whole number in one of the ways in which programs write it."""
    return (f"{number}", f"{number}.0", f"{number}.00")[int(random.integers(3))]


def of_numbers(random: np.random.Generator, values: Sequence[int | None]) -> tuple[list[str], pa.Array]:
    """Whole numbers as text, and as a Parquet column of some type."""
    texts = [("", "NULL", "-1", "-1.0", "-999")[int(random.integers(5))] if v is None else written(random, v) for v in values]
    kind = (pa.int64(), pa.float64(), pa.float32(), pa.decimal128(20, 2), pa.string())[int(random.integers(5))]
    given: list[Any] = list(values)
    if kind == pa.string():
        given = texts
    elif pa.types.is_decimal(kind):
        given = [None if v is None else Decimal(v) for v in values]
    elif random.integers(2):
        given = [-1 if v is None else v for v in values]  # a number that means a missing value
    return texts, pa.array(given, kind)


def log_of(random: np.random.Generator, count: int) -> Columns:
    """Random records."""
    texts: dict[str, list[str]] = {}
    typed: dict[str, pa.Array] = {}

    def some(values: Sequence[int]) -> list[int | None]:
        return [None if random.random() < 0.15 else int(v) for v in values]

    texts["clicked"] = [("0", "1", "1.0")[int(k)] for k in random.integers(0, 3, count)]
    typed["clicked"] = pa.array([float(text) for text in texts["clicked"]])
    for name, low, high in (("segment", -9, 30), ("user", 0, 10**6), ("ad", 0, 40)):
        texts[name], typed[name] = of_numbers(
            random, some([int(v) if v != -1 else -2 for v in random.integers(low, high, count)])
        )
    texts["wild"] = [WILD[int(k)] for k in random.integers(0, len(WILD), count)]
    typed["wild"] = pa.array(texts["wild"]).dictionary_encode()
    bags = [[written(random, int(v)) for v in random.integers(0, 9, random.integers(0, 4))] for _ in range(count)]
    texts["bag"] = ["|".join(bag) for bag in bags]
    typed["bag"] = pa.array(bags, pa.list_(pa.string())) if random.integers(2) else pa.array(texts["bag"])
    moments = [1_764_000_000_000 + int(v) for v in random.integers(0, 60_000, count)]
    texts["moment"], typed["moment"] = [str(v) for v in moments], pa.array(moments)
    near = [1 + 1e-9 * int(v) for v in random.integers(0, 2, count)]
    texts["near"], typed["near"] = [repr(v) for v in near], pa.array(near)
    negative: list[float | None] = [None if random.random() < 0.1 else float(v) for v in np.round(random.normal(0, 5, count), 3)]
    texts["negative"] = ["-999.0" if v is None else repr(v) for v in negative]
    typed["negative"] = pa.array([-999.0 if v is None else v for v in negative])
    return Columns(texts, typed)


FEATURES = """
label = "clicked"
group = "user"
[text]
missing = ["NULL", "-1", "-999.0"]
[[feature]]
name = "segment"
encoding = "vocabulary"
min_count = {least}
[[feature]]
name = "user"
rows = 5_000
[[feature]]
name = "ad"
encoding = "id"
rows = 40
[[feature]]
name = "wild"
encoding = "{wild}"
{wild_rows}
[[feature]]
name = "bag"
rows = 100
pooling = "{pooling}"
[[dense]]
name = "moment"
transform = "standard"
[[dense]]
name = "near"
transform = "standard"
[[dense]]
name = "negative"
transform = "{negative}"
"""


def write(folder: Path, name: str, columns: Columns) -> None:
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns.texts)
        writer.writerows(zip(*columns.texts.values(), strict=True))
    pq.write_table(pa.table(columns.typed), folder / f"{name}.parquet")


def is_missing(text: str) -> bool:
    return text in ("", "NULL", "-1", "-1.0", "-999", "-999.0")


def counted(columns: Columns, known: set[str], negative: str) -> dict[str, dict[str, int]]:
    """What is told of the columns, counted plainly."""
    count = len(columns.texts["clicked"])
    told = {
        name: {"missing": sum(map(is_missing, columns.texts[name]))}
        for name in ("segment", "user", "ad", "wild", "moment", "near", "negative")
    }
    fields = columns.texts["bag"]
    told["bag"] = {"missing": fields.count(""), "values": sum(max(1, len(field.split("|"))) for field in fields)}
    segments = [plain(text) for text in columns.texts["segment"] if not is_missing(text)]
    told["segment"]["unknown"] = sum(segment not in known for segment in segments)
    if negative == "log":
        told["negative"]["clipped"] = sum(not is_missing(text) and float(text) < 0 for text in columns.texts["negative"])
    return {name: {"values": count} | counts for name, counts in told.items()}


def plain(text: str) -> str:
    return text.partition(".")[0]


def moments_of(texts: Sequence[str]) -> tuple[float, float]:
    """Mean and deviation, in rational numbers."""
    values = [Fraction(float(text)) for text in texts if not is_missing(text)]
    mean = sum(values) / len(values)
    return float(mean), math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


MODELS = ("wide_deep", "dcn", "dlrm")


@pytest.mark.parametrize(("number", "model"), covering([(number, MODELS[number % 3]) for number in range(LOGS)], IN_SHORT))
def test_an_odd_log_is_what_it_is_by_any_way(number: int, model: str, tmp_path: Path) -> None:
    random = np.random.default_rng(number)
    least, pooling, negative = int(random.integers(1, 4)), ("sum", "mean")[number % 2], ("log", "standard", "none")[number % 3]
    wild = ("hash", "vocabulary")[number // 2 % 2]
    features = tmp_path / "features.toml"
    features.write_text(
        FEATURES.format(least=least, wild=wild, wild_rows="rows = 300" * (wild == "hash"), pooling=pooling, negative=negative)
    )
    training, held_out = log_of(random, TRAINING), log_of(random, HELD_OUT)
    write(tmp_path, "training", training)
    write(tmp_path, "held-out", held_out)
    digests = []
    for kind in ("csv", "parquet"):
        out, run = tmp_path / f"schedule-{kind}", tmp_path / f"run-{kind}"
        given = (
            tmp_path / f"training.{kind}",
            "--eval-source",
            tmp_path / f"held-out.{kind}",
            "--features",
            features,
            "--lanes",
            LANES,
        )
        done(
            "prepare",
            *given,
            "--batch-size",
            BATCH,
            "--slots",
            "min",
            "--epochs",
            2,
            "--out",
            out,
            "--json",
            tmp_path / f"{kind}.json",
        )
        settings = ("--row-optimizer", "sgd", "--lr", 0.01, "--dense-optimizer", "SGD", "--dense-lr", 0.01, "--dim", DIM)
        done("train", out, "--run", run, "--store", "local:2", "--model", model, *settings)
        digests.append(done("digest", run).strip())

    # The model, trained plainly by definitions.md alone.
    expected = reference.train(
        reference_config.Config(
            log=reference_data.read_features(features),
            sources=(tmp_path / "training.csv",),
            evaluation_sources=(tmp_path / "held-out.csv",),
            model=load_model(model),
            dim=DIM,
            batch_size=BATCH,
            lanes=LANES,
            epochs=2,
        )
    )
    assert digests == [expected.digest] * 2

    # What is in the log.
    values = [plain(text) for text in training.texts["segment"] if not is_missing(text)]
    known = {value for value in values if values.count(value) >= least}
    for kind in ("csv", "parquet"):
        told = json.loads((tmp_path / f"{kind}.json").read_text())
        for which, columns in (("training", training), ("evaluation", held_out)):
            expected_counts = counted(columns, known, negative)
            counts = {column["name"]: column for column in told["data"][which]["columns"]}
            for name, of_column in expected_counts.items():
                assert of_column.items() <= counts[name].items(), (kind, which, name)
        scales = json.loads((tmp_path / f"schedule-{kind}" / "encoding" / "scales.json").read_text())
        for place, name in enumerate(("moment", "near", *(["negative"] if negative == "standard" else []))):
            got = [float.fromhex(value) for value in scales[place]]
            assert got == pytest.approx(moments_of(training.texts[name]), rel=1e-15)

    # What the model says, in whatever company, and how well.
    run = tmp_path / "run-csv"
    logits = []
    for kind in ("csv", "parquet"):
        out = tmp_path / f"logits-{kind}.parquet"
        done("predict", run, tmp_path / f"held-out.{kind}", "--logits", "--out", out)
        logits.append(pq.read_table(out).column("logit").to_numpy())
        assert logits[-1].tobytes() == expected.logits.tobytes()
    done("evaluate", run, "--json", tmp_path / "evaluated.json")
    evaluated = json.loads((tmp_path / "evaluated.json").read_text())
    labels = np.array([float(text) for text in held_out.texts["clicked"]])
    pairs = logits[0][labels == 1][:, None] - logits[0][labels == 0][None, :]
    assert evaluated["auc"] == pytest.approx(
        (np.count_nonzero(pairs > 0) + 0.5 * np.count_nonzero(pairs == 0)) / pairs.size, abs=1e-15
    )
    losses = np.logaddexp(0, -np.where(labels == 1, 1, -1) * logits[0].astype(np.float64))
    assert evaluated["log_loss"] == pytest.approx(losses.mean(), rel=1e-12)

    # And the model that is exported, of texts and of values as Python has them.
    done("export", run, "--format", "torch", "--out", tmp_path / "model")
    served = model_of(tmp_path / "model")
    for columns_given in (held_out.texts, {name: column.to_pylist() for name, column in held_out.typed.items()}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hardly any user is known
            said = served.predict(columns_given, logits=True)
        np.testing.assert_allclose(said, logits[0], rtol=1e-5, atol=1e-6)
