"""One call of `foreload train`, for the parts of its coordinator: the job, the run, the events, and the plan that is published."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreload.base.interrupts import Interrupts
from foreload.cache.parity.placement import Placement
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import PlacementText, Plan
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


class PublishedPlan:
    """now: the newest version."""

    def __init__(self, rendezvous: Rendezvous, placement: Placement, servers: Sequence[str], stop_by: int | None) -> None:
        self._rendezvous, self._placement = rendezvous, placement
        self.now = Plan(0, 0, tuple(servers), stop_by=stop_by)

    def begin(self) -> None:
        """Publish the first version."""
        self._rendezvous.publish(PlacementText(self._placement.text), self.now.placement)
        self._rendezvous.publish(self.now, self.now.version)

    def change(self, **fields: Any) -> None:
        """Publish a version in which these fields of a Plan are others, if they are. When this returns, whoever asks sees it."""
        changed = replace(self.now, **fields)
        if changed == self.now:
            return
        self.now = replace(changed, version=self.now.version + 1)
        self._rendezvous.publish(self.now, self.now.version)

    def move_rows(self, placement: Placement, servers: Sequence[str]) -> None:
        """Rows are, or move, where another placement has them, on these servers."""
        number = self.now.placement + 1
        self._rendezvous.publish(PlacementText(placement.text), number)
        self.change(placement=number, servers=tuple(servers))
