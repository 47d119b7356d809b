"""The coordinator's side of terms: who is a member, who is gone, and what the next term is (docs/internals/trainer.md, Terms)."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from datetime import timedelta

from foreload.trainer.cluster.board import Board
from foreload.trainer.cluster.facts import Lease, Term, TermBegins, TermOver
from foreload.trainer.cluster.messages import Ready, TermLeft
from foreload.trainer.cluster.terms import next_term
from foreload.trainer.compute.succession import next_hosts
from foreload.trainer.run.event_log import EventLog, LanesTakenOver, TermBegan, TrainerLost

# For a member that is alive to leave a term that is over, which it may not see before a store shard that it asks has been silent for too long, or a
# group has failed to form; one that does not is lost, too.
LEAVE_TIMEOUT = timedelta(seconds=30)
# For members that are silent, or do not leave, where the others have no complete copy of their lanes: as long as they are not dead, all may go on.
UNCOVERED_TIMEOUT = timedelta(seconds=300)
_SILENT, _LATE = "it is silent", "it does not leave the term"
FRUITLESS_TERMS = (
    3  # ended in a row without a step committed, all members alive: then one of them must go, since two cannot reach each other
)


class Membership:
    """The members of a job through its terms. One thread uses it.

    term: the one that is on the board; ready: who has told in it that it can begin. copies: how many trainers have each lane; silence: after which
    one that renews no lease is lost, None where losses are not survived. raise_term: notes a term's number in RUN before anyone owns lanes in it.
    kill: ends a trainer's process, if it is this machine's, and returns whether it is dead. tell: what the user is told, a line; events: where what
    befalls the run is noted.
    """

    def __init__(
        self,
        board: Board,
        term: Term,
        copies: int,
        silence: timedelta | None,
        raise_term: Callable[[int], None],
        kill: Callable[[int], bool],
        tell: Callable[[str], None],
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self.term, self._copies, self._silence = board, term, copies, silence
        self._raise_term, self._kill, self._tell, self._clock = raise_term, kill, tell, clock
        self._events = events
        self.ready: dict[int, Ready] = {}
        self.begun = False  # whether the term's steps have begun
        self._left: dict[int, TermLeft] = {}
        self._lost: dict[int, str] = {}  # of this term: who is gone, and why
        self._over_at: float | None = None  # when the term was ended
        self._waited_for: list[int] = []  # whom the user was told of
        self._fruitless = 0
        self._leases: dict[int, tuple[int, float]] = {}  # trainer -> its last count, and when that came
        self._looked_at = clock()
        board.publish(term, term.number)

    @property
    def survives(self) -> bool:
        """Whether the loss of a trainer is survived at all."""
        return self._silence is not None

    @property
    def all_ready(self) -> bool:
        """Whether every member can begin."""
        return self.ready.keys() == set(self.term.members)

    @property
    def changing(self) -> bool:
        """Whether a term is over, and the next one has not begun: then somebody waits."""
        return self._over_at is not None or not self.begun

    def receive(self, trainer: int, event: Ready | TermLeft) -> None:
        """What a member tells; of an earlier term it does not count."""
        if event.term != self.term.number:
            return
        match event:
            case Ready():
                self.ready[trainer] = event
            case TermLeft() if self._lost.get(trainer, _SILENT) in (_SILENT, _LATE):
                # It has come back in time.
                self._lost.pop(trainer, None)
                self._left[trainer] = event

    def see(self, gone: Mapping[int, str], ended: Iterable[int]) -> bool:
        """See to the term: end it where a member is gone, begin the next one when all that are there have left. Returns whether one began.

        gone: whose process has ended before its time, and how; ended: who needs no other trainer any more. Raises LanesLost.
        """
        if not self.survives:
            return False
        dead = {trainer: gone[trainer] for trainer in self.term.members if trainer in gone}
        self._lost = {trainer: why for trainer, why in dead.items() if trainer not in ended} | self._lost
        for trainer in self._silent():
            if trainer not in self._left:
                self._lost.setdefault(trainer, _SILENT)
        if self._over_at is None:
            if not self._lost and not self._left:
                return False
            self._over_at = self._clock()
            self._board.publish(TermOver(), self.term.number)
        # Who has ended is needed, too, by those that have not.
        self._lost = dead | self._lost
        present = [trainer for trainer in self.term.members if trainer not in self._lost]
        late = [trainer for trainer in present if trainer not in self._left]
        if late and self._clock() - self._over_at < LEAVE_TIMEOUT.total_seconds():
            return False
        for trainer in late:
            self._lost[trainer] = _LATE
        there = [trainer for trainer in present if trainer in self._left]
        if self._is_waited_for(there, gone):
            return False
        self._begin_next(there)
        return True

    def _is_waited_for(self, there: list[int], gone: Container[int]) -> bool:
        """Whether one that is lost, but not known to be dead, may have lanes that nobody else has, and is waited for."""
        alive = [trainer for trainer in self._lost if trainer not in gone]
        complete = [[trainer for trainer in there if lane in self._left[trainer].copies] for lane in range(len(self.term.hosts))]
        lacking = [lane for lane, host in enumerate(next_hosts(self.term.hosts, complete, there)) if host is None]
        assert self._over_at is not None
        if not alive or not lacking or self._clock() - self._over_at > UNCOVERED_TIMEOUT.total_seconds():
            return False
        if self._waited_for != alive:
            named = ", ".join(f"trainer {trainer}: {self._lost[trainer]}" for trainer in alive)
            self._tell(f"{named}; waited for, since no other trainer has a complete copy of lane {', '.join(map(str, lacking))}")
        self._waited_for = alive
        return True

    def _begin_next(self, present: list[int]) -> None:
        if not self._lost:
            # All are alive: a connection between two of them broke.
            self._fruitless += 1
            if self._fruitless >= FRUITLESS_TERMS and len(present) > 1:
                last = present.pop()
                self._lost[last] = f"the trainers cannot reach each other ({self._left[last].why})"
        killed = [self._kill(trainer) for trainer in self._lost]
        for trainer, why in self._lost.items():
            self._events.note(TrainerLost(trainer=trainer, cause=why))
        before = self.term
        self.term = next_term(before, {trainer: self._left[trainer] for trainer in present}, self._copies, all(killed))
        if self.term.committed > before.committed:
            self._fruitless = 0
        self._note_takeovers(before)
        for trainer, why in self._lost.items():
            moved = [lane for lane, host in enumerate(before.hosts) if host == trainer]
            to = ", ".join(f"{lane} to trainer {self.term.hosts[lane]}" for lane in moved)
            self._tell(f"trainer {trainer}: lost ({why}); training goes on after step {self.term.committed}, lane {to}")
        if self._lost and len(present) < self._copies:
            self._tell(
                f"{len(present)} trainer{'s are' if len(present) > 1 else ' is'} left: "
                + ("a further loss is not survived" if len(present) == 1 else f"each lane is held by {len(present)} at most")
            )
        self._raise_term(self.term.number)
        self.ready, self._left, self._lost, self._over_at, self.begun = {}, {}, {}, None, False
        self._waited_for = []
        self._board.publish(self.term, self.term.number)

    def _note_takeovers(self, before: Term) -> None:
        """Note who has the lanes of those that were lost in a term, in the one that follows."""
        self._events.step, self._events.term = self.term.committed, self.term.number
        for trainer in self._lost:
            for taker in self.term.members:
                lanes = tuple(lane for lane in before.lanes_of(trainer) if self.term.hosts[lane] == taker)
                if lanes:
                    self._events.note(LanesTakenOver(lanes=lanes, from_trainer=trainer, to_trainer=taker))

    def begin(self) -> bool:
        """Have the term's steps begin if all members are ready; returns whether they did just now."""
        if self.begun or self._over_at is not None or not self.all_ready:
            return False
        self.begun = True
        self._board.publish(TermBegins(), self.term.number)
        self._events.note(TermBegan(members=self.term.members, lanes=self.term.hosts))
        return True

    def _silent(self) -> list[int]:
        """Members whose lease has run out; none where there is only one, whose lanes nobody else has."""
        assert self._silence is not None
        if len(self.term.members) == 1:
            return []
        now = self._clock()
        # Where this process was stopped itself, nobody can be blamed for its silence meanwhile.
        if now - self._looked_at > self._silence.total_seconds() / 2:
            self._leases = {trainer: (count, now) for trainer, (count, _) in self._leases.items()}
        self._looked_at = now
        silent = []
        for trainer in self.term.members:
            lease = self._board.poll(Lease, trainer)
            if lease is None:
                continue  # it is still starting; if it dies, its process ends
            known = self._leases.get(trainer)
            if known is None or known[0] != lease.count:
                self._leases[trainer] = lease.count, now
            elif now - known[1] > self._silence.total_seconds():
                silent.append(trainer)
        return silent
