"""A Dask cluster on this machine: a scheduler and workers of one thread each, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

PATIENCE_SECONDS = 120.0


class DaskCluster:
    """The processes. flags: Beam's for `foreload prepare`; scheduler_file: what tells a client where the scheduler is."""

    def __init__(self, folder: Path, workers: int, environment: Mapping[str, str]) -> None:
        """folder: for logs and what processes leave; environment: of the processes."""
        self.scheduler_file = folder / "scheduler.json"
        self.flags = ["--runner=DaskRunner", f"--dask_scheduler_file={self.scheduler_file}"]
        self._folder, self._count, self._environment = folder, workers, dict(environment)
        self.workers: list[subprocess.Popen[bytes]] = []
        self._scheduler = self._start("scheduler", "--port=0")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.scheduler_file.exists():
            if self._scheduler.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Dask's scheduler does not start: see {folder / 'scheduler.log'}")
            time.sleep(0.05)
        self.restore()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", *words, f"--scheduler-file={self.scheduler_file}"]
        with (self._folder / f"{words[0]}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--host=127.0.0.1", "--no-dashboard"],
                env=self._environment, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def restore(self) -> None:
        """Start workers in place of those that have ended."""
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        while len(self.workers) < self._count:
            self.workers.append(self._start("worker", "--no-nanny", "--nthreads=1"))

    def stop(self) -> None:
        """End all processes."""
        for process in (*self.workers, self._scheduler):
            process.kill()
        for process in (*self.workers, self._scheduler):
            process.wait()
