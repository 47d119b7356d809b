"""Commands as `command_line` has them, in processes that are forked from one that has imported everything: no seconds of importing for each."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import psutil
from command_line import ROOT, Command, Remains, error_of
from forker import FORKER


class ForkedPopen:
    """A command that was forked, with as much of subprocess.Popen as tests ask for. Arguments: as Forker.command has them."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        number, path = tempfile.mkstemp(prefix="trainers")
        os.close(number)
        self._arguments, self.trainers = list(arguments), Path(path)
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self._forked = FORKER.command(self._arguments, environment, name, self.trainers, to_out, to_err)
        os.close(to_out)
        os.close(to_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._texts: tuple[str, str] | None = None

    @property
    def pid(self) -> int:
        """Its number, which is that of its process group, too."""
        return self._forked.pid

    @property
    def returncode(self) -> int | None:
        """What it ended with, the negative number of the signal that ended it, or None."""
        return self._forked.poll()

    def poll(self) -> int | None:
        """The same."""
        return self._forked.poll()

    def wait(self, timeout: float | None = None) -> int:
        """What it ends with. Raises TimeoutExpired."""
        self._forked.wait(None if timeout is None else timedelta(seconds=timeout))
        if (status := self._forked.poll()) is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """If it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and nothing else."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Output and errors, up to the end of all that writes to them. Raises TimeoutExpired."""
        if self._texts is None:
            read: dict[str, str] = {}

            def read_all(name: str, stream: TextIO) -> None:
                read[name] = stream.read()

            threads = [
                threading.Thread(target=read_all, args=given, daemon=True)
                for given in (("out", self.stdout), ("err", self.stderr))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout)
            if any(thread.is_alive() for thread in threads):
                raise subprocess.TimeoutExpired(self._arguments, timeout or 0)
            self._texts = read["out"], read["err"]
            self.stdout.close()
            self.stderr.close()
            self.trainers.unlink()
        self.wait(timeout)
        return self._texts


class ForkedCommand(Command):
    """A `foreload` command that is forked; one that would have libraries read other settings is started anew."""

    def __init__(self, *arguments: object) -> None:
        words = [str(argument) for argument in arguments]
        if not FORKER.can_fork(words):
            super().__init__(*words)
            return
        self.remains = Remains()
        variables = os.environ | {"PYTHONPATH": str(ROOT)} | self.remains.environment
        self.process = ForkedPopen(words, variables, self.remains.name)

    @property
    def workers(self) -> list[psutil.Process]:
        """See Command."""
        if not isinstance(self.process, ForkedPopen):
            return super().workers
        alive = {process.pid: process for process in self.remains.processes()}
        started = sorted(tuple(map(int, line.split())) for line in self.process.trainers.read_text().splitlines())
        return [alive[pid] for _, pid in started if pid in alive]


def refused_apart(*arguments: object, **environment: str) -> str:
    """Run a command that must be refused in a process of its own, where nothing of it can hide; returns the line that says why."""
    command = Command(*arguments, **environment) if environment else ForkedCommand(*arguments)
    status, _, err = command.end()
    return error_of(status, err)
