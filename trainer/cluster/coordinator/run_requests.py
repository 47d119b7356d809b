"""What is asked of a training run over its control socket and done by all of its trainers, each for its lanes: a scrub, and a count of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from foreload.trainer.cluster.messages.control import AskScrub, Refused, RowCountsAnswer, ScrubBegun, ScrubProgress
from foreload.trainer.cluster.messages.trainers import (
    CountRows,
    HeldRows,
    RowsCounted,
    Scrub,
    ScrubFailed,
    ScrubTold,
    TrainerCommand,
)

COUNT_TIMEOUT = timedelta(seconds=3)  # less than an answer on the control socket may take


@dataclass(slots=True)
class _Scrub:
    """The last scrub: by which trainers, what each of them last reported of it, and why it is over, if that is not since all are through."""

    number: int
    members: frozenset[int]
    reports: dict[int, ScrubTold] = field(default_factory=dict)
    failed: str | None = None

    @property
    def done(self) -> bool:
        """Whether each trainer is through with its lanes."""
        return self.reports.keys() == self.members and all(report.scrubbed.done for report in self.reports.values())

    @property
    def under_way(self) -> bool:
        return self.failed is None and not self.done


@dataclass(slots=True)
class _Count:
    """The last count: what each trainer counted."""

    number: int
    answers: dict[int, HeldRows] = field(default_factory=dict)


class RunRequests:
    """The coordinator's side. members: the trainers' numbers; protected: whether there is parity; training: whether all of them are ready;
    over_hosts: whether they are on several hosts.

    scrub, scrubbed and row_counts are called in threads of the control socket, the rest in the main one.
    """

    def __init__(self, members: Iterable[int], protected: bool, training: Callable[[], bool], over_hosts: bool = False) -> None:
        self._members, self._protected, self._training = frozenset(members), protected, training
        self._over_hosts = over_hosts
        self._condition = threading.Condition()
        self._commands: list[TrainerCommand] = []
        self._number = 0
        self._scrub: _Scrub | None = None
        self._count: _Count | None = None

    def on_term(self, members: Iterable[int]) -> None:
        """Who the trainers are from now on. What the earlier ones were asked for may never be answered: it has failed."""
        with self._condition:
            self._members = frozenset(members)
            if self._scrub is not None and self._scrub.under_way:
                self._scrub.failed = "its trainers, or their lanes, changed meanwhile; scrub it again"
            self._count = None
            self._condition.notify_all()

    def scrub(self, request: AskScrub) -> ScrubBegun | Refused:
        """Begin a scrub, if none is under way."""
        if not self._protected:
            return Refused("it has no parity, so there is nothing to check its rows against; train with --parity")
        if self._over_hosts:
            return Refused("it trains on several hosts, which cannot be told of its rows; scrub it when it rests")
        if not self._training():
            return Refused("its trainers are still starting; try again in a moment")
        with self._condition:
            if self._scrub is not None and self._scrub.under_way:
                return Refused("a scrub of it is under way already; wait for its end")
            self._scrub = _Scrub(self._next_number(), self._members)
            self._commands.append(Scrub(self._scrub.number, request.rows))
            return ScrubBegun(self._scrub.number)

    def scrubbed(self) -> ScrubProgress | Refused:
        """How far the last scrub is."""
        with self._condition:
            scrub = self._scrub
            if scrub is None:
                return ScrubProgress(False, 0, ())
            if scrub.failed is not None:
                return Refused(scrub.failed)
            parts = tuple(report.scrubbed for report in scrub.reports.values())
            return ScrubProgress(scrub.done, sum(part.stripes for part in parts), parts)

    def row_counts(self) -> RowCountsAnswer:
        """What each trainer counts; nothing at all where one does not answer within COUNT_TIMEOUT."""
        if not self._training():
            return RowCountsAnswer(())
        with self._condition:
            if self._count is None or self._is_counted(self._count):
                self._count = _Count(self._next_number())
                self._commands.append(CountRows(self._count.number))
            count = self._count
            counted = self._condition.wait_for(lambda: self._is_counted(count), COUNT_TIMEOUT.total_seconds())
            return RowCountsAnswer(tuple(count.answers.values()) if counted else ())

    def take(self) -> list[TrainerCommand]:
        """Take the commands that are to go to all trainers."""
        with self._condition:
            taken, self._commands = self._commands, []
            return taken

    def receive(self, trainer: int, event: ScrubTold | ScrubFailed | RowsCounted) -> None:
        """What a trainer reports of a request; of one before the last it does not count."""
        with self._condition:
            match event:
                case RowsCounted():
                    if self._count is not None and self._count.number == event.number:
                        self._count.answers[trainer] = event.held
                        self._condition.notify_all()
                case ScrubTold() | ScrubFailed():
                    scrub = self._scrub
                    if scrub is None or scrub.number != event.number or not scrub.under_way:
                        return
                    if isinstance(event, ScrubFailed):
                        scrub.failed = event.error
                    else:
                        scrub.reports[trainer] = event

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _is_counted(self, count: _Count) -> bool:
        return count.answers.keys() == self._members
