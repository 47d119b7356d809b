"""foreload installed, from a wheel and in editable mode, used in a folder whose modules have the names of foreload's folders.

A model imports the user's modules, not foreload's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest
from command_line import free_port
from docs_pages import ROOT, blocks

# Its imports are the user's own modules, which have the names of foreload's folders: see `home`.
OWN_MODEL = """
import torch
import cache, pipelines.own, trainer

class Net(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.out = torch.nn.Linear(spec.width, trainer.OUTPUTS)

    def forward(self, dense, embeddings):
        return self.out(torch.cat(list(embeddings.values()), 1)).squeeze(1)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    built, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # From a copy: building leaves things behind.
    source = tmp_path_factory.mktemp("source") / "foreload"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", source], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", built, source], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, *built.glob("*.whl")], check=True)
    return target


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment in which this checkout is installed in editable mode, as `make venv` does."""
    checkout, environment = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("editable")
    # Building leaves things behind, so it has a folder of its own; the sources are those of this checkout.
    for name in ("foreload", "trainer", "cache", "pipelines", "setup.py", "pyproject.toml", "README.md"):
        (checkout / name).symlink_to(ROOT / name)
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    words = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    # The packages that foreload needs, installed but foreload: what .pth files of that folder do is not done again.
    Path(packages, "needed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    install = ["install", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--editable", str(checkout)]
    subprocess.run([*pip, *install], check=True)
    return environment / "bin"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of a user who has a trainer.py, a cache.py and a pipelines/."""
    (tmp_path / "trainer.py").write_text("OUTPUTS = 1\n")
    (tmp_path / "cache.py").write_text("")
    (tmp_path / "pipelines").mkdir()
    for name in ("__init__.py", "own.py"):
        (tmp_path / "pipelines" / name).write_text("")
    (tmp_path / "own.py").write_text(OWN_MODEL)
    return tmp_path


def run(home: Path, installed: Path, *command: str) -> str:
    """What a command prints that must succeed, as started in that folder with what is installed, the folder itself on Python's path."""
    path = os.pathsep.join([str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return printed(home, {"PYTHONPATH": f"{installed}{os.pathsep}.", "PATH": path}, *command)


def printed(home: Path, variables: Mapping[str, str], *command: str | Path) -> str:
    """What a command prints that must succeed, as started in that folder. variables: of its environment, beyond a user's, who has no PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    environment |= variables
    ended = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.full
def test_a_page_of_documentation_runs_from_top_to_bottom(installed: Path, home: Path) -> None:
    program = []
    for block in blocks(ROOT / "docs" / "api.md"):
        if block.file is not None:
            (home / block.file).write_text(block.text)
        elif block.language == "python":
            program.append(block.text)
    (home / "page.py").write_text("\n".join([*program, "print(foreload.__file__)"]))
    run(home, installed, sys.executable, "make_clicks.py")
    assert run(home, installed, sys.executable, "page.py").splitlines()[-1] == str(installed / "foreload" / "__init__.py")


@pytest.mark.full
def test_a_model_of_ones_own_imports_its_own_trainer_also_under_torchrun(installed: Path, home: Path) -> None:
    prepared = ["--format", "synthetic", "--rows", "3000", "--batch-size", "256", "--lanes", "2", "--eval-fraction", "0.1"]
    run(home, installed, "foreload", "prepare", *prepared, "--out", "clicks")
    training = ["train", "clicks", "--store", "local:3", "--dim", "4", "--model", "own.py:Net", "--digest"]
    here = run(home, installed, "foreload", *training, "--run", "here", "--trainers", "2")
    there = run(
        home, installed, "torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), "--no-python", "--", "foreload", *training,
        "--run", "there",
    )  # fmt: skip
    digest = [line for line in here.splitlines() if line.startswith("digest")]
    assert digest
    assert digest[0] in there.splitlines()
    assert run(home, installed, "foreload", "digest", "here").split() == digest[0].split()[1:]
    assert run(home, installed, "foreload", "evaluate", "there").startswith("log loss")


def test_in_editable_mode_a_model_imports_its_own_trainer_by_command_and_from_python(editable: Path, home: Path) -> None:
    prepared = ["--format", "synthetic", "--rows", "2000", "--batch-size", "256", "--lanes", "2", "--eval-fraction", "0.1"]
    printed(home, {}, editable / "foreload", "prepare", *prepared, "--out", "clicks")
    training = ["train", "clicks", "--store", "local:1", "--dim", "4", "--model", "own.py:Net", "--run", "command"]
    assert "log loss" in printed(home, {}, editable / "foreload", *training)
    (home / "page.py").write_text(
        "import foreload\n"
        "run = foreload.train('clicks', run='python', store='local:1', dim=4, model='own.py:Net')\n"
        "print(run.digest() == foreload.open_run('command').digest())\n"
    )
    assert printed(home, {}, editable / "python", "page.py") == "True\n"
