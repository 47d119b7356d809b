"""The steps that are measured together, with one size throughout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from foreload.trainer.adjusting.prediction import Measured, Work, mean
from foreload.trainer.compute.reports import StepReport

# A window ends after so many steps, once they took so long. Of long steps, fewer are enough.
_STEPS, _SECONDS = 10, 2.0
# After a change, and at the beginning, so many steps are not measured, over at least this time:
# trainers still compile, and fill their caches.
WARM_UP_STEPS, _WARM_UP_SECONDS = 5, 1.0
_LEAST_STEPS, _LONG = 3, 2.0  # fewer steps are never enough, and so many are, once they took this times as long


@dataclass(slots=True)
class Window:
    """The steps since a moment from which the size has not changed.

    Attributes:
        reports: trainer -> its reports of steps.
        servers: the processor time of the local servers at the window's beginning.
        warm_up_steps: if not 0, the steps are not measured, and the window is over after so many.
    """

    servers: float = 0.0
    warm_up_steps: int = 0
    reports: dict[int, list[StepReport]] = field(default_factory=dict)

    def add(self, trainer: int, report: StepReport) -> None:
        """Add a step that a trainer has trained."""
        self.reports.setdefault(trainer, []).append(report)

    def is_warmed_up(self, members: Iterable[int]) -> bool:
        """Whether the steps that are not measured are over."""
        if not self.warm_up_steps:
            return False
        return self._has(self.warm_up_steps, _WARM_UP_SECONDS, members)

    def is_over(self, members: Iterable[int]) -> bool:
        """Whether every member has reported enough steps."""
        return not self.warm_up_steps and self._has(_STEPS, _SECONDS, members)

    def _has(self, steps: int, seconds: float, members: Iterable[int]) -> bool:
        """Whether every member has reported so many steps of so many seconds in all, or fewer that took longer."""
        for trainer in members:
            of = self.reports.get(trainer, ())
            took = sum(report.seconds for report in of)
            enough = len(of) >= steps and took >= seconds
            if not enough and (len(of) < _LEAST_STEPS or took < _LONG * seconds):
                return False
        return True

    def compute(self, trainer: int) -> float:
        """Return the mean seconds that a trainer computed in a step."""
        return mean([report.seconds_compute for report in self.reports.get(trainer, ())])

    def measured(self, work: Work, servers: float) -> Measured:
        """Return the means of a step's figures.

        Args:
            servers: the processor time of the local servers by now.
        """
        by_trainer = list(self.reports.values())
        steps = [report.step for reports in by_trainer for report in reports]
        samples, rows = work.over(min(steps), max(steps))
        count = max(map(len, by_trainer))
        return Measured(
            seconds=max(mean([report.seconds for report in reports]) for reports in by_trainer),
            compute=max(map(self.compute, self.reports)),
            exchange=min(mean([report.seconds_exchange for report in reports]) for reports in by_trainer),
            waiting=max(mean([report.seconds_waiting for report in reports]) for reports in by_trainer),
            processor=sum(sum(report.seconds_processor for report in reports) / len(reports) for reports in by_trainer)
            + (servers - self.servers) / count,
            samples=samples,
            rows=rows,
        )
