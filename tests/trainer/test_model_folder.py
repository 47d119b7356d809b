"""Where a model of one's own is found: a run remembers it, whatever folder its commands are called in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import done, refused

from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import load_model
from foreload.trainer.run.directory import Run

OWN = """
from {sibling} import Sum

class Net(Sum):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with net_of_ones_own.py, which needs a module beside it; the working directory is an empty one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "net_of_ones_own.py").write_text(OWN.format(sibling="beside_the_net"))
    (home / "beside_the_net.py").write_text((Path(__file__).parent / "model_cases.py").read_text())
    monkeypatch.chdir(elsewhere)
    return home


def forget(folder: Path) -> None:
    """Have a folder's modules imported anew, as another process does."""
    for name, module in list(sys.modules.items()):
        if str(folder) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["net_of_ones_own:Net", "net_of_ones_own.py:Net"])
def test_a_model_is_found_in_the_folder_given(folder: Path, name: str) -> None:
    with pytest.raises(ModelError, match=f"cannot import {name}: .*; looked for it in {Path.cwd()}: put it there"):
        load_model(name)
    assert load_model(name, str(folder)) is load_model(name, str(folder))
    forget(folder)


def test_a_run_is_read_from_another_folder(folder: Path, clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as there:
        there.chdir(folder)
        done("train", clicks.schedule, "--run", run, "--store", "local:1", "--dim", 4, "--model", "net_of_ones_own.py:Net")
    assert Run.open(run).manifest.training_job.model_folder == str(folder)
    forget(folder)
    assert re.match("log loss 0", done("evaluate", run))
    forget(folder)
    (folder / "net_of_ones_own.py").unlink()
    assert refused("evaluate", run).startswith(
        f"model: cannot import net_of_ones_own.py:Net: FileNotFoundError: there is no file net_of_ones_own.py; looked for it in {folder} and "
        f"{Path.cwd()}: put it there"
    )
