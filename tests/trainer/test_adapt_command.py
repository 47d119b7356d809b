"""`foreload adapt`: a skeleton for a module that `wrap` refuses, which can be checked, trained and completed."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import done, refused

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.tags = nn.Embedding(50, 8), nn.EmbeddingBag(20, 4, mode="max")
        self.again = nn.ModuleDict({"x": self.item})
        self.out = nn.Linear(12, 1)

    def forward(self, item, tags):
        return self.out(torch.cat([self.item(item), self.tags(tags) * (tags != 0)], 1))


class Sized(Net):
    def __init__(self, size):
        super().__init__()


def net():
    return Net()


def none():
    return 3


def bare():
    return nn.Linear(3, 1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "adaptable.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["Net", "net"])
def test_the_skeleton_passes_the_check_and_has_the_modules_forward(name: str, folder: Path) -> None:
    written = done("adapt", f"adaptable.py:{name}", "--out", "adapted.py")
    assert written.startswith("adapted.py:Adapted: a skeleton with 2 features, item, tags; their columns are in adapted.toml\n")
    checked = done("check-model", "adapted.py:Adapted", "--features", "adapted.toml")
    assert "adapted.py:Adapted: 2 features, 0 dense values, 26 parameters; forward and backward work" in checked
    text = (folder / "adapted.py").read_text()
    assert "        #       return self.out(torch.cat([self.item(item), self.tags(tags) * (tags != 0)], 1))\n" in text
    assert '    "item": ["item", "again.x"],  # 50 rows\n' in text


def test_what_cannot_be_adapted_is_refused_and_nothing_is_written(folder: Path) -> None:
    cases = [
        (
            ("adaptable.py:Sized",),
            "MODEL: adaptable.py:Sized() failed: TypeError: ",
            "if it needs arguments, give a function that builds it",
        ),
        (("adaptable.py:none",), "MODEL: adaptable.py:none() must return a torch.nn.Module; got int", ""),
        (
            ("adaptable.py:bare",),
            "MODEL: Linear has no nn.Embedding or nn.EmbeddingBag, so there is nothing to adapt; use wrap",
            "",
        ),
        (("adaptable.py:nothing",), "MODEL: cannot import adaptable.py:nothing: AttributeError", ""),
        (
            ("adaptable.py",),
            "MODEL: must be file.py:Class or package.module:Class, of names that Python can import; got 'adaptable.py'",
            "",
        ),
    ]
    for given, *messages in cases:
        line = refused("adapt", *given, "--out", "adapted.py")
        assert all(message in line for message in messages), line
    assert "--out: must be beside adaptable.py, which it imports; got 'there/adapted.py'" in refused(
        "adapt", "adaptable.py:Net", "--out", "there/adapted.py"
    )
    assert "--out: must not be adaptable.py itself" in refused(
        "adapt", "adaptable.py:Net", "--out", "adaptable.py", "--overwrite"
    )
    assert "--out: must be a file NAME.py, whose name Python can import; got 'a-b.py'" in refused(
        "adapt", "adaptable.py:Net", "--out", "a-b.py"
    )
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["adaptable.py"]


def test_existing_files_are_replaced_only_if_told(folder: Path) -> None:
    (folder / "adapted.toml").write_text("mine")
    assert "--out: adapted.toml exists; give another name, or --overwrite" in refused(
        "adapt", "adaptable.py:Net", "--out", "adapted.py"
    )
    assert (folder / "adapted.toml").read_text() == "mine"
    assert not (folder / "adapted.py").exists()
    done("adapt", "adaptable.py:Net", "--out", "adapted.py", "--overwrite")
    done("check-model", "adapted.py:Adapted", "--features", "adapted.toml")
