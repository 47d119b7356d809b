"""Segments of a schedule are begun by all trainers or by none, so that they stop after the same step where one cannot be had."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.board import Board
from foreload.trainer.cluster.facts import SegmentFound, SegmentVerdict, StopWanted

_PAUSE_SECONDS = 0.02

_Fact = TypeVar("_Fact")


class StoppedAtSegment(Exception):
    """Training ends before a segment. failure: what is wrong with the schedule, None if the user wants the stop."""

    def __init__(self, failure: str | None) -> None:
        super().__init__(failure)
        self.failure = failure


class SegmentGate:
    """A trainer's side of the agreement. Of the trainers `members`, `leader` decides, when all have a segment's files.

    events: the program, from where training begins; the segment there is opened here, before any trainer begins. Raises ScheduleError. begun: how
    many segments of the schedule were begun.
    """

    def __init__(
        self, board: Board, schedule: Schedule, events: Iterator[Event], trainer: int, members: Sequence[int], leader: int
    ) -> None:
        self._board, self._schedule, self._events = board, schedule, events
        self._trainer, self._leader = trainer, leader
        self._others = [other for other in members if other != leader]
        self._first = next(events, None)
        self.begun = 0
        if self._first is not None:
            schedule.open(self._first.segment)
            self.begun = self._first.segment + 1

    def events(self, meanwhile: Callable[[], None]) -> Iterator[Event]:
        """The events, each further segment's once all trainers have it. Raises StoppedAtSegment, on all of them, where that will not be.

        meanwhile: called while one waits.
        """
        self._meanwhile = meanwhile
        event = self._first
        while event is not None:
            yield event
            segment = self._schedule.segment(event.segment)
            assert segment is not None
            if event.row + 1 == len(segment.samples):
                self._agree(event.segment + 1)
                self.begun = event.segment + 2
            event = next(self._events, None)

    def _agree(self, segment: int) -> None:
        """Return when every trainer can begin a segment, or knows that there is none."""
        if self._trainer != self._leader:
            failure = self._found(segment, lambda: self._board.poll(SegmentVerdict, segment) is not None)
            self._board.publish(SegmentFound(failure), segment, self._trainer)
            verdict = self._awaited(SegmentVerdict, segment)
        else:
            verdict = self._verdict(segment)
            if self._others:
                self._board.publish(verdict, segment)
        if not verdict.begin:
            raise StoppedAtSegment(verdict.failure)

    def _verdict(self, segment: int) -> SegmentVerdict:
        unwanted = False

        def stop() -> bool:
            nonlocal unwanted
            unwanted = self._board.poll(StopWanted) is not None
            return unwanted

        failure = self._found(segment, stop)
        if unwanted:
            return SegmentVerdict(False, None)
        for other in self._others if failure is None else ():
            found = self._awaited(SegmentFound, segment, other)
            failure = failure or found.failure
        return SegmentVerdict(failure is None, failure)

    def _found(self, segment: int, enough: Callable[[], bool]) -> str | None:
        """Wait until a segment is there, and map its files; what is wrong, if it is. enough: whether to wait no more."""
        try:
            while not self._schedule.published(segment):
                if enough():
                    return None
                self._schedule.check_growing(segment)
                self._pause()
            self._schedule.open(segment)
        except ScheduleError as error:
            return str(error)
        return None

    def _awaited(self, kind: type[_Fact], *place: int) -> _Fact:
        """A fact of the board, waited for without end."""
        while (fact := self._board.poll(kind, *place)) is None:
            self._pause()
        return fact

    def _pause(self) -> None:
        self._meanwhile()
        time.sleep(_PAUSE_SECONDS)
