"""A `foreload train` of a test's own, in processes, as a user starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from trainer.coordinator import ask

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 120


def arguments(schedule: Path, run: Path, *further: str) -> list[str]:
    """The command line, without the program's name, that trains a small model."""
    return [
        "train",
        str(schedule),
        "--run",
        str(run),
        "--dim",
        "4",
        "--lr",
        "0.02",
        "--model-options",
        "top=8-1",
        "bottom=8-4",
        *further,
    ]


class Launched:
    """A launcher in a process of its own, with every process that it started."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None, module: str = "trainer.cli") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *command],
            cwd=ROOT, env=os.environ | (environment or {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started: set[psutil.Process] = set()

    def until(self, satisfied: Callable[[], bool]) -> None:
        """Wait for something that the launcher brings about."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not satisfied():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.started |= set(psutil.Process(self.process.pid).children(recursive=True))

    def end(self) -> tuple[int, str, str]:
        """Exit status, output and errors; asserts that no process is left."""
        out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        _, alive = psutil.wait_procs(self.started, timeout=10)
        assert not alive
        return self.process.returncode, out, err

    def clear(self) -> None:
        """Let no process be left, whatever became of it."""
        for process in self.started:
            if process.is_running():
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    @property
    def workers(self) -> list[psutil.Process]:
        """The trainers' processes, in order."""
        found = [process for process in self.started if "trainer.worker" in process.cmdline()]
        return sorted(found, key=lambda process: int(process.environ()["FORELOAD_TRAINER"]))


def reached(run: Path, step: int) -> Callable[[], bool]:
    """Whether the run tells through its control socket that it has trained a step."""

    def asked() -> bool:
        told = ask(run, {"do": "status"})
        return told is not None and told["step"] >= step

    return asked


def summary(run: Path) -> dict[str, object]:
    """What the run's summary.json says."""
    found: dict[str, object] = json.loads((run / "summary.json").read_text())
    return found


def free_port() -> str:
    """A TCP port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
