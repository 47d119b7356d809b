"""More data for a trained model: what a schedule takes from the one before, and which run it belongs to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from clicks import CLICKS_HELD_OUT, Clicks, write_log
from command_line import SMALL, done, refused

from foreload.pipelines.schedule.reader import Schedule


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    """A schedule of 11 steps."""
    return Clicks.prepare(tmp_path_factory.mktemp("clicks"), batch_size=100, epochs=1, slots=100)


@pytest.fixture(scope="module")
def run_at_its_end(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained all of it; tests that train on take a copy."""
    run = tmp_path_factory.mktemp("at-its-end") / "run"
    done("train", clicks.schedule, "--run", run, "--store", "local:1", *SMALL)
    return run


def test_more_data_needs_no_more_than_the_schedule_before(clicks: Clicks, run_at_its_end: Path, tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    more = write_log(tmp_path / "more.csv", 300)
    done("prepare", more, "--after", clicks.schedule, "--out", short)
    all_told = ("--format", "csv", "--features", clicks.features, "--batch-size", 100, "--lanes", 2)
    done("prepare", more, *all_told, "--after", clicks.schedule, "--out", long)
    assert Schedule(short).checksum == Schedule(long).checksum
    line = refused("train", short, "--run", tmp_path / "new", "--store", "local:1", *SMALL)
    assert f"continues the run that was trained on {clicks.schedule}, not a new one" in line
    assert line.endswith("give that run's folder with --run, and --resume")
    for further in ((), ("--overwrite",)):
        line = refused("train", short, "--run", run_at_its_end, "--store", "local:1", *SMALL, *further)
        assert line.endswith(
            f"continues run {run_at_its_end}, which was trained on {clicks.schedule}; give --resume to go on with it"
        )
    run = shutil.copytree(run_at_its_end, tmp_path / "run")
    done("train", short, "--run", run, "--resume")
    # What goes on, with no schedule named, is what was trained last.
    assert f"is at the end of {short} already" in refused("train", "--run", run, "--resume")


def test_without_the_provenance_of_the_schedule_before_the_format_must_be_told(clicks: Clicks, tmp_path: Path) -> None:
    parent = clicks.copy(tmp_path / "parent")
    (parent / "provenance.json").unlink()
    words = ("prepare", clicks.log, "--after", parent, "--out", tmp_path / "out")
    assert refused(*words).startswith("--format: is missing")
    done(*words, "--format", "csv")


def test_a_schedule_for_evaluation_alone_is_evaluated_on_and_not_trained_on(
    clicks: Clicks, run_at_its_end: Path, tmp_path: Path
) -> None:
    out, held_out = tmp_path / "out", tmp_path / "held-out.csv"
    # The samples that the run's own schedule holds out, under names of their own.
    lines = clicks.log.read_text().splitlines()
    held_out.write_text("\n".join([lines[0], *lines[-CLICKS_HELD_OUT:]]) + "\n")
    done("prepare", "--eval-source", held_out, "--after", clicks.schedule, "--out", out)
    counts = Schedule(out).manifest["counts"]
    assert (counts["training_steps"], counts["training_samples"], counts["evaluation_samples"]) == (0, 0, CLICKS_HELD_OUT)
    assert done("evaluate", run_at_its_end, out) == done("evaluate", run_at_its_end)
    for further in ((), ("--resume",)):
        line = refused("train", out, "--run", run_at_its_end, "--store", "local:1", *SMALL, *further)
        assert line.endswith(f"has evaluation steps only; evaluate a run on it: foreload evaluate RUN {out}")
    for flag in (("--epochs", 2), ("--shuffle-seed", 1), ("--eval-fraction", 0.1)):
        line = refused("prepare", "--eval-source", held_out, "--after", clicks.schedule, "--out", tmp_path / "x", *flag)
        assert line == f"{flag[0]}: is for training samples, and there is no SOURCE; leave it out"


def test_data_in_the_order_of_a_column_can_be_for_evaluation_alone(tmp_path: Path) -> None:
    features = tmp_path / "features.toml"
    features.write_text('label = "clicked"\norder_by = "price"\n[[feature]]\nname = "user"\nencoding = "vocabulary"\n')
    log, first, second = write_log(tmp_path / "log.csv", 300), tmp_path / "first", tmp_path / "second"
    done("prepare", log, "--format", "csv", "--features", features, "--batch-size", 100, "--out", first)
    done("prepare", "--eval-source", log, "--after", first, "--out", second)
    assert Schedule(second).manifest["counts"]["evaluation_samples"] == 300
