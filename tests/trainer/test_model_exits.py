"""A model's code that ends the process which runs it: that is said, and the exit status means what foreload's own statuses mean."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import Command, done, refused

from foreload.trainer.cluster.ending import ended_how
from foreload.trainer.errors import ModelError
from foreload.trainer.run.model_code import exits_reported

MODEL = """
import ctypes, os, sys
import torch
from torch import nn


class Leaves(nn.Module):
    def __init__(self, spec, *, how: str = "", where: str = ""):
        super().__init__()
        self.how = how if where == "trainer" and "FORELOAD_TRAINER" in os.environ or where == "any" else ""
        self.how = self.how or os.environ.get("LEAVES", "")
        self.out = nn.Linear(spec.dense_width + spec.width, 1)

    def forward(self, dense, embeddings):
        if self.how:
            eval(self.how)
        return self.out(torch.cat([dense, *embeddings.values()], 1)).squeeze(1)
"""
LINE = 1 + MODEL[: MODEL.index("eval(self.how)")].count("\n")
IN_C = "ctypes.CDLL(None)._exit(3)"


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "leaves.py"
    path.write_text(MODEL)
    return path


def training(clicks: Clicks, how: str, where: str, trainers: int = 1) -> tuple[object, ...]:
    options = ("--model", "leaves.py:Leaves", "--model-options", f"how={how}", f"where={where}")
    return ("train", clicks.schedule, "--run", "run", "--store", "local:1", "--dim", 4, "--trainers", trainers, *options)


@pytest.mark.parametrize("call", ["os._exit(3)", "os._exit(0)", "sys.exit(3)", "sys.exit()"])
@pytest.mark.parametrize("where", ["any", "trainer"])
def test_a_call_that_ends_the_process_is_told_with_its_line(clicks: Clicks, call: str, where: str) -> None:
    line = refused(*training(clicks, call, where, trainers=2))
    said, _, rest = line.partition(": ")
    assert said in (["foreload train"] if where == "any" else ["trainer 0", "trainer 1"])
    assert rest == (
        f"the model's code, or a library, called {call} (leaves.py, line {LINE}), which would end the process without a message; raise an exception "
        "there that says what is wrong"
    )
    assert os._exit.__module__ == "posix"


def test_commands_that_run_a_saved_model_tell_it_too(clicks: Clicks, monkeypatch: pytest.MonkeyPatch) -> None:
    done(*training(clicks, "", "any"))
    monkeypatch.setenv("LEAVES", "os._exit(3)")
    assert refused("evaluate", "run").startswith(
        "foreload evaluate: the model's code, or a library, called os._exit(3) (leaves.py"
    )
    line = refused("check-model", "leaves.py:Leaves", "--features", clicks.features)
    assert line.startswith("foreload check-model: the model's code, or a library, called os._exit(3) (leaves.py")


def test_an_exit_that_python_does_not_see_is_told_by_the_trainers_status(clicks: Clicks) -> None:
    assert refused(*training(clicks, IN_C, "trainer")).startswith(
        "trainer 0 (lanes 0, 1): exited with status 3 without a message: the model's code, or a library, called exit; the others were stopped"
    )


def test_a_crash_of_native_code_leaves_the_line_that_it_was_in(clicks: Clicks) -> None:
    status, _, err = Command(*training(clicks, "os.abort()", "trainer")).end()
    assert status == 2
    assert f'leaves.py", line {LINE} in forward' in err
    assert "foreload: error: trainer 0 (lanes 0, 1): was killed by SIGABRT; the others were stopped" in err


def test_no_status_of_a_trainer_means_what_it_does_of_a_command() -> None:
    assert [ended_how(status).partition(":")[0] for status in (0, 2, 3)] == [
        f"exited with status {status} without a message" for status in (0, 2, 3)
    ]
    assert ended_how(-signal.SIGSEGV) == "was killed by SIGSEGV"


def test_a_fork_and_other_threads_exit_as_they_would() -> None:
    with exits_reported("here"):
        child = os.fork()
        if not child:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with (
        pytest.raises(ModelError, match=r"here: .* called os\._exit\(7\) \(test_model_exits\.py, line \d+\)"),
        exits_reported("here"),
    ):
        os._exit(7)
