"""The agreement by which all trainers begin a segment of the schedule, or none does.

So all trainers stop after the same step if a segment is not available.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.facts import SegmentFound, SegmentVerdict, StopWanted, Term
from foreload.trainer.cluster.messages.rendezvous import Rendezvous

_PAUSE_SECONDS = 0.02

_Fact = TypeVar("_Fact")


class StoppedAtSegment(Exception):
    """Training stops before a segment begins.

    Attributes:
        failure: What is wrong with the schedule. None if the user asked for the stop, or if only
            the term ends.
        goes_on: Only the term ends; training continues in the next one.
    """

    def __init__(self, failure: str | None, goes_on: bool) -> None:
        super().__init__(failure)
        self.failure, self.goes_on = failure, goes_on


class SegmentGate:
    """A trainer's side of the agreement within a term.

    The term's leader decides when all members have a segment's files.

    Attributes:
        begun: Number of segments of the schedule that were begun, including those of earlier calls.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        schedule: Schedule,
        events: Iterator[Event],
        trainer: int,
        term: Term,
        begins: int | None = None,
    ) -> None:
        """Open the first segment, unless the trainers must agree on it first.

        Args:
            events: The program from the point where training begins.
            begins: Number of the first segment, if a later term begins with it. That segment may
                not be published yet, so the trainers agree on it as on all later ones. If None,
                it is opened here, before any trainer begins.

        Raises:
            ScheduleError: The first segment cannot be opened.
        """
        self._rendezvous, self._schedule, self._events = rendezvous, schedule, events
        self._trainer, self._leader, self._term = trainer, term.leader, term.number
        self._others = [other for other in term.members if other != term.leader]
        self._begins = begins
        self._first = next(events, None) if begins is None else None
        self.begun = begins or 0
        if self._first is not None:
            schedule.open(self._first.segment)
            self.begun = self._first.segment + 1

    def events(self, meanwhile: Callable[[], None], agreed: Callable[[], None]) -> Iterator[Event]:
        """Yield the events, those of each further segment once all trainers have its files.

        Args:
            meanwhile: Called repeatedly while this trainer waits for files or other trainers.
            agreed: Called before the first event of each segment that the trainers have agreed on.

        Raises:
            StoppedAtSegment: A segment does not begin. Every trainer raises this.
        """
        self._meanwhile, self._agreed = meanwhile, agreed
        event = self._first
        if self._begins is not None:
            self._agree(self._begins)
            self.begun = self._begins + 1
            event = next(self._events, None)
        while event is not None:
            yield event
            segment = self._schedule.segment(event.segment)
            assert segment is not None  # it was opened, so its files exist
            # After the segment's last event, the trainers agree on the next segment.
            if event.row + 1 == len(segment.samples):
                self._agree(event.segment + 1)
                self.begun = event.segment + 2
            event = next(self._events, None)

    def _agree(self, segment: int) -> None:
        """Return once every trainer has a segment's files, else raise StoppedAtSegment."""
        if self._trainer != self._leader:
            # A verdict that exists before this trainer's report can only be negative: for any other
            # verdict, the leader waits for that report.
            failure = self._map_files(segment, lambda: self._rendezvous.poll(SegmentVerdict, self._term, segment) is not None)
            self._rendezvous.publish(SegmentFound(failure), self._term, segment, self._trainer)
            verdict = self._awaited(SegmentVerdict, self._term, segment)
        else:
            verdict = self._verdict(segment)
            if self._others:
                self._rendezvous.publish(verdict, self._term, segment)
        if not verdict.begin:
            raise StoppedAtSegment(verdict.failure, verdict.goes_on)
        self._agreed()

    def _verdict(self, segment: int) -> SegmentVerdict:
        """Return the leader's verdict on a segment.

        Waits until the leader and all other members have the files or a failure, or until a stop is
        requested before the leader has the files.
        """
        wanted: StopWanted | None = None

        def stop() -> bool:
            nonlocal wanted
            wanted = self._rendezvous.poll(StopWanted)
            # A request to end another term does not concern this one.
            if wanted is not None and wanted.term not in (None, self._term):
                wanted = None
            return wanted is not None

        failure = self._map_files(segment, stop)
        if wanted is not None:
            return SegmentVerdict(False, None, goes_on=wanted.term is not None)
        for other in self._others if failure is None else ():
            theirs = self._awaited(SegmentFound, self._term, segment, other)
            failure = failure or theirs.failure
        return SegmentVerdict(failure is None, failure)

    def _map_files(self, segment: int, give_up: Callable[[], bool]) -> str | None:
        """Wait until a segment is published, and map its files.

        Args:
            segment: Number of the segment.
            give_up: Returns whether to stop waiting.

        Returns:
            What is wrong with the schedule. None if the files are mapped or waiting was given up.
        """
        try:
            while not self._schedule.published(segment):
                if give_up():
                    return None
                self._schedule.check_growing(segment)
                self._pause()
            self._schedule.open(segment)
        except ScheduleError as error:
            return str(error)
        return None

    def _awaited(self, kind: type[_Fact], *place: int) -> _Fact:
        """Wait for a fact of the rendezvous, without a timeout, and return it."""
        while (fact := self._rendezvous.poll(kind, *place)) is None:
            self._pause()
        return fact

    def _pause(self) -> None:
        self._meanwhile()
        time.sleep(_PAUSE_SECONDS)
