"""What is asked of a training run over its control socket and done by all of its trainers, each for its lanes: a scrub, and a count of the store."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

from foreload.cache.repair.findings import Scrubbed
from foreload.trainer.cluster.coordinator.published_plan import PublishedPlan
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.control import (
    Answer,
    AskScrub,
    Refused,
    RowCountsAnswer,
    ScrubBegun,
    ScrubProgress,
)
from foreload.trainer.cluster.messages.trainers import (
    HeldRows,
    RequestReport,
    ScrubPlan,
)

COUNT_TIMEOUT = timedelta(seconds=3)  # less than an answer on the control socket may take


@dataclass(slots=True)
class _Scrub:
    """The last scrub: by which trainers, what each of them last reported of it, and why it is over, if that is not since all are through."""

    number: int
    members: frozenset[int]
    reports: dict[int, Scrubbed] = field(default_factory=dict)
    failed: str | None = None

    @property
    def done(self) -> bool:
        """Whether each trainer is through with its lanes."""
        return self.reports.keys() == self.members and all(scrubbed.done for scrubbed in self.reports.values())

    @property
    def under_way(self) -> bool:
        return self.failed is None and not self.done


@dataclass(slots=True)
class _Count:
    """The last count: what each trainer counted; answer: set once all have, or it is until then, by the clock, and they have not."""

    number: int
    until: float
    answers: dict[int, HeldRows] = field(default_factory=dict)
    answer: Future[Answer] = field(default_factory=Future)


class RunRequests:
    """The coordinator's side. members: the trainers' numbers; plan: what they are told."""

    def __init__(self, call: TrainingCall, members: Iterable[int], plan: PublishedPlan) -> None:
        self._call, self._members, self._plan = call, frozenset(members), plan
        self._number = 0
        self._scrub: _Scrub | None = None
        self._count: _Count | None = None

    def on_term(self, members: Iterable[int]) -> None:
        """Who the trainers are from now on. What the earlier ones were asked for may never be answered: it has failed."""
        self._members = frozenset(members)
        if self._scrub is not None and self._scrub.under_way:
            self._scrub.failed = "its trainers, or their lanes, changed meanwhile; scrub it again"
            self._plan.change(scrub=None)
        self._end_count(())

    def scrub(self, request: AskScrub) -> ScrubBegun | Refused:
        """Begin a scrub, if none is under way."""
        if not self._call.run.placement.r:
            return Refused("it has no parity, so there is nothing to check its rows against; train with --parity")
        if self._call.job.coordinator is not None:
            return Refused("it trains on several hosts, which cannot be told of its rows; scrub it when it rests")
        if self._scrub is not None and self._scrub.under_way:
            return Refused("a scrub of it is under way already; wait for its end")
        self._scrub = _Scrub(self._next_number(), self._members)
        self._plan.change(scrub=ScrubPlan(self._scrub.number, request.rows))
        return ScrubBegun(self._scrub.number)

    def scrubbed(self) -> ScrubProgress | Refused:
        """How far the last scrub is."""
        scrub = self._scrub
        if scrub is None:
            return ScrubProgress(False, 0, ())
        if scrub.failed is not None:
            return Refused(scrub.failed)
        parts = tuple(scrub.reports.values())
        return ScrubProgress(scrub.done, sum(part.stripes for part in parts), parts)

    def row_counts(self) -> Future[Answer]:
        """What each trainer counts; nothing at all where one does not answer within COUNT_TIMEOUT."""
        if self._count is None:
            self._count = _Count(self._next_number(), self._call.clock() + COUNT_TIMEOUT.total_seconds())
            self._plan.change(count=self._count.number)
        return self._count.answer

    def poll(self) -> None:
        """Answer a count that takes too long."""
        if self._count is not None and self._call.clock() > self._count.until:
            self._end_count(())

    def receive(self, trainer: int, report: RequestReport) -> None:
        """What a trainer reports of a request; of one before the last it does not count."""
        scrub, count = self._scrub, self._count
        if count is not None and count.number == report.number and report.held is not None:
            count.answers[trainer] = report.held
            if count.answers.keys() == self._members:
                self._end_count(count.answers.values())
        elif scrub is not None and scrub.number == report.number and scrub.under_way:
            scrub.failed = report.failed
            if report.scrubbed is not None:
                scrub.reports[trainer] = report.scrubbed

    def _end_count(self, counted: Iterable[HeldRows]) -> None:
        count, self._count = self._count, None
        if count is not None:
            count.answer.set_result(RowCountsAnswer(tuple(counted)))

    def _next_number(self) -> int:
        self._number += 1
        return self._number
