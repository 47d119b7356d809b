"""Labels by a threshold: what is prepared of ratings is what is prepared of the labels that they stand for, and trains to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference_data

from foreload.pipelines import prepare
from foreload.pipelines.errors import FeatureError, RecordError
from foreload.pipelines.samples.feature_file import parse
from foreload.pipelines.samples.features import features_of, features_stored
from foreload.pipelines.schedule.reader import Schedule

RATINGS = ["0.5", "4", "3.99999999", "4.0", "5", "-1", "1e1", "0", "4.00000001", "+4", "1"]
EXPECTED = [0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0]
FEATURES = """
label = "rating"
label_at_least = 4
[[feature]]
name = "film"
encoding = "id"
rows = 50
"""


def written(folder: Path, ratings: list[str], name: str = "log.csv") -> Path:
    (folder / "features.toml").write_text(FEATURES)
    path = folder / name
    path.write_text("rating,film\n" + "".join(f"{rating},{place}\n" for place, rating in enumerate(ratings)))
    return path


def labels(source: Path, out: Path, *further: str) -> list[float]:
    """The labels of a schedule, in order."""
    kind = source.suffix[1:]
    prepare.run(
        [
            str(source),
            f"--format={kind}",
            f"--features={source.parent / 'features.toml'}",
            "--batch-size=4",
            f"--out={out}",
            *further,
        ]
    )
    schedule = Schedule(out)
    return [float(label) for event in schedule.events() for label in schedule.lane(event, 0).labels[:, 0]]


def test_labels_are_one_from_the_threshold_on(tmp_path: Path) -> None:
    source = written(tmp_path, RATINGS)
    assert labels(source, tmp_path / "out") == EXPECTED
    log = reference_data.read_features(tmp_path / "features.toml")
    assert reference_data.load(log, (source,)).training.labels[:, 0].tolist() == EXPECTED


@pytest.mark.parametrize("kind", [pa.float64(), pa.string(), pa.decimal128(12, 8)], ids=str)
def test_parquet_gives_the_same(kind: pa.DataType, tmp_path: Path) -> None:
    written(tmp_path, RATINGS)
    ratings = pa.array([rating.removeprefix("+") for rating in RATINGS]).cast(pa.float64()).cast(kind)
    pq.write_table(pa.table({"rating": ratings, "film": np.arange(len(RATINGS))}), tmp_path / "log.parquet")
    assert labels(tmp_path / "log.parquet", tmp_path / "out") == EXPECTED


def test_what_is_no_finite_number_is_malformed(tmp_path: Path) -> None:
    source = written(tmp_path, ["5", "", "nan", "inf", "good", "3"])
    with pytest.raises(RecordError, match=r"log.csv:3: rating: a label must be a finite number, not ''"):
        labels(source, tmp_path / "refused")
    assert labels(source, tmp_path / "out", "--max-rejects=4") == [1, 0]
    assert len((tmp_path / "out" / "rejects.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("least", ['"4"', "true", "nan", "inf"])
def test_a_threshold_that_is_no_finite_number_is_refused(least: str, tmp_path: Path) -> None:
    (tmp_path / "features.toml").write_text(FEATURES.replace("= 4", f"= {least}"))
    with pytest.raises(FeatureError, match="label rating: at_least must be a finite number"):
        prepare.run(
            [
                "none.csv",
                "--format=csv",
                f"--features={tmp_path / 'features.toml'}",
                "--batch-size=4",
                f"--out={tmp_path / 'out'}",
            ]
        )


def test_a_spec_without_a_threshold_is_written_as_before() -> None:
    plain = parse({"label": "y", "feature": [{"name": "a", "rows": 5}]})
    assert "label_at_least" not in features_stored(plain)
    assert features_of(features_stored(plain)) == plain
    ratings = parse({"label": "y", "label_at_least": 3.5, "feature": [{"name": "a", "rows": 5}]})
    assert features_of(json.loads(json.dumps(features_stored(ratings)))) == ratings
    assert ratings.unlabelled() == plain.unlabelled()
