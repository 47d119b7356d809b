"""How the launcher starts the processes of a call, its rendezvous host and its trainers, and ends them: one function, so that another may stand in
for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from foreload.base.own_process import command_of
from foreload.trainer.cluster.messages.codec import decode, encode

WORKER, RENDEZVOUS_HOST = "foreload.trainer.cluster.member.worker", "foreload.trainer.cluster.processes.rendezvous_host"
_TRAINER, _START = "FORELOAD_TRAINER", "FORELOAD_START"


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """A process to be started. module: WORKER or RENDEZVOUS_HOST, whose `main` it runs; arguments: its command line, to which the descriptors'
    numbers are appended.

    environment: variables beyond the launcher's. descriptors: what it inherits, and keeps open for as long as it lives.
    """

    module: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()


class StartedProcess(Protocol):
    """A process that was started, from the launcher's side."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """The status that it ended with, the negative number of the signal that ended it, or None while it is at work."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when it has ended, or when the time is over."""

    def kill(self) -> None:
        """End it at once, with what it has started itself, if it has not ended."""


StartProcess = Callable[[ProcessStart], StartedProcess]


@dataclass(frozen=True, slots=True)
class OnHost:
    """What a trainer of a job over several hosts knows of the host that it is on. token: the job's; has_run: whether the run's folder is here;
    schedule: the folder of the schedule here, None where that is as on the coordinator's host.
    """

    token: str
    has_run: bool
    schedule: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerStart:
    """What a trainer is started with; all else it finds in the rendezvous store. rendezvous: the address of the rendezvous store, which the
    rendezvous is on, "HOST:PORT"; address: of this machine, at which other trainers reach this one.

    store_urls: with passwords; None: those of the plan. launcher: the process that it leaves with before training begins. plan: of a trainer
    that is started while others train, the version of the plan that has these URLs; None: it is one of the first. on_host: of a job over several
    hosts.
    """

    trainer: int
    rendezvous: str
    address: str
    store_urls: tuple[str, ...] | None
    launcher: int
    plan: int | None = None
    on_host: OnHost | None = None

    def environment(self) -> dict[str, str]:
        """These fields as variables of the process's environment: all of them, and the trainer's number, by which a process is found."""
        return {_TRAINER: str(self.trainer), _START: encode(self)}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> TrainerStart:
        """The inverse of `environment`."""
        return decode(environment[_START], cls)


class ChildProcess:
    """A process as a child of the launcher, in a session of its own: Ctrl-C is for the launcher, which stops all after the same step."""

    def __init__(self, start: ProcessStart) -> None:
        self._process = subprocess.Popen(
            command_of(start.module, *start.arguments, *map(str, start.descriptors)), env=os.environ | start.environment,
            stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=start.descriptors,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """See StartedProcess."""
        return self._process.pid

    def poll(self) -> int | None:
        """See StartedProcess."""
        return self._process.poll()

    def wait(self, timeout: timedelta | None = None) -> None:
        """See StartedProcess."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(None if timeout is None else timeout.total_seconds())

    def kill(self) -> None:
        """See StartedProcess."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def pause(processes: Iterable[StartedProcess], at_most: timedelta, wakes: int) -> None:
    """Return after a while, or as soon as one of these processes, none of which has ended by `poll`, ends, or a descriptor can be read from."""
    with contextlib.ExitStack() as stack:
        watched = select.poll()
        watched.register(wakes, select.POLLIN)
        try:
            for process in processes:
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                watched.register(descriptor, select.POLLIN)
        except (AttributeError, OSError):
            # No such call on this system, or none left.
            time.sleep(at_most.total_seconds())
            return
        watched.poll(1000 * at_most.total_seconds())
