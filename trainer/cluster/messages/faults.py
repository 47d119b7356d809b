"""What a drill or a test puts into a training, and what it sees of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foreload.cache.client.local import LocalStores
from foreload.trainer.errors import TrainerError

if TYPE_CHECKING:
    from foreload.trainer.cluster.messages.trainers import TrainerEvent


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal for the server of a local store shard, sent by the trainer that hosts lane 0 as soon as it has trained a step."""

    step: int
    shard: int
    signal_number: int

    def inject(self, stores: Path) -> None:
        """Send it. stores: the folder of the servers. Raises TrainerError where there is no such process."""
        local = LocalStores.find(stores)
        pid = local.pids[self.shard] if local is not None else None
        if pid is None:
            raise TrainerError(f"drill: store shard {self.shard} has no server for a fault after step {self.step}; see {stores}")
        os.kill(pid, self.signal_number)


STEP_POINTS = (
    *("before fetch", "rows staged", "exchanged", "early rows sent", "forward done", "replicated", "gradients sent", "committed"),
    *("rows applied", "dense part applied", "evaluating"),
)
"""Of a step: in its order, in the trainer's own thread (`step.step`); and amid an evaluation pass, after the training step before it."""
STORE_POINTS = (
    *("fetch leaves", "batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged", "rows rebuilt"),
    *("base read", "rows to move read", "rows copied", "rows moved"),
)
"""Of the traffic with the store, in its thread (`cache.traffic`). rows rebuilt: a chunk of a lost shard; base read: of rows taken over; the last
three: of a chunk of rows that move to other shards.
"""
END_POINTS = ("last write-back", "last rows written", "dense part written", "ended")
"""Of the end: before everything is written back, and after it; before the dense part's new file takes the place of the old one, which one trainer
alone comes to; when the trainer has reported that it is at its end.
"""
TAKEOVER_POINTS = (
    *("term over", "left", "rolled back", "group formed"),
    *("fenced", "record held", "batch finished", "rows looked at", "empty record held", "marker written", "ready"),
)
"""Of a takeover: the loss is seen, reported, the step undone, the next group there; the second line by who takes lanes over
(`cache.protocol.takeover`; without parity there are no records), up to where the term's steps may begin.
"""
CHECKPOINT_POINTS = ("checkpoint asked for", "checkpoint taken", "checkpoint file written", "checkpoint part written")
"""Of a checkpoint: the trainer knows of it; the copy is made; of its files, in the thread that writes them; all of them are there, and reported."""
BEST_POINTS = ("best waited for",)
"""Training waits behind an evaluation, until it is known whether it was the best, and a checkpoint of its step can be begun."""
KEPT_POINTS = ("kept",)
"""The run cannot go on; what the store lacks of this trainer's lanes is in the run's folder, and that is yet to be reported."""
TRAINER_POINTS = (*STEP_POINTS, *STORE_POINTS, *END_POINTS, *TAKEOVER_POINTS, *CHECKPOINT_POINTS, *BEST_POINTS, *KEPT_POINTS)


@dataclass(frozen=True, slots=True)
class TrainerFault:
    """A signal that a trainer's process sends itself at a point, one of TRAINER_POINTS: the first time that it comes there once it has begun a
    training step, `step` or a later one. signal_number: SIGKILL, or SIGSTOP, by which the process stands still there.
    """

    trainer: int
    point: str
    step: int
    signal_number: int

    def __post_init__(self) -> None:
        if self.point not in TRAINER_POINTS:
            raise ValueError(f"point: must be one of {', '.join(TRAINER_POINTS)}; got {self.point!r}")


class FaultPoints:
    """The points at which one trainer's faults are injected; any thread may come to one. tell: called before that by the thread that made this, and
    by it alone, with the fault.
    """

    def __init__(
        self, faults: Sequence[Fault | TrainerFault], trainer: int, tell: Callable[[TrainerFault], None] = lambda fault: None
    ) -> None:
        self._waiting = [fault for fault in faults if isinstance(fault, TrainerFault) and fault.trainer == trainer]
        self.any = bool(self._waiting)
        self._tell, self._thread = tell, threading.get_ident()
        self._step: int | None = None  # the last one that began

    def in_step(self, point: str, step: int) -> None:
        """The trainer comes to a point of a step."""
        self._step = step
        self.reach_point(point)

    def in_traffic(self, action: str) -> None:
        """The traffic's thread comes to a point."""
        if action not in STEP_POINTS:  # of which one has the same name
            self.reach_point(action)

    def reach_point(self, point: str) -> None:
        """The trainer comes to a point."""
        for fault in list(self._waiting):
            if fault.point == point and self._step is not None and fault.step <= self._step:
                self._waiting.remove(fault)
                here = threading.get_ident()
                if here == self._thread:
                    self._tell(fault)
                # To this thread: it goes no further, whatever the others are at.
                signal.pthread_kill(here, fault.signal_number)


class RunObserver:
    """Sees what happens in a call of `foreload train`, in the launcher's thread. This one only lets it happen."""

    faults: Sequence[Fault | TrainerFault] = ()
    """What is injected: a Fault by the trainer that hosts lane 0, a TrainerFault by the trainer that it names."""

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """An event of a trainer."""

    def at_checkpoint(self, point: str) -> None:
        """The launcher comes to a point of a checkpoint: "begun", "manifest written", "published", "old ones deleted"."""

    def may_start(self, shard: int) -> bool:
        """Whether the dead server of a local store shard may be started again now."""
        return True

    def may_kill(self, trainer: int) -> bool:
        """Whether the process of a trainer that is taken for lost may be ended; otherwise it goes on for as long as it can, which is for tests."""
        return True
