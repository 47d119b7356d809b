"""Schedules: every file of small ones of every kind, byte for byte, as docs/schedule.md promises them on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clicks import write_features
from command_line import done
from golden import files_of, masked, pinned
from inputs import write_all_kinds, write_clicks, write_criteo

ALL_KINDS = (
    "--batch-size 20 --lanes 3 --slots 120 --epochs 2 --shuffle-seed 5 --eval-fraction 0.2 --eval-every 9 --segment-bytes 6000"
)
CASES = {
    "csv-all-kinds": ALL_KINDS,
    "csv-more-epochs": "--after csv-all-kinds --epochs 1",
    "csv-new-data": "new.csv --after csv-plain --epochs 1 --slots 60",
    "csv-plain": "--batch-size 10 --lanes 2 --slots 40 --epochs 2 --eval-fraction 0.1 --segment-bytes 3000",
    "csv-order": "--batch-size 16 --lanes 4 --slots min --placement order --eval-source a=new.csv --eval-source b=log.csv",
    "csv-window": "--batch-size 10 --lanes 2 --slots 60 --window 400 --segment-bytes 3000",
    "criteo": "train.tsv --format criteo --table-rows 500 --eval-source test.tsv --batch-size 16 --lanes 2 --slots all --epochs 2",
    "synthetic": "--format synthetic --rows 700 --seed 3 --values 90 --eval-fraction 0.1 --batch-size 64 --lanes 2 --memory 2MiB",
    "synthetic-all": "--format synthetic --rows 500 --table-rows 64 --batch-size 50 --lanes 1 --slots all --epochs 3",
}
"""By the name of the schedule, how it is prepared; those --after another stand behind it when they are made."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all schedules."""
    home = tmp_path_factory.mktemp("schedules")
    plain, kinds = home / "plain", home / "kinds"
    for folder in (plain, kinds):
        folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(kinds)
        done("prepare", *write_all_kinds(kinds), *CASES["csv-all-kinds"].split(), "--out", "csv-all-kinds", "--json", "told.json")
        done("prepare", *CASES["csv-more-epochs"].split(), "--out", "csv-more-epochs")
        patch.chdir(plain)
        write_clicks(plain / "log.csv", 400)
        write_clicks(plain / "new.csv", 130, 400)
        write_features(plain / "features.toml", 6)
        write_criteo(plain / "train.tsv", 300, 0)
        write_criteo(plain / "test.tsv", 40, 300)
        source = ["log.csv", "--features", "features.toml"]
        for name in ("csv-plain", "csv-order", "csv-window", "csv-new-data", "criteo", "synthetic", "synthetic-all"):
            words = CASES[name].split()
            own = [] if {"--format", "--after"} & set(words) else source
            done("prepare", *own, *words, "--out", name)
    return home


@pytest.mark.parametrize("name", list(CASES))
def test_every_file_of_a_schedule(name: str, made: Path) -> None:
    (schedule,) = made.glob(f"*/{name}")
    pinned(f"schedule-{name}.json", files_of(schedule, ("beam", "finished", "seconds"), texts={str(made): "HOME"}))


def test_what_prepare_tells_programs(made: Path) -> None:
    """Its bytes depend on the names of folders, which stand in the schedule."""
    pinned("schedule-told.json", masked(json.loads((made / "kinds" / "told.json").read_text()), ("bytes", "seconds")))
