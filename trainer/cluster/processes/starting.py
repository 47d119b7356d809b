"""How the launcher starts and ends the processes of a call: its rendezvous host and its trainers.

It starts all of them through one function, which can be replaced (`preforked`).
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
    """A process to be started.

    Attributes:
        module: WORKER or RENDEZVOUS_HOST. The process runs the module's `main`.
        arguments: Command line, to which the numbers of the descriptors are appended.
        environment: Variables in addition to the launcher's environment.
        descriptors: Descriptors that the process inherits, and keeps open as long as it lives.
    """

    module: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()


class StartedProcess(Protocol):
    """A process that was started, from the launcher's side.

    Attributes:
        is_here: Whether the process is on this machine.
    """

    is_here: bool

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return the exit status, the negative number of a fatal signal, or None while it runs."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the process has ended, or until the timeout is over."""

    def kill(self) -> None:
        """Kill the process and all that it has started itself, unless it has ended."""


StartProcess = Callable[[ProcessStart], StartedProcess]


@dataclass(frozen=True, slots=True)
class OnHost:
    """What a trainer of a job over several hosts knows about its own host.

    Attributes:
        token: Token of the job.
        has_run: Whether the host has the run's folder.
        schedule: Folder of the schedule on this host. If None, the same path as on the
            coordinator's host.
    """

    token: str
    has_run: bool
    schedule: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerStart:
    """What a trainer is started with. It finds all else in the rendezvous store.

    Attributes:
        trainer: Number of the trainer.
        rendezvous: Address of the rendezvous store, "HOST:PORT".
        address: Address of this machine, at which other trainers reach this one.
        store_urls: URLs of the store shards, with passwords. If None, those of the plan.
        launcher: Id of the launcher's process. Before training begins, the trainer ends with it.
        plan: For a trainer that is started while others train, the version of the plan that has
            these URLs. None for a trainer that is started at the beginning.
        on_host: Facts about this host, in a job over several hosts.
    """

    trainer: int
    rendezvous: str
    address: str
    store_urls: tuple[str, ...] | None
    launcher: int
    plan: int | None = None
    on_host: OnHost | None = None

    def environment(self) -> dict[str, str]:
        """Return these fields as variables of the process's environment.

        One variable has all fields. Another has the trainer's number, by which its process can be
        found.
        """
        return {_TRAINER: str(self.trainer), _START: encode(self)}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> TrainerStart:
        """Read the fields from the variables of `environment`."""
        return decode(environment[_START], cls)


class ChildProcess:
    """A process that is a child of the launcher, in a session of its own.

    So Ctrl-C reaches the launcher alone, which then stops all trainers after the same step.
    """

    is_here = True

    def __init__(self, start: ProcessStart) -> None:
        self._process = subprocess.Popen(
            command_of(start.module, *start.arguments, *map(str, start.descriptors)),
            env=os.environ | start.environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=start.descriptors,
        )

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
            # The process leads a session of its own, so its group has all that it started itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def pause(processes: Iterable[StartedProcess], at_most: timedelta, wakes: int) -> None:
    """Wait for a while, or until a process ends or a descriptor becomes readable.

    Args:
        processes: Processes to watch. For none of them has `poll` returned a status.
        at_most: How long to wait.
        wakes: Descriptor to watch.
    """
    with contextlib.ExitStack() as stack:
        watched = select.poll()
        watched.register(wakes, select.POLLIN)
        try:
            for process in processes:
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                watched.register(descriptor, select.POLLIN)
        except (AttributeError, OSError):
            # The system has no pidfds, or no free descriptor.
            time.sleep(at_most.total_seconds())
            return
        watched.poll(1000 * at_most.total_seconds())
