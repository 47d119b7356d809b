"""Processes that tests fork from one that has imported everything, so that none of them spends seconds on importing.

`Forker` is the tests' side: it starts the rendezvous host and trainers of a launcher in the test's own process, as a StartProcess, and whole
`foreload` commands, whose processes are forked, too. As a module this is the process that forks. What must start as a user starts it is not forked
(`command_line.Command`, anew=True).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil
from injection import STARTED, AnyFault, Injector, slow_steps, to_json

from foreload.base.process import THREADLESS, fork, replace_environment
from foreload.base.socket_messages import Message, receive, send
from foreload.trainer.cluster.processes.preforked import ForkedProcess, Preforked
from foreload.trainer.cluster.processes.starting import (
    RENDEZVOUS_HOST,
    WORKER,
    ChildProcess,
    ProcessStart,
    StartedProcess,
    TrainerStart,
)
from foreload.trainer.compute import numerics

COMMAND_LINE = "foreload.trainer.cli"
_FORKED_FIRST = {
    "train": 4,
    "join": 1,
}  # a rendezvous host and trainers, those of `--trainers` beyond the first aside: two may replace lost ones


class Forked(ForkedProcess):
    """A process that the forker's process forked, whose child it is."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        """status: where its exit status arrives once it has ended."""
        super().__init__(pid)
        self._status_socket = status
        self._status_socket.setblocking(False)

    def poll(self) -> int | None:
        """See StartedProcess."""
        if self._status is None:
            with contextlib.suppress(BlockingIOError):
                # Nothing arrives if the process that forks was ended itself.
                self._status = int(self._status_socket.recv(16) or -signal.SIGKILL)
                self._status_socket.close()
        return self._status


class ForkedCommand:
    """A `foreload` command that was forked, with the part of subprocess.Popen that tests use. It leads its own process group."""

    def __init__(self, arguments: Sequence[str], process: Forked, trainers: Path) -> None:
        self._arguments, self._process, self._trainers = list(arguments), process, trainers
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, the negative number of the signal that ended it, or None while it runs."""
        return self._process.poll()

    def poll(self) -> int | None:
        """The same."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status. Raises subprocess.TimeoutExpired."""
        self._process.wait(None if timeout is None else timedelta(seconds=timeout))
        if (status := self._process.poll()) is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to it alone, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def trainers(self) -> dict[int, tuple[int, int | None]]:
        """The trainers that it has started, by number: the process, and its exit status if the command has ended."""
        started: dict[int, tuple[int, int | None]] = {}
        for line in self._trainers.read_text().splitlines():
            trainer, pid, status = line.split()
            started[int(trainer)] = (int(pid), None if status == "None" else int(status))
        return started

    def close(self) -> None:
        """Delete the file that the trainers are noted in."""
        self._trainers.unlink(missing_ok=True)


class Forker:
    """Starts processes; its own is started when the first one is needed, and ends with `close`."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # Without what commands that tests call have beyond that.
        self._variables = dict(os.environ)
        self._environment = _of_numerics()
        self._lock = threading.Lock()
        self._token = uuid.uuid4().hex  # in the command line of every process that is forked
        self.started: list[Forked] = []

    def __call__(self, start: ProcessStart) -> StartedProcess:
        """Start a process of a launcher in this one; not forked if its libraries would read other variables as they are imported."""
        if (
            _of_numerics() | {name: start.environment[name] for name in self._environment if name in start.environment}
            != self._environment
        ):
            return ChildProcess(start)
        values = {"module": start.module, "arguments": start.arguments, "environment": os.environ | start.environment}
        forked = self._fork(values, [1, 2, *start.descriptors])
        self.started.append(forked)
        return forked

    def can_fork(self, arguments: Sequence[str]) -> bool:
        """Whether the libraries of a command would read no other variables as they are imported."""
        own = {"--threads", "--cpu-capability", "--job"} & set(arguments)
        return not own and _of_numerics() == self._environment

    def command(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        out: IO[Any],
        err: IO[Any],
        faults: Sequence[AnyFault] = (),
        may_kill: bool = True,
        folder: Path | None = None,
    ) -> ForkedCommand:
        """Start a command in exactly this environment, and in this folder. name: its processes' name, at most 15 bytes; may_kill: as RunObserver has
        it.
        """
        number, trainers = tempfile.mkstemp(prefix="trainers")
        os.close(number)
        values = {
            "module": COMMAND_LINE,
            "arguments": arguments,
            "environment": environment,
            "name": name,
            "trainers": trainers,
            "faults": to_json(faults),
            "may_kill": may_kill,
            "folder": str(folder or Path.cwd()),
        }
        return ForkedCommand(arguments, self._fork(values, [out.fileno(), err.fileno()]), Path(trainers))

    def _fork(self, values: Mapping[str, object], descriptors: Sequence[int]) -> Forked:
        mine, status = socket.socketpair()
        with self._lock, status:
            if self._control is None:
                self._begin()
            assert self._control is not None
            send(self._control, {"folder": os.getcwd(), **values}, descriptors=[status.fileno(), *descriptors])
            answer = receive(self._control)
        assert answer is not None
        return Forked(answer.values["pid"], mine)

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair()
        here = Path(__file__).parent
        paths = os.pathsep.join(map(str, (here.parents[1], here, here.parent / "trainer")))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forking", str(theirs.fileno()), self._token],
                env=self._variables | THREADLESS | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL, start_new_session=True,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def alive(self) -> list[Forked]:
        """The rendezvous hosts and trainers of launchers in this process that have not ended."""
        self.started = [one for one in self.started if one.poll() is None]
        return self.started

    def processes(self) -> list[psutil.Process]:
        """All processes that were forked and have not ended, commands and their rendezvous hosts and trainers included."""
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = self._process is not None and process.pid == self._process.pid
                if not own and self._token in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def close(self) -> None:
        """End the process that forks, and the rendezvous hosts and trainers of launchers in this process."""
        for one in self.alive():
            one.kill()
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
            self._control = self._process = None


def _of_numerics() -> dict[str, str | None]:
    """The variables that libraries read as they are imported, or a process as it starts, as they are now."""
    return {name: os.environ.get(name) for name in numerics.environment()}


FORKER = Forker()
"""This process's."""


