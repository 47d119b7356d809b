"""Commands of the campaign in processes forked from one that has imported everything: each is the command in every way but for the seconds of
importing, so that many more faults fit into the same time.

As a module this is the process that forks. It reads a request a line from stdin, {"words", "out", "err", "environment"}, and tells on stdout, a line
each, {"began": pid} and {"ended": pid, "status": of the process}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from command_line import ROOT
from warm import _IMPORTED

from foreload.pipelines.base.forking import THREADLESS, fork
from foreload.trainer.compute import numerics

_PREFORKED = 14
"""Keeper and trainers of a call, those that take the place of lost ones included."""


class Forks:
    """The campaign's side."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        """Stands in the command line of every process that is forked."""
        paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/trainer")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "campaign_forks", self.token],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | THREADLESS,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._began: queue.Queue[int] = queue.Queue()
        self.statuses: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "began" in told:
                self._began.put(told["began"])
            else:
                self.statuses[told["ended"]] = told["status"]

    def start(self, words: Sequence[str], out: Path, err: Path, environment: Mapping[str, str]) -> Forked:
        """Start a command."""
        assert self._process.stdin is not None
        request = {"words": list(words), "out": str(out), "err": str(err), "environment": dict(environment)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Forked(self, self._began.get(timeout=120))

    def processes(self) -> list[psutil.Process]:
        """All that were forked, and are alive."""
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.pid != self._process.pid
                    and self.token in process.cmdline()
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    alive.append(process)
        return alive

    def close(self) -> None:
        """End them all."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.kill()
        self._process.wait()


class Forked:
    """A command that was started: of subprocess.Popen what the campaign uses."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._forks.statuses.get(self.pid)

    def wait(self, timeout: float) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("foreload", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """As kill -9 does."""
        self.send_signal(signal.SIGKILL)


def _run(request: dict[str, Any]) -> int:
    """The command, in its process."""
    from foreload.trainer.cli import main
    from foreload.trainer.cluster.preforked import Preforked
    from foreload.trainer.commands.train import train

    with open(request["out"], "wb") as out, open(request["err"], "wb") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    os.environ.update(request["environment"])
    words = request["words"]
    if words[0] != "train":
        return main(words)
    with contextlib.closing(Preforked(_PREFORKED, lambda: None)) as processes:
        # Of whoever gives none of its own, as the command does.
        train.__defaults__ = (None, processes)
        return main(words)


def _serve() -> None:
    numerics.set_environment()
    for name in _IMPORTED:
        importlib.import_module(f"foreload.trainer.cluster.{name}")
    answers = os.fdopen(os.dup(1), "w")
    pending = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return
            pending += read
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            request = json.loads(line)

            def main(request: dict[str, Any] = request) -> int:
                answers.close()
                return _run(request)

            print(json.dumps({"began": fork(main)}), file=answers, flush=True)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                told = {"ended": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}
                print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
