"""What a run leaves in the history at its end, and that no state of that file harms a run."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from clicks import Clicks
from command_line import main
from small_job import arguments

from foreload.trainer.compute.reports import COLUMNS
from foreload.trainer.errors import HistoryError
from foreload.trainer.run import history
from foreload.trainer.run.history import Profile, add, of_steps, read


def profile(number: int, steps: int = 3) -> Profile:
    """A profile that is told from others by its number."""
    columns, stride = of_steps([[float(number + step)] * len(COLUMNS) for step in range(steps)])
    return Profile(
        {"number": number}, {"cores": 2}, [{"kind": "trainer", "peak_bytes": 7, "processor_seconds": 1.5}], columns, stride
    )


def test_profiles_of_many_runs_are_kept_the_newest_and_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_RUNS", 6)
    path = tmp_path / "deep" / "history.sqlite"
    assert read(path) == []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: add(path, profile(number)), range(8)))
    add(path, profile(8))
    kept = read(path)
    assert len(kept) == 6
    assert [one.settings for one in read(path, newest=2)] == [one.settings for one in kept[-2:]]
    last = kept[-1]
    assert last.settings == {"number": 8}
    assert (last.stride, last.peak_bytes("trainer"), last.processor_seconds("trainer")) == (1, 7, 1.5)
    assert {name: values.tolist() for name, values in last.steps.items()} == {name: [8.0, 9.0, 10.0] for name in COLUMNS}


def test_a_figure_that_a_profile_of_an_earlier_version_lacks_is_zero(tmp_path: Path) -> None:
    path, given = tmp_path / "history.sqlite", profile(1)
    steps = {name: values for name, values in given.steps.items() if name != "ms_thread"}
    add(path, Profile(given.settings, given.machine, given.processes, steps))
    (left,) = read(path)
    assert left.steps["ms_thread"].tolist() == [0.0] * 3
    assert left.steps["ms"].tolist() == [1.0, 2.0, 3.0]
    without = {name: values for name, values in steps.items() if name != "rows_used"}
    add(path, Profile(given.settings, given.machine, given.processes, without))
    with pytest.raises(HistoryError, match="rows_used"):
        read(path)


def test_of_a_long_run_means_are_kept() -> None:
    steps = 3 * history.MOST_POINTS - 1
    columns, stride = of_steps([[float(step)] * len(COLUMNS) for step in range(steps)])
    assert (stride, len(columns["ms"])) == (3, history.MOST_POINTS - 1)
    assert np.array_equal(columns["ms"][:3], [1.0, 4.0, 7.0])


def test_a_run_leaves_its_figures_and_no_name_or_place(
    clicks: Clicks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.sqlite"
    assert main(arguments(clicks.schedule, tmp_path / "run", "--store", "local:1", "--history", str(path))) == 0
    (left,) = read(path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert np.allclose(left.steps["rows_used"], [step["rows_used"] for step in steps])
    assert np.allclose(left.steps["ms"], [step["ms"] for step in steps])
    assert (left.settings["trainers"], left.settings["shards"], left.settings["lanes"], left.settings["steps"]) == (
        1,
        1,
        2,
        len(steps),
    )
    assert {one["kind"] for one in left.processes} == {"trainer", "launcher", "store"}
    assert all(one["peak_bytes"] > 2**20 / 2 and one["processor_seconds"] >= 0 for one in left.processes)
    told = json.dumps([dict(left.settings), dict(left.machine), list(left.processes)])
    assert not {"/", "://", "127.0.0.1"} & {word for word in ("/", "://", "127.0.0.1") if word in told.replace("(R)", "")}
    capsys.readouterr()
    assert main(["history", "--history", str(path), "--json", str(tmp_path / "told.json")]) == 0
    assert "ms a step" in capsys.readouterr().out
    assert json.loads((tmp_path / "told.json").read_text())["profiles"][0]["mean"]["samples"] == pytest.approx(
        left.mean("samples")
    )


@pytest.mark.full
def test_a_history_that_cannot_be_written_costs_a_run_a_line(
    clicks: Clicks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "history.sqlite"
    broken.write_bytes(b"not a database, " * 100)
    assert main(arguments(clicks.schedule, tmp_path / "run", "--store", "local:1", "--history", str(broken))) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warned) == 1
    assert str(broken) in warned[0]
    assert broken.read_bytes().startswith(b"not a database")


def test_what_else_may_be_wrong_with_a_history_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BUSY_SECONDS", 0.05)
    path = tmp_path / "history.sqlite"
    add(path, profile(0))
    with sqlite3.connect(path, isolation_level=None) as held:
        held.execute("BEGIN EXCLUSIVE")
        with pytest.raises(HistoryError, match="locked"):
            add(path, profile(1))
        held.execute("ROLLBACK")
        held.execute("PRAGMA user_version = 9")
    held.close()
    with pytest.raises(HistoryError, match="version"):
        read(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="file"):
        add(tmp_path / "file" / "history.sqlite", profile(0))
    with pytest.raises(HistoryError):
        add(tmp_path, profile(0))


def test_the_text_is_of_the_newest_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, one = tmp_path / "history.sqlite", profile(0)
    same = dict.fromkeys(("dim", "batch_size", "lanes", "slots", "trainers", "shards", "k", "r"), 1) | {"model": "dlrm"}
    rows = []
    for steps in range(1000, 1041):
        add(path, Profile(same | {"steps": steps}, one.machine, one.processes, one.steps))
        if steps >= 1039:
            assert main(["history", "--history", str(path)]) == 0
            rows.append([line for line in capsys.readouterr().out.splitlines() if "dlrm" in line or "newest" in line])
    assert "1,000" in rows[0][0]
    assert len(rows[0]) == 40
    assert "1,001" in rows[1][0]
    assert "1,040" in rows[1][39]
    assert rows[1][40:] == ["these are the newest 40; --json FILE has all"]
