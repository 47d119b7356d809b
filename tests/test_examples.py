"""The examples run from beginning to end: here in this process, whose libraries are imported already, and in full as a reader runs them."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import nbformat
import pytest
from small_job import synthetic_schedule

import foreload
from foreload.api.results import EvaluationMetrics

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STEPS = ("ratings to train on", "learning rate 0.3", "report.html", "differ by")
NOTEBOOK = EXAMPLES / "talkingdata.ipynb"


@pytest.mark.parametrize("process", ["this one", pytest.param("its own", marks=pytest.mark.full)])
def test_movielens(process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(EXAMPLES / "movielens.py")
    ratings, movies = runpy.run_path(script)["made_up"](tmp_path, 4_000, 100, 60)
    command = [script, "--ratings", str(ratings), "--movies", str(movies), "--out", str(tmp_path / "out")]
    if process == "its own":
        ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        told = ended.stdout
    else:
        monkeypatch.setattr(sys, "argv", command)
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(script, run_name="__main__")
        told = out.getvalue()
    assert [step for step in STEPS if step not in told] == []
    assert (tmp_path / "out" / "report.html").read_text().lower().startswith("<!doctype html>")


def test_a_search_goes_on_where_it_stopped_and_keeps_the_best_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = synthetic_schedule(tmp_path / "clicks", 600, further="--eval-fraction 0.2 --eval-every 2")

    def search(trials: int) -> str:
        words = ["search.py", str(schedule), "--trials", str(trials), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", words)
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(EXAMPLES / "search.py"), run_name="__main__")
        return out.getvalue()

    search(1)
    told = search(2)
    assert told.startswith("trial 1 (2 of 2): ")
    assert "\n2 trials, 0 pruned; this call took " in told
    best = Path(told.splitlines()[-1].removeprefix("its run: "))
    assert [path for path in (tmp_path / "out").iterdir() if path.is_dir()] == [best]
    run = foreload.open_run(best)
    losses = [line.log_loss for line in run.metrics() if isinstance(line, EvaluationMetrics)]
    assert run.log_loss == min(loss for loss in losses if loss is not None)
    assert f"best: log_loss {run.log_loss:.5f}, AUC {run.auc:.4f}: " in told


def test_the_cells_of_talkingdata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.delenv("TALKINGDATA", raising=False)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    names: dict[str, object] = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, str(NOTEBOOK), "exec"), names)
    assert float(str(names["apart"])) <= 1e-6
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.full
@pytest.mark.parametrize("log", ["made up", "the sample"])
def test_talkingdata(log: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = ""
    if log == "the sample":
        sample = request.getfixturevalue("data") / "talkingdata" / "train_sample.csv"
        given = str(tmp_path / "train_sample.csv")
        # Two dots stand before the header there, which the log has not.
        Path(given).write_bytes(sample.read_bytes().removeprefix(b".."))
    done = tmp_path / "done.ipynb"
    # As `jupyter execute` does it, in processes of their own.
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", f"--output={done}", str(NOTEBOOK)]
    environment = {
        **os.environ,
        "TALKINGDATA": given,
        "OUT": str(tmp_path / "out"),
        "JUPYTER_PATH": "",
        "PYTHONWARNINGS": "default",
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    notebook = nbformat.read(done, as_version=4)
    (apart,) = notebook.cells[-1].outputs
    assert float(apart["data"]["text/plain"]) <= 1e-6
    assert (tmp_path / "out" / "report.html").exists()
