"""A run records the files of its model; whoever runs or hands out the model with others is refused, or accepts that, which the run notes."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clicks import Clicks, write_log
from command_line import done, refused, run_here

import foreload
from foreload.trainer.errors import ModelError, RunError
from foreload.trainer.models.own_code import own_files
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.out = nn.Linear(spec.dense_width + spec.width, 1)

    def forward(self, dense, embeddings):
        from PARTS import scale  # found though it stands in a function

        return scale.FACTOR * self.out(torch.cat([dense, *embeddings.values()], 1)).squeeze(1)
"""
LOSS = """
from torch.nn import functional


def plain(outputs, labels):
    return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
"""
TRAINING = ("--store", "local:1", "--dim", 4, "--model", "net.py:Net")
# Each test has a name of its own: processes that tests fork trainers from have the working directory of the first test on Python's path.
_numbers = itertools.count()


@dataclass(frozen=True)
class Home:
    """The working directory: a model, and a package beside it that it imports."""

    path: Path
    package: str

    @property
    def scale(self) -> str:
        """The file that the model takes a figure from."""
        return f"{self.package}/scale.py"

    def write(self, name: str, text: str) -> None:
        """Write a file, and have the model imported anew, as another process does."""
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_text(text.replace("PARTS", self.package))
        self.forget()

    def edit(self) -> None:
        """Change that figure."""
        self.write(self.scale, "FACTOR = 3.0\n")

    def forget(self) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith(self.package) or str(self.path) in (getattr(module, "__file__", None) or ""):
                del sys.modules[name]

    @property
    def sums(self) -> dict[str, str]:
        return {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in ("net.py", self.scale)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    home = Home(tmp_path / "home", f"parts_of_net_{next(_numbers)}")
    home.write("net.py", NET)
    home.write(home.scale, "FACTOR = 1.0\n")
    home.write("unrelated.py", "")
    yield home
    home.forget()


def train_model(clicks: Clicks, run: str = "run", *further: object) -> Path:
    done("train", clicks.schedule, "--run", run, *TRAINING, *further)
    return Path(run)


def test_the_files_of_a_model_are_those_of_its_folder_that_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sources = {
        "models/own_net.py": "import random, torch, foreload, own_helper\ndef late():\n    from own_package.inner import leaf",
        "models/own_helper.py": "import own_package.other",
        "models/own_package/__init__.py": "from . import sibling",
        "models/own_package/sibling.py": "from .no_such import thing",
        "models/own_package/other.py": "",
        "models/own_package/inner/leaf.py": "from ...too_far import x",  # a folder without __init__.py
        "models/random.py": "",  # hidden by the standard library's
        "models/unrelated.py": "",
        "losses/own_loss.py": "import own_helper_of_losses",
        "losses/own_helper_of_losses.py": "import own_broken",
        "losses/own_broken.py": "not Python",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    left_out = {"models/random.py", "models/unrelated.py"}
    files = own_files(["models/own_net.py:Net", "losses/own_loss.py:loss"], str(tmp_path))
    assert files == {name: tmp_path / name for name in sorted(set(sources) - left_out)}
    by_modules = own_files(["own_helper:Net"], str(tmp_path / "models"))
    assert list(by_modules) == [
        "own_helper.py", "own_package/__init__.py", "own_package/other.py", "own_package/sibling.py"
    ]  # fmt: skip
    outside = own_files([f"{tmp_path}/models/own_helper.py:Net"], str(tmp_path / "losses"))
    assert list(outside) == list(by_modules)


def test_of_installed_packages_the_models_own_counts() -> None:
    assert own_files(["foreload.trainer.models.dlrm:DLRM"], "") == {}
    installed = own_files(["safetensors.torch:save"], "")
    assert {"safetensors/__init__.py", "safetensors/torch.py"} <= set(installed)
    assert all(name.startswith("safetensors/") for name in installed)


def test_other_code_is_refused_wherever_the_model_is_run_or_handed_out(home: Home, clicks: Clicks) -> None:
    run = train_model(clicks)
    manifest = Run.open(run).manifest
    assert {file.name: file.sha256 for file in manifest.code} == home.sums
    done("checkpoint", "save", run)
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    figures, digest = done("evaluate", run), done("digest", run)
    home.edit()
    of_run = Run.open(run).code_copy(manifest)
    commands: list[tuple[Path, list[object]]] = [
        (run, ["evaluate", run]),
        (run, ["predict", run, clicks.log, "--out", "scores.csv"]),
        (run, ["export", run, "--out", "exported"]),
        (run, ["export", run, "--format", "torch", "--dense", "weights", "--out", "exported"]),
        (run, ["train", "--run", run, "--resume"]),
        (checkpoint, ["evaluate", checkpoint]),
        (checkpoint, ["export", checkpoint, "--format", "torch", "--out", "exported"]),
        (checkpoint, ["train", clicks.schedule, "--run", "further", "--store", "local:1", "--from", checkpoint]),
    ]
    for place, words in commands:
        kind, copy = ("run", of_run) if place == run else ("checkpoint", checkpoint / "model")
        assert refused(*words) == (
            f"{kind} {place}: the code of its model is not what it was trained with: {home.path / home.scale} has other contents; "
            "put the former code back, of "
            f"which {copy} has a copy, or go on with the code as it is with --accept-model"
        )
        assert (copy / home.scale).read_text() == "FACTOR = 1.0\n"
    assert not any(Path(name).exists() for name in ("scores.csv", "exported", "further"))
    # What does not run the model goes on.
    assert done("digest", run) == digest
    home.write("net.py", NET.replace("import scale", "import scale, further"))
    home.write(f"{home.package}/further.py", "")
    line = refused("evaluate", run)
    assert f"{home.path / 'net.py'} has other contents, {home.path / home.scale} has other" in line
    assert f"{home.path / home.package / 'further.py'} was not imported before" in line
    shutil.copytree(of_run, home.path, dirs_exist_ok=True)
    home.forget()
    assert done("evaluate", run) == figures


def test_what_is_accepted_is_told_and_noted(home: Home, clicks: Clicks, tmp_path: Path) -> None:
    run = train_model(clicks)
    before = Run.open(run).manifest
    figures = done("evaluate", run)
    home.edit()
    change = f"{home.path / home.scale} has other contents"
    warning = f"foreload: warning: run {run}: the code of its model is not what it was trained with: {change}\n"
    status, out, err = run_here("evaluate", run, "--accept-model")
    assert (status, err) == (0, warning)
    assert out != figures
    accepted = [event for event in read_events(run) if event["kind"] == "code-accepted"]
    assert [event["cause"] for event in accepted] == [change]
    done("export", run, "--accept-model", "--out", "exported")
    further = tmp_path / "further"
    done("prepare", write_log(tmp_path / "more.csv", 300), "--after", clicks.schedule, "--out", further)
    status, out, err = run_here("train", further, "--run", run, "--resume", "--accept-model")
    assert status == 0, err
    assert warning in err
    after = Run.open(run).manifest
    first = before.stages[0].end_step
    then, now = ({file.name: file.sha256 for file in one.code} for one in (before, after))
    assert now == home.sums != then
    assert after.mixed_code == ({"step": 0, "code": then}, {"step": first, "code": now})
    told = f"code of the model changed: from step {first} on {home.scale}"
    assert told in out.splitlines()
    assert told in done("digest", run, "--json", "digest.json").splitlines()
    assert json.loads(Path("digest.json").read_text(encoding="utf-8"))["mixed_code"] == list(after.mixed_code)
    assert json.loads((run / "summary.json").read_text())["mixed_code"] == list(after.mixed_code)
    assert [(Run.open(run).code_copy(one) / home.scale).read_text() for one in (before, after)] == [
        "FACTOR = 1.0\n",
        "FACTOR = 3.0\n",
    ]
    assert done("evaluate", run, clicks.schedule).startswith("log loss")
    assert len([event for event in read_events(run) if event["kind"] == "code-accepted"]) == 3


def test_a_checkpoint_goes_on_with_other_code_that_is_accepted(home: Home, clicks: Clicks, tmp_path: Path) -> None:
    run = train_model(clicks)
    before = Run.open(run).manifest
    done("checkpoint", "save", run)
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    home.edit()
    # A run that only rests is still of the code that the checkpoint is of.
    done("checkpoint", "restore", checkpoint, "--run", "rests", "--store", "local:1")
    assert {file.sha256 for file in Run.open("rests").manifest.code} == {file.sha256 for file in before.code}
    assert refused("evaluate", "rests").startswith("run rests: the code of its model is not what it was trained with")
    further = tmp_path / "further"
    done("prepare", write_log(tmp_path / "more.csv", 300), "--after", clicks.schedule, "--out", further)
    status, _, err = run_here("train", further, "--run", "on", "--store", "local:1", "--from", checkpoint, "--accept-model")
    assert status == 0, err
    assert f"warning: checkpoint {checkpoint}: the code of its model is not what it was trained with" in err
    code = [{file.name: file.sha256 for file in manifest.code} for manifest in (before, Run.open("on").manifest)]
    steps = [0, before.stages[0].end_step]
    assert list(Run.open("on").manifest.mixed_code) == [
        {"step": step, "code": one} for step, one in zip(steps, code, strict=True)
    ]
    assert [event["kind"] for event in read_events(Path("on"))].count("code-accepted") == 1
    line = refused("train", clicks.schedule, "--run", "new", *TRAINING, "--accept-model")
    assert line.startswith("--accept-model: is for continuing a run; give it with --resume or --from")


def test_a_loss_of_ones_own_is_code_of_the_model(home: Home, clicks: Clicks) -> None:
    home.write("loss_of_ones_own.py", LOSS)
    run = train_model(clicks, "run", "--loss", "loss_of_ones_own.py:plain")
    home.write("loss_of_ones_own.py", LOSS + "# another line\n")
    assert f"{home.path / 'loss_of_ones_own.py'} has other contents" in refused("evaluate", run)
    (home.path / "loss_of_ones_own.py").unlink()
    home.forget()
    assert "loss_of_ones_own.py was removed, or is no longer imported" in refused(
        "predict", run, clicks.log, "--out", "scores.csv"
    )


def test_trainers_compare_their_files_with_the_launchers(home: Home, clicks: Clicks) -> None:
    # The launcher has read it before the first trainer does.
    changing = (
        "import os\nif 'FORELOAD_TRAINER' in os.environ:\n    with open(SCALE, 'a') as file:\n        file.write('# changed')\n"
    )
    home.write("net.py", changing.replace("SCALE", repr(home.scale)) + NET)
    line = refused("train", clicks.schedule, "--run", "run", *TRAINING)
    assert line.startswith("trainer 0 on ")
    assert (
        f": the code of its model is not what the job began with: {home.path / home.scale} has other contents; put the same files there"
        in line
    )


def test_a_run_of_an_earlier_version_goes_on(home: Home, clicks: Clicks) -> None:
    run = train_model(clicks)
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["code"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    home.edit()
    assert done("evaluate", run).startswith("log loss")


@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py", "a/../../evil.py"])
def test_a_file_outside_of_the_copy_is_refused(home: Home, clicks: Clicks, name: str) -> None:
    run = train_model(clicks)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["code"][0]["name"] = name
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        RunError, match=r"manifest\.json is damaged: Manifest\.code\.name: must be the name of a file in the same folder"
    ):
        _ = Run.open(run).manifest


def test_from_python(home: Home, clicks: Clicks) -> None:
    run = foreload.open_run(train_model(clicks))
    figures = run.evaluate()
    home.edit()
    with pytest.raises(ModelError, match="the code of its model is not what it was trained with"):
        run.evaluate()
    accepted = foreload.open_run(run, accept_model=True).evaluate()
    assert accepted.log_loss != figures.log_loss