def _child(request: Message, control: socket.socket) -> Callable[[], int]:
    def main() -> int:
        control.close()
        signal.set_wakeup_fd(-1)
        status, out, err, *descriptors = request.descriptors
        os.close(status)
        for number, mine in ((1, out), (2, err)):
            os.dup2(mine, number)
            os.close(mine)
        os.chdir(request.values["folder"])
        module, environment = request.values["module"], request.values["environment"]
        if module == WORKER:
            # It leaves with its parent, as it would with the launcher.
            environment |= replace(TrainerStart.of_environment(environment), launcher=os.getppid()).environment()
        replace_environment(environment)
        slow_steps()
        if module == COMMAND_LINE:
            return _command(request.values)
        sys.argv = [module, *request.values["arguments"], *map(str, descriptors)]
        assert module in (RENDEZVOUS_HOST, WORKER)
        return int(importlib.import_module(module).main())

    return main


def _command(values: dict[str, Any]) -> int:
    """Run a command from its beginning to its end, in the process that was forked for it."""
    # The processes that it forks inherit the name.
    Path("/proc/self/comm").write_text(values["name"], encoding="utf-8")
    tempfile.tempdir, sys.path[0] = None, values["folder"]
    arguments = values["arguments"]
    cli = importlib.import_module(COMMAND_LINE)
    more = int(arguments[arguments.index("--trainers") + 1]) - 1 if "--trainers" in arguments else 0
    count = _FORKED_FIRST[arguments[0]] + more if arguments[0] in _FORKED_FIRST else 0
    run = Path(arguments[arguments.index("--run") + 1]) if "--run" in arguments else Path()
    observer = Injector(values["faults"], values["may_kill"], run)
    started: list[tuple[int, StartedProcess]] = []

    def note() -> None:
        """Write the file that ForkedCommand.trainers reads."""
        lines = [f"{number} {process.pid} {process.poll()}\n" for number, process in started]
        written = Path(f"{values['trainers']}.new")
        written.write_text("".join(lines), encoding="utf-8")
        written.replace(values["trainers"])

    with contextlib.closing(Preforked(count, lambda: None)) as processes:

        def start(one: ProcessStart) -> StartedProcess:
            process = processes(one)
            if one.module == WORKER:
                started.append((TrainerStart.of_environment(os.environ | one.environment).trainer, process))
                note()
                observer.reach(STARTED)
            return process

        status = int(cli.main(arguments, start, observer))
        if started:
            note()
        return status


def _serve(control: socket.socket) -> None:
    for name in (WORKER, RENDEZVOUS_HOST):
        importlib.import_module(name)
    waiting: dict[int, socket.socket] = {}
    # A signal between two instructions and a call that waits would be seen after that; what it writes here ends the wait.
    ended, wake = socket.socketpair()
    for end in (ended, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            ended.recv(1 << 12)
            _reap(waiting)
        if control in ready:
            if (request := receive(control)) is None:
                return
            _import(request)
            pid = fork(_child(request, control))
            waiting[pid] = socket.socket(fileno=os.dup(request.descriptors[0]))
            for descriptor in request.descriptors:
                os.close(descriptor)
            send(control, {"pid": pid})


def _reap(waiting: dict[int, socket.socket]) -> None:
    """Send the exit status of each child that has ended to where it is waited for."""
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            with waiting.pop(child[0]) as end, contextlib.suppress(OSError):
                end.send(str(os.waitstatus_to_exitcode(child[1])).encode())


def _import(request: Message) -> None:
    """Import what a command needs, once for all."""
    if request.values["module"] == COMMAND_LINE:
        commands = (
            ("pipelines.prepare",)
            if request.values["arguments"][0] == "prepare"
            else ("trainer.cli", "trainer.cluster.launcher", "trainer.cluster.coordinator.coordinator")
        )
        for name in commands:
            importlib.import_module(f"foreload.{name}")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
