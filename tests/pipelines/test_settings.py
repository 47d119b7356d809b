"""Settings declared once: text and Python values give the same typed ones, by one error each, and what is kept on disk gives them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreload.base.errors import SettingError
from foreload.base.settings import integer, key_values, number, settings_of, size_bytes
from foreload.pipelines.planning.options import LaneSize, PrepareOptions, read
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import Parity

LEAST: dict[type, dict[str, Any]] = {
    PrepareOptions: {"format": "synthetic", "rows": 9, "out": "s", "batch_size": 4},
    TrainJob: {"schedule": "s", "run": "r", "store": "local:3"},
}


@pytest.mark.parametrize("kind", [PrepareOptions, TrainJob])
def test_every_setting_is_told_of_once_and_its_default_is_a_value_of_it(kind: Any) -> None:
    settings = settings_of(kind)
    made = kind.of(LEAST[kind])
    assert len({one.flag for one in settings.values()}) == len(settings)
    for name, one in settings.items():
        assert one.help, name
        value = getattr(made, one.field)
        assert value is None or one.parse(one.flag, value) == value, "a typed value is taken as it is"


@pytest.mark.parametrize("slots", [40, "40", "min", "all", "2GiB"])
def test_text_and_python_values_are_the_same_settings(slots: Any) -> None:
    words = ["--format=synthetic", "--rows=9", "--out=s", "--batch-size=4", f"--slots={slots}", "--eval-fraction=0.25"]
    options, _ = read(words)
    assert options == PrepareOptions.of(LEAST[PrepareOptions] | {"slots": slots, "eval-fraction": 0.25})
    sizes = {"2GiB": LaneSize(memory_bytes=2 << 30), "min": LaneSize("min"), "all": LaneSize("all")}
    assert options.lane_size == sizes.get(slots, LaneSize(40))


def test_what_is_written_gives_the_settings_again() -> None:
    given = {
        "parity": "2+1",
        "memory": "1.5GB",
        "lr": "0.5",
        "model_options": ["top=4-1"],
        "tables": {"C1": {"row_optimizer": "sgd"}},
    }
    job = TrainJob.of(LEAST[TrainJob] | given)
    assert (job.parity, job.lr, job.model_options) == (Parity(2, 1), 0.5, {"top": "4-1"})
    written = json.loads(json.dumps(job.to_dict()))
    assert (written["parity"], written["memory"], written["store"]) == ("2+1", "1.5GB", "local:3")
    assert written["tables"] == {"C1": {"row-optimizer": "sgd"}}
    assert TrainJob.of(written) == job
    made = PrepareOptions.of(LEAST[PrepareOptions] | {"slots": "3kB"})
    assert json.loads(json.dumps(made.to_dict())).items() >= {"slots": None, "memory_bytes": 3000, "out": "s"}.items()


def test_paths_are_taken_as_objects_too() -> None:
    job = TrainJob.of(LEAST[TrainJob] | {"run": Path("a") / "b"})
    assert (job.run, job.run_namespace) == ("a/b", "b")
    options = PrepareOptions.of({"format": "criteo", "sources": Path("x.tsv"), "out": Path("s"), "batch_size": 1})
    assert options.sources == ("x.tsv",)


def test_numbers_are_within_their_bounds() -> None:
    whole, part = integer(2, 5), number(0.1)
    assert [whole("-x", value) for value in (2, "5")] == [2, 5]
    assert [part("-x", value) for value in (1, "0.25")] == [1.0, 0.25]
    for parse, value, rule in [
        (whole, 1, "at least 2; got 1"), (whole, "6", "at most 5; got 6"), (whole, 2.5, "a whole number; got 2.5"), (whole, True, "got True"),
        (part, 0, "at least 0.1; got 0"), (part, "inf", "a finite number; got 'inf'"), (part, None, "got None"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=f"-x: must be .*{rule}"):
            parse("-x", value)


def test_sizes_have_units() -> None:
    sizes = ["1GiB", "1.5 MB", "12", "3kb"]
    assert [size_bytes("--memory", size) for size in sizes] == [1 << 30, 1_500_000, 12, 3000]


def test_options_are_given_as_key_and_value() -> None:
    assert key_values("--model-options", ["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"], 3):
        with pytest.raises(SettingError):
            key_values("--model-options", wrong)


def test_another_name_of_a_setting_is_as_good() -> None:
    for names in ({"copies": 2}, {"replicas": "2"}):
        assert TrainJob.of({"schedule": "s", "run": "r", "store": "local:1", "trainers": 2, **names}).copies == 2
    with pytest.raises(SettingError, match="copies is given twice, because 'replicas' is the same"):
        TrainJob.of({"copies": 2, "replicas": 2})


def test_a_setting_unknown_or_missing_is_named() -> None:
    with pytest.raises(SettingError, match="prepare: has no setting 'batches'; it takes after, "):
        PrepareOptions.of({"batches": 3})
    with pytest.raises(SettingError, match="--batch-size: is missing"):
        PrepareOptions.of({"format": "criteo", "sources": ["x"], "out": "s"})
