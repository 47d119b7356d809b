"""One call of `foreload train`, as the parts of its coordinator share it.

It consists of the job, the run, the events, and the published plan.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from foreload.trainer.run.metrics_server import MetricsServer
from foreload.trainer.run.tracking import Tracking


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@dataclass(slots=True)
class TrainingCall:
    """One call of `foreload train`.

    Attributes:
        manifest: The current manifest of the run.
        start: The run's status as the call began, but with the newest term.
        layouts: The row layout of each table.
        observer: Sees every event of a trainer, and allows or forbids restarts and kills in tests.
        interrupts: The signals that ask for an end.
        machines: The machine of each trainer. "" stands for this one.
        guests: The trainers that other hosts have offered (`foreload join`).
        metrics: Serves the run's figures. If None, they are not served.
        tracking: Reports to an experiment tracker. If None, there is none.
        say: Called with each message for the user.
        clock: Returns the time in seconds.
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
    guests: Collection[int] = ()
    metrics: MetricsServer | None = None
    tracking: Tracking | None = None
    say: Callable[[str], None] = _say
    clock: Callable[[], float] = time.monotonic

    def write_manifest(self, manifest: Manifest) -> None:
        """Publish another manifest of the run."""
        self.manifest = manifest
        self.run.write_manifest(manifest)

    def raise_term(self, term: int) -> None:
        """Note a term's number in the run. Call it before any trainer owns lanes in that term."""
        self.start = replace(self.start, term=term)
        self.run.raise_term(term)


class PublishedPlan:
    """The plan that the coordinator publishes to all trainers.

    Attributes:
        now: The newest version.
    """

    def __init__(self, rendezvous: Rendezvous, placement: Placement, servers: Sequence[str], stop_by: int | None) -> None:
        self._rendezvous, self._placement = rendezvous, placement
        self.now = Plan(0, 0, tuple(servers), stop_by=stop_by)

    def begin(self) -> None:
        """Publish the first version."""
        self._rendezvous.publish(PlacementText(self._placement.text), self.now.placement)
        self._rendezvous.publish(self.now, self.now.version)

    def change(self, **fields: Any) -> None:
        """Publish a version of the plan with these fields changed, if any differs.

        When this returns, every trainer that asks sees the new version.
        """
        changed = replace(self.now, **fields)
        if changed == self.now:
            return
        self.now = replace(changed, version=self.now.version + 1)
        self._rendezvous.publish(self.now, self.now.version)

    def move_rows(self, placement: Placement, servers: Sequence[str], hurried: bool) -> None:
        """Publish another placement, to which rows move or have moved, and its servers' URLs.

        Args:
            hurried: As in `Plan`.
        """
        number = self.now.placement + 1
        # The plan refers to the placement by its number, so the placement is published first.
        self._rendezvous.publish(PlacementText(placement.text), number)
        self.change(placement=number, servers=tuple(servers), hurried=hurried)
