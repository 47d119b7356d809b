"""What one call of `foreload train` is about, for the parts of its coordinator."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foreload.base.interrupts import Interrupts
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import EventLog
from foreload.trainer.run.manifest import Manifest, Status


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@dataclass(slots=True)
class TrainingCall:
    """manifest: the run's, as it is by now; start: how the call began, but for the term, which is the newest. interrupts: what
    asks for an end. machines: which one each trainer is on, "" for this one. say: called with each line for the user; clock: seconds.
    """

    job: TrainJob
    run: Run
    manifest: Manifest
    start: Status
    schedule: Schedule
    layouts: Sequence[RowLayout]
    events: EventLog
    observer: RunObserver
    interrupts: Interrupts
    machines: Mapping[int, str] = field(default_factory=dict)
    say: Callable[[str], None] = _say
    clock: Callable[[], float] = time.monotonic

    def write_manifest(self, manifest: Manifest) -> None:
        """Publish another one."""
        self.manifest = manifest
        self.run.write_manifest(manifest)

    def raise_term(self, term: int) -> None:
        """Note a term's number in the run before anyone owns lanes in it."""
        self.start = replace(self.start, term=term)
        self.run.raise_term(term)
