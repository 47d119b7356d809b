"""More data for a trained model: what a schedule takes from the one before, and which run it belongs to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import SMALL, Clicks, done, refused, write_log

from foreload.pipelines.schedule.reader import Schedule

ROWS = 1200


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    """A schedule of 11 steps."""
    return Clicks.prepare(tmp_path_factory.mktemp("clicks"), batch_size=100, epochs=1, slots=100)


@pytest.fixture(scope="module")
def trained(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at the end of it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    done("train", clicks.schedule, "--run", run, "--store", "local:1", *SMALL)
    return run


def test_more_data_needs_no_more_than_the_schedule_before(clicks: Clicks, trained: Path, tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    more = write_log(tmp_path / "more.csv", 300)
    done("prepare", more, "--after", clicks.schedule, "--out", short)
    told = ("--format", "csv", "--features", clicks.features, "--batch-size", 100, "--lanes", 2)
    done("prepare", more, *told, "--after", clicks.schedule, "--out", long)
    assert Schedule(short).checksum == Schedule(long).checksum
    line = refused("train", short, "--run", tmp_path / "new", "--store", "local:1", *SMALL)
    assert f"continues the run that was trained on {clicks.schedule}, not a new one" in line
    assert line.endswith("give that run's folder with --run, and --resume")
    for further in ((), ("--overwrite",)):
        line = refused("train", short, "--run", trained, "--store", "local:1", *SMALL, *further)
        assert line.endswith(f"continues run {trained}, which was trained on {clicks.schedule}; give --resume to go on with it")
    run = shutil.copytree(trained, tmp_path / "run")
    done("train", short, "--run", run, "--resume")
    # What goes on, with no schedule named, is what was trained last.
    assert f"is at the end of {short} already" in refused("train", "--run", run, "--resume")


def test_a_schedule_of_which_is_not_known_how_it_was_made_is_continued_once_told_the_format(
    clicks: Clicks, tmp_path: Path
) -> None:
    parent = clicks.copy(tmp_path / "parent")
    (parent / "provenance.json").unlink()
    words = ("prepare", clicks.log, "--after", parent, "--out", tmp_path / "out")
    assert refused(*words).startswith("--format: is missing")
    done(*words, "--format", "csv")


def test_a_schedule_for_evaluation_alone(clicks: Clicks, trained: Path, tmp_path: Path) -> None:
    out, held_out = tmp_path / "out", tmp_path / "held-out.csv"
    # The samples that the run's own schedule holds out, under names of their own.
    lines = clicks.log.read_text().splitlines()
    tail = ROWS // 10
    held_out.write_text("\n".join([lines[0], *lines[-tail:]]) + "\n")
    done("prepare", "--eval-source", held_out, "--after", clicks.schedule, "--out", out)
    counts = Schedule(out).manifest["counts"]
    assert (counts["training_steps"], counts["training_samples"], counts["evaluation_samples"]) == (0, 0, tail)
    assert done("evaluate", trained, out) == done("evaluate", trained)
    for further in ((), ("--resume",)):
        line = refused("train", out, "--run", trained, "--store", "local:1", *SMALL, *further)
        assert line.endswith(f"has evaluation steps only; evaluate a run on it: foreload evaluate RUN {out}")
    for flag in (("--epochs", 2), ("--shuffle-seed", 1), ("--eval-fraction", 0.1)):
        line = refused("prepare", "--eval-source", held_out, "--after", clicks.schedule, "--out", tmp_path / "x", *flag)
        assert line == f"{flag[0]}: is for training samples, and there is no SOURCE; leave it out"


def test_evaluation_alone_of_data_in_the_order_of_a_column(tmp_path: Path) -> None:
    features = tmp_path / "features.toml"
    features.write_text('label = "clicked"\norder_by = "price"\n[[feature]]\nname = "user"\nencoding = "vocabulary"\n')
    log, first, second = write_log(tmp_path / "log.csv", 300), tmp_path / "first", tmp_path / "second"
    done("prepare", log, "--format", "csv", "--features", features, "--batch-size", 100, "--out", first)
    done("prepare", "--eval-source", log, "--after", first, "--out", second)
    assert Schedule(second).manifest["counts"]["evaluation_samples"] == 300
