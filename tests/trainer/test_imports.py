"""What processes load: commands no library that they do not need, and trainers nothing of the tools around training.

A command that only looks at files, or asks a run, is there at once; torch alone takes more than a second of the processor's time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command
from small_job import arguments, synthetic_schedule

from foreload.trainer.cluster.processes.starting import WORKER

KERNELS = ("numba", "torch")
ALL_HEAVY = (*KERNELS, "apache_beam", "matplotlib", "pandas", "pyarrow", "redis", "tensorboard")
WHERE_ROWS_ARE_READ = ("torch", "apache_beam", "matplotlib", "pandas", "tensorboard")
CALLS: dict[str, tuple[str, ...]] = {
    "--help": ALL_HEAVY,
    "train --help": ALL_HEAVY,
    "status nowhere": ALL_HEAVY,
    "scale nowhere 2": ALL_HEAVY,
    "history": ALL_HEAVY,
    "checkpoint list nowhere": ALL_HEAVY,
    "checkpoint delete nowhere": ALL_HEAVY,
    "digest nowhere": (*WHERE_ROWS_ARE_READ, "pyarrow.compute"),
    "lookup nowhere table 1": WHERE_ROWS_ARE_READ,
    "scrub nowhere": WHERE_ROWS_ARE_READ,
    "delete nowhere": WHERE_ROWS_ARE_READ,
    "stores status nowhere": WHERE_ROWS_ARE_READ,
    "stores list unix:///nowhere.sock": WHERE_ROWS_ARE_READ,
}
"""Calls, and what they must not load. A run that is not there is missed only after all that the command needs is loaded."""
TOOLS = (
    "api",
    "trainer.cli",
    "trainer.command_line",
    "trainer.commands",
    "trainer.pages",
    "trainer.resources",
    "trainer.serving",
)
"""Packages of which a trainer loads nothing, and neither of those that prepare schedules."""
PREPARING = ("pipelines.beam", "pipelines.compiler", "pipelines.prepare", "pipelines.sources")
_LOADED = """
import contextlib, io, sys
from foreload.__main__ import main
sys.argv = ["foreload", *sys.argv[1:]]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(*sys.modules)
"""
_MODEL = """
import json
import os
import sys

from foreload.trainer.models.dlrm import DLRM


class Notes(DLRM):
    def forward(self, dense, embeddings):
        with open(f"loaded-by-{os.getpid()}.json", "w") as file:
            json.dump([sys.orig_argv, *sys.modules], file)
        return super().forward(dense, embeddings)
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_command_loads_what_it_needs(call: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _LOADED, *call.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loaded = set(ended.stdout.split())
    assert "foreload.trainer.cli" in loaded, ended.stderr
    assert not loaded & set(CALLS[call])


def test_a_trainer_loads_nothing_of_the_tools(tmp_path: Path) -> None:
    """After steps, evaluations and checkpoints; what each process has loaded stands in a file of its own."""
    (tmp_path / "notes.py").write_text(_MODEL)
    schedule = synthetic_schedule(tmp_path, 1200, lanes=2, slots=900, further="--eval-fraction 0.1 --eval-every 5")
    given = ("--model", "notes.py:Notes", "--trainers", "2", "--checkpoint-every", "5", "--no-report")
    status, _, err = Command(*arguments(schedule, Path("run"), "--store", "local:1", *given), anew=True, folder=tmp_path).end()
    assert status == 0, err
    by_process = [json.loads(path.read_text()) for path in tmp_path.glob("loaded-by-*.json")]
    trainers = [loaded for words, *loaded in by_process if WORKER in words]
    assert len(trainers) == 2
    for loaded in trainers:
        own = [name.removeprefix("foreload.") for name in loaded if name.startswith("foreload.")]
        assert not [name for name in own if name.startswith((*TOOLS, *PREPARING))]
