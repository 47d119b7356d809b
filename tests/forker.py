"""Keeper and trainers of runs that tests train in their own process, forked from one that has imported everything: no seconds of importing for each.

`Forker` is the tests' side; as a module this is the process that forks. It is a StartProcess for `main`, called by a test; and it starts whole
commands (`forked_command.ForkedCommand`), whose keeper and trainers are forked as well. What must be seen as a user's command starts it is started
anew (`command_line.Command`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreload.pipelines.base.forking import THREADLESS, fork, replace_environment
from foreload.pipelines.base.socket_messages import Message, receive, send
from foreload.trainer.cluster.preforked import ForkedProcess, Preforked
from foreload.trainer.cluster.processes import (
    KEEPER,
    WORKER,
    ChildProcess,
    ProcessStart,
    StartedProcess,
    TrainerStart,
    program_path,
)
from foreload.trainer.compute import numerics

_LAUNCHER = "FORELOAD_LAUNCHER"  # the parent's number, in a trainer's environment
COMMAND_LINE = "foreload.trainer.cli"


class Forked(ForkedProcess):
    """A process of the forker, whose child it is. told: where its status comes once it has ended."""

    def __init__(self, pid: int, told: socket.socket) -> None:
        super().__init__(pid)
        self._told = told
        self._told.setblocking(False)

    def poll(self) -> int | None:
        """See StartedProcess."""
        if self._status is None:
            with contextlib.suppress(BlockingIOError):
                # Nothing: the forker itself was ended.
                self._status = int(self._told.recv(16) or -signal.SIGKILL)
                self._told.close()
        return self._status


class Forker:
    """Starts processes of a launcher that lives in this process; its own is started when it is first needed, and ends with `close`."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # Without what commands that tests call have beyond that.
        self._variables = dict(os.environ)
        self._environment = _of_numerics()
        self._lock = threading.Lock()
        self.started: list[Forked] = []

    def __call__(self, start: ProcessStart) -> StartedProcess:
        """Start one; anew, where libraries would read other variables as they are imported."""
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
        """Whether a command would read no other variables as it is started."""
        own = {"--threads", "--cpu-capability", "--job"} & set(arguments)
        return not own and _of_numerics() == self._environment

    def command(
        self, arguments: Sequence[str], environment: Mapping[str, str], name: str, trainers: Path, out: int, err: int
    ) -> Forked:
        """Start a command in exactly this environment. name: of its processes, at most 15 bytes; trainers: a file that gets a line for each trainer
        that it starts, its number and its process's; out, err: descriptors.
        """
        values = {
            "module": COMMAND_LINE,
            "arguments": arguments,
            "environment": environment,
            "name": name,
            "trainers": str(trainers),
        }
        return self._fork(values, [out, err])

    def _fork(self, values: Mapping[str, object], descriptors: Sequence[int]) -> Forked:
        told, status = socket.socketpair()
        with self._lock, status:
            if self._control is None:
                self._begin()
            assert self._control is not None
            send(self._control, {**values, "folder": os.getcwd()}, descriptors=[status.fileno(), *descriptors])
            answer = receive(self._control)
        assert answer is not None
        return Forked(answer.values["pid"], told)

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair()
        variables = self._variables | THREADLESS | {"PYTHONPATH": os.pathsep.join((program_path(), os.path.dirname(__file__)))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forker", str(theirs.fileno())],
                env=variables, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def alive(self) -> list[Forked]:
        """Those that have not ended; of the others nothing is known any more."""
        self.started = [one for one in self.started if one.poll() is None]
        return self.started

    def close(self) -> None:
        """End it, and what it has forked."""
        for one in self.alive():
            one.kill()
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()


def _of_numerics() -> dict[str, str | None]:
    """The variables that libraries read as they are imported, or a process as it is started, as they are now."""
    return {name: os.environ.get(name) for name in numerics.environment()}


FORKER = Forker()
"""This process's."""


def _child(request: Message, control: socket.socket) -> Callable[[], int]:
    def main() -> int:
        control.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        status, out, err, *descriptors = request.descriptors
        os.close(status)
        for number, mine in ((1, out), (2, err)):
            os.dup2(mine, number)
            os.close(mine)
        os.chdir(request.values["folder"])
        module, environment = request.values["module"], request.values["environment"]
        # It leaves with its parent, as it would with the launcher.
        replace_environment(environment | ({_LAUNCHER: str(os.getppid())} if _LAUNCHER in environment else {}))
        if module == COMMAND_LINE:
            return _command(request.values)
        sys.argv = [module, *request.values["arguments"], *map(str, descriptors)]
        assert module in (KEEPER, WORKER)
        return int(importlib.import_module(module).main())

    return main


def _command(values: dict[str, Any]) -> int:
    """A command from its beginning to its end, in the process that was forked for it."""
    # What it forks has the name too.
    Path("/proc/self/comm").write_text(values["name"])
    tempfile.tempdir, sys.path[0] = None, values["folder"]
    arguments = values["arguments"]
    cli, train = (importlib.import_module(name) for name in (COMMAND_LINE, "foreload.trainer.commands.train"))
    count = int(arguments[arguments.index("--trainers") + 1]) if "--trainers" in arguments else 1
    with contextlib.closing(Preforked(count + 1 if arguments[0] == "train" else 0, lambda: None)) as processes:

        def start(one: ProcessStart) -> StartedProcess:
            process = processes(one)
            if one.module == WORKER:
                with open(values["trainers"], "a") as file:
                    file.write(f"{TrainerStart.of_environment(os.environ | one.environment).trainer} {process.pid}\n")
            return process

        train.train.__defaults__ = (None, start)
        return int(cli.main(arguments))


def _serve(control: socket.socket) -> None:
    for name in ("worker", "keeper"):
        importlib.import_module(f"foreload.trainer.cluster.{name}")
    told: dict[int, socket.socket] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with told.pop(ended[0]) as end, contextlib.suppress(OSError):
                    end.send(str(os.waitstatus_to_exitcode(ended[1])).encode())

    signal.signal(signal.SIGCHLD, reap)
    while (request := receive(control)) is not None:
        if request.values["module"] == COMMAND_LINE:
            commands = (
                ("pipelines.prepare",)
                if request.values["arguments"][0] == "prepare"
                else ("trainer.cli", "trainer.cluster.launcher")
            )
            for name in commands:
                importlib.import_module(f"foreload.{name}")
        # One that ends at once is noted first.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = fork(_child(request, control))
        told[pid] = socket.socket(fileno=os.dup(request.descriptors[0]))
        for descriptor in request.descriptors:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        send(control, {"pid": pid})


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
