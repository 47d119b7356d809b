"""`foreload prepare` on a cluster, with a worker that is held at a stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
from portable_job import PIECE_ROWS, worker_environment
from waiting import DEADLINE_SECONDS, wait_until


class HeldPrepare:
    """The command, once the first worker that ends an element of a stage is held there (`disturbed.Held`).

    process: the command's; worker: the process that is held.
    """

    def __init__(self, words: list[str], where: str, folder: Path) -> None:
        """words: the command line; where: the stage's class; folder: for what the worker and this process tell each other."""
        self.folder = folder / f"held-{where}"
        self.folder.mkdir()
        call = f"prepare_held({words!r}, {where!r}, {str(self.folder)!r}, {PIECE_ROWS})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys\nfrom disturbed import prepare_held\nsys.exit({call})"],
            env=worker_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        wait_until(lambda: (self.folder / "held").exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        self.worker = psutil.Process(int((self.folder / "held").read_text()))

    def release(self) -> None:
        """Let the worker go on."""
        (self.folder / "release").touch()

    def went_on(self) -> bool:
        """Whether the worker has gone on, or has ended instead."""
        return (self.folder / "went on").exists() or not self.worker.is_running()

    def end(self) -> tuple[int, str]:
        """Wait until the command has ended; its status, and what it wrote to stderr."""
        _, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, err
