"""`foreload train` in processes forked from one that has imported everything, and with faults, for tests that train many times.

`Warm` is the test's side; as a module this is the process that forks. It reads a request a line from stdin, does one after the other, and answers
each with a line on stdout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from command_line import DEADLINE_SECONDS, ROOT, Remains

from foreload.pipelines.base.forking import THREADLESS, fork
from foreload.trainer.cluster.faults import Fault, RunObserver, TrainerFault
from foreload.trainer.cluster.processes import WORKER, ProcessStart, StartedProcess, TrainerStart
from foreload.trainer.compute import numerics
from foreload.trainer.run.directory import STORES

if TYPE_CHECKING:
    from foreload.trainer.cluster.messages import TrainerEvent

_IMPORTED = ("launcher", "worker", "keeper", "preforked", "run_requests")


CAN_JOIN = "test: trainer {} can join"
"""Told on stderr."""


@dataclasses.dataclass(frozen=True)
class CheckpointFault:
    """What befalls the launcher as it comes to a point of a checkpoint (`RunObserver.at_checkpoint`) for the time given, 1 being the first: it is
    killed or, where a shard is named, kills the server of that local store shard.
    """

    point: str
    time: int
    shard: int | None = None


AnyFault = Fault | TrainerFault | CheckpointFault


class Warm:
    """While entered, trains as `foreload train` in a terminal would, once at a time, in processes forked from one."""

    def __enter__(self) -> Warm:
        paths = [str(ROOT), *(str(Path(__file__).parent / folder) for folder in ("", "trainer"))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "warm"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | THREADLESS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def begin(self, arguments: Sequence[object], err: Path, faults: Sequence[AnyFault] = (), may_kill: bool = True) -> Training:
        """Start a command `train`, with these faults. err: the file that gets its stderr; may_kill: as RunObserver has it."""
        remains = Remains()
        request = {
            "arguments": [str(argument) for argument in arguments],
            "err": str(err),
            "faults": [[type(fault).__name__, dataclasses.asdict(fault)] for fault in faults],
            "may_kill": may_kill,
            "environment": remains.environment,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Training(self._process, remains, err)


class Training:
    """A command that was begun."""

    def __init__(self, process: subprocess.Popen[str], remains: Remains, err: Path) -> None:
        self._process, self.remains, self._err = process, remains, err
        self.statuses: dict[int, int | None] = {}  # of the trainers' processes, once it has ended

    @property
    def told(self) -> str:
        """What it has written to stderr."""
        return self._err.read_text() if self._err.exists() else ""

    def until(self, satisfied: Callable[[], bool]) -> None:
        """Wait for something that it brings about."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not satisfied():
            assert time.monotonic() < deadline, self.told
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Exit status and stderr; asserts that neither a process nor a temporary file is left. Where a signal ended it, that is told as a negative
        number, and nothing of the trainers.
        """
        assert self._process.stdout is not None
        status, trainers = json.loads(self._process.stdout.readline())
        self.statuses = {int(trainer): ended for trainer, ended in trainers.items()}
        self.remains.check(self.told)
        return status, self.told


def _train(request: dict[str, Any]) -> tuple[int, dict[int, int | None]]:
    """Exit status of the command, and that of each trainer."""
    from foreload.trainer.cli import main
    from foreload.trainer.cluster.messages import CanJoin
    from foreload.trainer.cluster.preforked import Preforked
    from foreload.trainer.commands.train import train

    arguments = request["arguments"]
    kinds = {kind.__name__: kind for kind in (Fault, TrainerFault, CheckpointFault)}
    injected = [kinds[kind](**fields) for kind, fields in request["faults"]]
    come_to: list[str] = []

    class Observer(RunObserver):
        faults = tuple(fault for fault in injected if not isinstance(fault, CheckpointFault))

        def see(self, trainer: int, event: TrainerEvent) -> None:
            if isinstance(event, CanJoin):
                sys.stderr.write(f"{CAN_JOIN.format(trainer)}\n")

        def at_checkpoint(self, point: str) -> None:
            come_to.append(point)
            for fault in injected:
                if isinstance(fault, CheckpointFault) and (fault.point, fault.time) == (point, come_to.count(point)):
                    if fault.shard is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    else:
                        Fault(0, fault.shard, signal.SIGKILL).inject(Path(arguments[arguments.index("--run") + 1]) / STORES)

        def may_kill(self, trainer: int) -> bool:
            return bool(request["may_kill"])

    with open(request["err"], "wb") as err, open(os.devnull, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    os.environ.update(request["environment"])
    trainers = int(arguments[arguments.index("--trainers") + 1])
    started: dict[int, StartedProcess] = {}
    with contextlib.closing(Preforked(trainers + 1, lambda: None)) as processes:

        def start(one: ProcessStart) -> StartedProcess:
            process = processes(one)
            if one.module == WORKER:
                started[TrainerStart.of_environment(os.environ | one.environment).trainer] = process
            return process

        # Of whoever gives none of its own, as the command does.
        train.__defaults__ = (Observer(), start)
        status = main(arguments)
    return status, {number: process.poll() for number, process in started.items()}


def _serve() -> None:
    numerics.set_environment()
    for name in _IMPORTED:
        importlib.import_module(f"foreload.trainer.cluster.{name}")
    # Kept, since the one forked has none of it.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        request = json.loads(line)

        def answer(request: dict[str, Any] = request) -> int:
            status, trainers = _train(request)
            print(json.dumps([status, trainers]), file=answers, flush=True)
            return status

        _, status = os.waitpid(fork(answer), 0)
        if os.WIFSIGNALED(status):
            print(json.dumps([-os.WTERMSIG(status), {}]), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
