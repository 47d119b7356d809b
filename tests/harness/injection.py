"""What tests inject into a run of `foreload train`: faults at named points, and steps that take longer."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.pipelines.sources.files import quiet_import
from foreload.trainer.cluster.messages.faults import Fault, RunObserver, TrainerFault
from foreload.trainer.cluster.messages.trainers import CanJoin
from foreload.trainer.run.directory import STORES

if TYPE_CHECKING:
    from foreload.trainer.cluster.messages.trainers import TrainerEvent

CAN_JOIN = "test: trainer {} can join"
"""The observer writes this to stderr when a trainer that was started while others train can join."""
KNOWN = "test: a checkpoint is known"
"""It writes this when every trainer knows of the next checkpoint, and so takes it after the first step that it is due after."""
SLOWER = "FORELOAD_TEST_STEP_SECONDS"
"""The environment variable by which every training step takes longer: SECONDS (`make test-matrix`, condition d), or SECONDS:FILE, while FILE
exists.
"""


STARTED = "trainer started"
"""A point of the launcher, beside those of RunObserver.at_checkpoint: it has just started the process of a trainer."""


@dataclass(frozen=True)
class LauncherFault:
    """A fault of the launcher, or of the local store shard `shard` if it is given, at a point that the launcher reaches.

    time: at which visit of the point, from 1. signal_number: SIGSTOP holds the launcher there until the test sends SIGCONT.
    """

    point: str
    time: int
    shard: int | None = None
    signal_number: int = signal.SIGKILL


@dataclass(frozen=True)
class CallFault:
    """A signal that a command sends itself when it is about to call a function for the first time.

    function: "MODULE:NAME", as the caller's module has it. signal_number: SIGSTOP holds the command there until the test sends SIGCONT.
    """

    function: str
    signal_number: int = signal.SIGSTOP

    def inject(self) -> None:
        """Replace the function in this process."""
        module, name = self.function.split(":")
        with quiet_import():
            holder = importlib.import_module(module)
        called = getattr(holder, name)

        def faulty(*arguments: Any, **named: Any) -> Any:
            setattr(holder, name, called)
            os.kill(os.getpid(), self.signal_number)
            return called(*arguments, **named)

        setattr(holder, name, faulty)


AnyFault = Fault | TrainerFault | LauncherFault | CallFault
_KINDS = {kind.__name__: kind for kind in (Fault, TrainerFault, LauncherFault, CallFault)}


def to_json(faults: Sequence[AnyFault]) -> list[Any]:
    """Faults as JSON, for another process."""
    return [[type(fault).__name__, asdict(fault)] for fault in faults]


class Injector(RunObserver):
    """Injects faults into a run. may_kill: as RunObserver has it; run: the run's folder."""

    def __init__(self, faults: list[Any], may_kill: bool, run: Path) -> None:
        injected = [_KINDS[kind](**fields) for kind, fields in faults]
        self.faults = tuple(fault for fault in injected if isinstance(fault, Fault | TrainerFault))
        for fault in injected:
            if isinstance(fault, CallFault):
                fault.inject()
        self._of_launcher = [fault for fault in injected if isinstance(fault, LauncherFault)]
        self._may_kill, self._run, self._visited = may_kill, run, list[str]()

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """See RunObserver."""
        if isinstance(event, CanJoin):
            sys.stderr.write(f"{CAN_JOIN.format(trainer)}\n")

    def at_checkpoint(self, point: str) -> None:
        """See RunObserver."""
        if point == "known":
            sys.stderr.write(f"{KNOWN}\n")
        self.reach(point)

    def reach(self, point: str) -> None:
        """Inject what is due at a point of the launcher."""
        self._visited.append(point)
        for fault in self._of_launcher:
            if (fault.point, fault.time) == (point, self._visited.count(point)):
                if fault.shard is None:
                    os.kill(os.getpid(), fault.signal_number)
                else:
                    Fault(0, fault.shard, fault.signal_number).inject(self._run / STORES)

    def may_kill(self, trainer: int) -> bool:
        """See RunObserver."""
        return self._may_kill


def slow_steps() -> None:
    """Have each training step of this process take longer, by the environment variable SLOWER; without it, do nothing."""
    if SLOWER not in os.environ:
        return
    seconds, _, file = os.environ[SLOWER].partition(":")
    from foreload.trainer.step.step import TrainingStep

    boundary = TrainingStep.boundary

    def delayed(self: TrainingStep) -> None:
        if not file or os.path.exists(file):
            time.sleep(float(seconds))
        boundary(self)

    TrainingStep.boundary = delayed  # type: ignore[method-assign]
