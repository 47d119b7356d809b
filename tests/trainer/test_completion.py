"""`foreload completion`: what a real shell completes by it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import done, refused

from foreload.trainer import cli

ASK = """
source "$1"
shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
completing=$(complete -p foreload)
completing=${completing#*-F }
${completing%% *}
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a user has it from `source <(foreload completion bash)`."""
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(done("completion", "bash"))
    return path


def completed(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    bash = shutil.which("bash")
    assert bash is not None
    told = subprocess.run([bash, "-c", ASK, "bash", str(script), *words], cwd=folder, check=True, capture_output=True, text=True)
    assert not told.stderr
    return set(told.stdout.split())


def commands(parser: argparse.ArgumentParser, *before: str) -> Iterator[tuple[str, ...]]:
    """Every command that there is, and those below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield (*before, name)
                yield from commands(below, *before, name)


def test_every_command_is_completed(script: Path, tmp_path: Path) -> None:
    known = list(commands(cli.parser()))
    assert len(known) > 30
    assert completed(script, tmp_path, "foreload", "") == {words[0] for words in known}
    for words in known:
        assert words[-1] in completed(script, tmp_path, "foreload", *words[:-1], words[-1][:2])


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("train", "--resu"), {"--resume", "--resume=auto"}),
        (("train", "clicks", "--row-optimizer", "ad"), {"adagrad", "adam"}),
        (("prepare", "--shuffle-s"), {"--shuffle-seed"}),
        (("checkpoint", "save", "--policy", "con"), {"consecutive"}),
        (("completion", "z"), {"zsh"}),
    ],
)
def test_flags_and_their_values_are_completed(script: Path, tmp_path: Path, words: tuple[str, ...], offered: set[str]) -> None:
    assert completed(script, tmp_path, "foreload", *words) == offered


@pytest.mark.parametrize(
    "words", [("evaluate", ""), ("train", "clicks", "--run", ""), ("train", "--job", ""), ("prepare", "--features", "")]
)
def test_paths_are_completed(script: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "job.toml").touch()
    assert completed(script, tmp_path, "foreload", *words) == {"first", "job.toml"}


def test_zsh_has_a_script_too_and_other_shells_are_named() -> None:
    assert done("completion", "zsh").startswith("#compdef foreload")
    assert "invalid choice: 'fish' (choose from 'bash', 'zsh')" in refused("completion", "fish")
