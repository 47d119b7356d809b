"""What a trainer does for the requests of a run (`run_requests`): each for its lanes, a scrub, and a count of the store."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.cache.errors import CacheError
from foreload.cache.rows.layout import RowLayout
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.messages.trainers import HeldRows, Plan, RequestReport
from foreload.trainer.run.directory import SCRUB
from foreload.trainer.saved.expected_rows import MappedRows
from foreload.trainer.step.hosted_lanes import HostedLanes


class TrainerRequests:
    """A trainer's side; its main thread uses it."""

    def __init__(self, joined: JoinedTrainer, lanes: HostedLanes, layouts: Sequence[RowLayout], counted: int) -> None:
        """counted: the number of the last count that is not for this trainer."""
        self._joined, self._lanes, self._traffic, self._layouts = joined, lanes, lanes.traffic, layouts
        self._scrubbed, self._counted = 0, counted  # the numbers of those that were begun last
        self._scrub: int | None = None
        self._row_counts: int | None = None

    def follow(self, plan: Plan) -> None:
        """Begin what is planned."""
        if plan.count > self._counted:
            self._row_counts = self._counted = plan.count
            self._traffic.inspection.begin_row_counts()
        scrub = plan.scrub
        if scrub is not None and scrub.number > self._scrubbed:
            self._scrubbed = scrub.number
            try:
                self._traffic.inspection.begin_scrub(MappedRows(self._joined.run / SCRUB / scrub.rows, list(self._lanes.numbers)))
                self._scrub = scrub.number
            except (OSError, ValueError, CacheError) as error:
                self._joined.events.send(RequestReport(scrub.number, failed=str(error)))

    def tell(self) -> None:
        """Report how far the requests are."""
        counted = self._traffic.inspection.row_counts()
        if self._row_counts is not None and counted is not None:
            held = HeldRows(
                rows=tuple(counted.rows.sum(axis=0).tolist()),
                parity_rows=tuple(counted.parity_rows.sum(axis=0).tolist()),
                row_bytes=tuple(counted.row_bytes(self._layouts).tolist()),
                lag=self._traffic.inspection.lag(),
                loads=self._lanes.stored.store.loads,
            )
            self._joined.events.send(RequestReport(self._row_counts, held=held))
            self._row_counts = None
        progress = self._traffic.inspection.scrubbed()
        if self._scrub is not None and progress is not None:
            self._joined.events.send(RequestReport(self._scrub, progress))
            if progress.done:
                self._scrub = None

    def finish(self) -> None:
        """Finish what was begun, and report it."""
        if self._scrub is not None:
            self._traffic.inspection.scrubbed(finish=True)
        self.tell()
