"""The examples run from beginning to end, as a reader runs them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STEPS = ("ratings to train on", "learning rate 0.3", "report.html", "differ by")


def test_movielens(tmp_path: Path) -> None:
    made_up = runpy.run_path(str(EXAMPLES / "movielens.py"))["made_up"]
    ratings, movies = made_up(tmp_path, 4_000, 100, 60)
    command = [sys.executable, EXAMPLES / "movielens.py", "--ratings", ratings, "--movies", movies, "--out", tmp_path / "out"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [step for step in STEPS if step not in ended.stdout] == []
    assert (tmp_path / "out" / "report.html").read_text().lower().startswith("<!doctype html>")


@pytest.mark.parametrize("log", ["made up", pytest.param("the sample", marks=pytest.mark.full)])
def test_talkingdata(log: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = str(request.getfixturevalue("data") / "talkingdata" / "train_sample.csv") if log == "the sample" else ""
    done = tmp_path / "done.ipynb"
    # As `jupyter execute` does it, in processes of their own.
    command = [
        sys.executable,
        "-c",
        "from nbclient.cli import main; main()",
        f"--output={done}",
        str(EXAMPLES / "talkingdata.ipynb"),
    ]
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
