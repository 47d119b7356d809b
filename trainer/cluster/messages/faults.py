"""The faults that a drill or a test injects into a training, and what it observes of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.cache.client.local import LocalStores
from foreload.trainer.errors import TrainerError

if TYPE_CHECKING:
    from foreload.trainer.cluster.messages.trainers import TrainerEvent


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal for the server of a local store shard.

    The trainer that hosts lane 0 sends it as soon as it has trained step `step`.
    """

    step: int
    shard: int
    signal_number: int

    def inject(self, stores: Path) -> None:
        """Send the signal.

        Args:
            stores: Folder of the run's local servers.

        Raises:
            TrainerError: The shard has no local server process.
        """
        local = LocalStores.find(stores)
        pid = local.pids[self.shard] if local is not None else None
        if pid is None:
            raise TrainerError(f"drill: store shard {self.shard} has no server for a fault after step {self.step}; see {stores}")
        os.kill(pid, self.signal_number)


STEP_POINTS = (
    *("before fetch", "rows staged", "exchanged", "early rows sent", "forward done", "replicated", "gradients sent", "committed"),
    *("rows applied", "dense part applied", "evaluating"),
)
"""Points of a step, in their order, in the trainer's main thread (`step.step`).

The last one is within an evaluation pass, and has the step of the training step before it.
"""
STORE_POINTS = (
    *("fetch leaves", "batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged", "rows rebuilt"),
    *("base read", "rows to move read", "rows copied", "rows moved"),
)
"""Points of the traffic with the store, in its thread (`cache.traffic`).

- "rows rebuilt": a chunk of a lost shard is rebuilt.
- "base read": the base of rows that were taken over is read.
- The last three belong to a chunk of rows that migrate to other shards.
"""
END_POINTS = ("last write-back", "last rows written", "dense part written", "ended")
"""Points of the end of training.

The first two lie before and after everything is written back. At "dense part written" the new file
of the dense part is about to replace the old one; only one trainer reaches it. At "ended" the
trainer has reported its end.
"""
TAKEOVER_POINTS = (
    *("term over", "left", "rolled back", "group formed"),
    *("fenced", "record held", "batch finished", "rows looked at", "empty record held", "marker written", "ready"),
)
"""Points of a takeover.

First line: the trainer has noticed the loss, reported it, undone the step, and formed the next
group. Second line: the points of a trainer that takes lanes over, up to where the term's steps may
begin (`cache.protocol.handover.takeover`). Without parity there are no records.
"""
CHECKPOINT_POINTS = ("checkpoint asked for", "checkpoint taken", "checkpoint file written", "checkpoint part written")
"""Points of a checkpoint.

The trainer knows of it; the copy is taken; a file is written, in the thread that writes them; all
files are written and reported.
"""
BEST_POINTS = ("best waited for",)
"""Point of a wait after an evaluation.

Training waits until it is known whether the evaluation was the best, and until a checkpoint of its
step can begin.
"""
KEPT_POINTS = ("kept",)
"""Point of a run that cannot go on.

The rows of this trainer's lanes that the store lacks are in the run's folder, but the trainer has
not reported it yet.
"""
TRAINER_POINTS = (*STEP_POINTS, *STORE_POINTS, *END_POINTS, *TAKEOVER_POINTS, *CHECKPOINT_POINTS, *BEST_POINTS, *KEPT_POINTS)


@dataclass(frozen=True, slots=True)
class TrainerFault:
    """A signal that a trainer's process sends to itself at a fault point.

    It does so the first time that it reaches the point after it has begun training step `step` or a
    later one.

    Attributes:
        point: One of TRAINER_POINTS.
        signal_number: SIGKILL, or SIGSTOP, which suspends the process at the point.
    """

    trainer: int
    point: str
    step: int
    signal_number: int

    def __post_init__(self) -> None:
        if self.point not in TRAINER_POINTS:
            raise ValueError(f"point: must be one of {', '.join(TRAINER_POINTS)}; got {self.point!r}")


class FaultPoints:
    """The points at which one trainer's faults are injected. Any thread may reach a point.

    Attributes:
        any: Whether there are faults for this trainer.
    """

    def __init__(
        self, faults: Sequence[Fault | TrainerFault], trainer: int, on_fault: Callable[[TrainerFault], None] = lambda fault: None
    ) -> None:
        """Select the faults of one trainer.

        Args:
            faults: The faults of the run.
            trainer: Number of the trainer.
            on_fault: Called with a fault before it is injected, but only at a point that the thread
                which creates this object reaches.
        """
        self._waiting = [fault for fault in faults if isinstance(fault, TrainerFault) and fault.trainer == trainer]
        self.any = bool(self._waiting)
        self._on_fault, self._thread = on_fault, threading.get_ident()
        self._step: int | None = None  # the last training step that began

    def in_step(self, point: str, step: int) -> None:
        """Note that the trainer reaches a point of step `step`, and inject the faults due there."""
        self._step = step
        self.reach_point(point)

    def in_traffic(self, action: str) -> None:
        """Note that the traffic's thread reaches a point, and inject the faults due there."""
        # "rows staged" is also a point of a step, and only that one counts.
        if action not in STEP_POINTS:
            self.reach_point(action)

    def reach_point(self, point: str) -> None:
        """Note that the trainer reaches a point, and inject the faults due there."""
        for fault in list(self._waiting):
            if fault.point == point and self._step is not None and fault.step <= self._step:
                self._waiting.remove(fault)
                here = threading.get_ident()
                if here == self._thread:
                    self._on_fault(fault)
                # The signal goes to this thread, so that it gets no further, whatever the other
                # threads are doing.
                signal.pthread_kill(here, fault.signal_number)


class RunObserver:
    """Observes a call of `foreload train`, in the launcher's thread. This class does nothing."""

    faults: Sequence[Fault | TrainerFault] = ()
    """The faults to inject.

    The trainer that hosts lane 0 injects a Fault. The trainer that a TrainerFault names injects it.
    """

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Receive an event of a trainer."""

    def on_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Receive the metrics of an evaluation set, once, as a line of metrics.jsonl has them."""

    def at_checkpoint(self, point: str) -> None:
        """Receive a point of a checkpoint that the launcher reaches.

        Args:
            point: "known", once every trainer knows of it or will at its first step; then "begun",
                "manifest written", "published" or "old ones deleted".
        """

    def may_start(self, shard: int) -> bool:
        """Return whether the dead server of a local store shard may be started again now."""
        return True

    def may_kill(self, trainer: int) -> bool:
        """Return whether the launcher may end the process of a trainer that counts as lost.

        If not, that process goes on for as long as it can. Tests use this.
        """
        return True
