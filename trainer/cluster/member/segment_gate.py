"""Segments of a schedule are begun by all trainers or by none, so that they stop after the same step where one cannot be had."""

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
    """Training ends before a segment. failure: what is wrong with the schedule, None if the user wants the stop; goes_on: the term alone ends."""

    def __init__(self, failure: str | None, goes_on: bool) -> None:
        super().__init__(failure)
        self.failure, self.goes_on = failure, goes_on


class SegmentGate:
    """A trainer's side of the agreement, in a term: its leader decides, when all members have a segment's files.

    events: the program, from where training begins; its first segment is opened by the constructor, which raises ScheduleError, before any trainer
    begins. begins: the number of that segment, where a further term begins with it: it may not be there yet, and is agreed on like all later ones.
    begun: how many segments of the schedule were begun, those of earlier calls included.
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
        self._rendezvous, self._schedule, self._events = rendezvous, schedule, events
        self._trainer, self._leader, self._term = trainer, term.leader, term.number
        self._others = [other for other in term.members if other != term.leader]
        self._begins = begins
        self._first = next(events, None) if begins is None else None
        self.begun = begins or 0
        if self._first is not None:
            schedule.open(self._first.segment)
            self.begun = self._first.segment + 1

    def events(self, meanwhile: Callable[[], None]) -> Iterator[Event]:
        """The events, each further segment's once all trainers have it. Raises StoppedAtSegment, on all of them, where that will not be.

        meanwhile: called again and again while files or other trainers are waited for.
        """
        self._meanwhile = meanwhile
        event = self._first
        if self._begins is not None:
            self._agree(self._begins)
            self.begun = self._begins + 1
            event = next(self._events, None)
        while event is not None:
            yield event
            segment = self._schedule.segment(event.segment)
            assert segment is not None  # it was opened, so its files are there
            # Behind the segment's last event.
            if event.row + 1 == len(segment.samples):
                self._agree(event.segment + 1)
                self.begun = event.segment + 2
            event = next(self._events, None)

    def _agree(self, segment: int) -> None:
        """Return when every trainer can begin a segment, or knows that there is none."""
        if self._trainer != self._leader:
            # A verdict that is there already can only be against it: the leader waits for this trainer otherwise.
            failure = self._map_files(segment, lambda: self._rendezvous.poll(SegmentVerdict, self._term, segment) is not None)
            self._rendezvous.publish(SegmentFound(failure), self._term, segment, self._trainer)
            verdict = self._awaited(SegmentVerdict, self._term, segment)
        else:
            verdict = self._verdict(segment)
            if self._others:
                self._rendezvous.publish(verdict, self._term, segment)
        if not verdict.begin:
            raise StoppedAtSegment(verdict.failure, verdict.goes_on)

    def _verdict(self, segment: int) -> SegmentVerdict:
        """What the leader decides, when it and all others have the files, cannot have them, or a stop is wanted before they are there."""
        wanted: StopWanted | None = None

        def stop() -> bool:
            nonlocal wanted
            wanted = self._rendezvous.poll(StopWanted)
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
        """Wait until a segment is published, and map its files; returns what is wrong with them, or None. give_up: whether to wait no more."""
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
        """A fact of the rendezvous, waited for without end."""
        while (fact := self._rendezvous.poll(kind, *place)) is None:
            self._pause()
        return fact

    def _pause(self) -> None:
        self._meanwhile()
        time.sleep(_PAUSE_SECONDS)
