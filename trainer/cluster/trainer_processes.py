"""How the launcher starts a trainer's process, and ends it: one function, so that something else may start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from foreload.trainer.cluster.keeper import program_path

_STORES, _RENDEZVOUS, _TRAINER, _LAUNCHER = "FORELOAD_STORES", "FORELOAD_RENDEZVOUS", "FORELOAD_TRAINER", "FORELOAD_LAUNCHER"


@dataclass(frozen=True, slots=True)
class TrainerStart:
    """What a trainer is started with; all else it finds on the board. rendezvous: where the store of that is, "HOST:PORT".

    store_urls: with passwords; None for those of the board. launcher: the process that it leaves with before training begins. held: descriptors
    that it keeps open for as long as it lives.
    """

    trainer: int
    rendezvous: str
    store_urls: tuple[str, ...] | None
    launcher: int
    held: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        """The same as variables of the process's environment, but for `held`."""
        return {
            _TRAINER: str(self.trainer),
            _RENDEZVOUS: self.rendezvous,
            _STORES: json.dumps(self.store_urls),
            _LAUNCHER: str(self.launcher),
        }

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> TrainerStart:
        """The inverse of `environment`."""
        urls = json.loads(environment[_STORES])
        return cls(
            int(environment[_TRAINER]),
            environment[_RENDEZVOUS],
            None if urls is None else tuple(urls),
            int(environment[_LAUNCHER]),
        )


class StartedTrainer(Protocol):
    """A trainer's process, from the launcher's side."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """The status that it ended with, the negative number of the signal that ended it, or None while it is at work."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when it has ended, or when the time is over."""

    def kill(self) -> None:
        """End it at once, if it has not ended."""


StartTrainer = Callable[[TrainerStart], StartedTrainer]


class ChildProcess:
    """A trainer as a child of the launcher, in a session of its own: Ctrl-C is for the launcher, which stops all after the same step."""

    def __init__(self, start: TrainerStart) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "foreload.trainer.cluster.worker"],
            env=os.environ | {"PYTHONPATH": program_path()} | start.environment(),
            stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=start.held,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """See StartedTrainer."""
        return self._process.pid

    def poll(self) -> int | None:
        """See StartedTrainer."""
        return self._process.poll()

    def wait(self, timeout: timedelta | None = None) -> None:
        """See StartedTrainer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(None if timeout is None else timeout.total_seconds())

    def kill(self) -> None:
        """See StartedTrainer; what it has started itself ends, too."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
