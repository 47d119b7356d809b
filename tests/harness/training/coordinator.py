"""A coordinator in memory for `training.train`: it states each term by the rules of `coordinator.terms`, as the real one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from foreload.trainer.cluster.coordinator.terms import NO_CHANGE, Change, changed_term, next_term, wants_change
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.cluster.messages.trainers import TermLeft
from foreload.trainer.step.transport import LocalHub, LocalTransport

PATIENCE_SECONDS = 60.0


class Died(BaseException):
    """Ends a trainer as a crash would: no other code catches it."""


class Coordinator:
    """States the next term when every living member has left the current one. Any thread may call it.

    Attributes:
        term: the current term.
        terms: all terms so far, the current one last.
    """

    def __init__(self, first: Term, copies: int, changes: Mapping[int, Change]) -> None:
        """Begin with the term `first`.

        Args:
            first: the first term.
            copies: how many trainers hold each lane, its host included.
            changes: by training step, the change of members and lanes for which a term ends after that step.
        """
        self.term, self.terms = first, [first]
        self._copies, self._changes, self._change = copies, dict(changes), NO_CHANGE
        self._changed = threading.Condition()
        self._hub = LocalHub(first.members)
        self._ends_after: int | None = None  # the step that the leader named
        self._complete: dict[int, Collection[int]] = {}  # trainer -> the lanes of its complete copies
        self._left: dict[int, TermLeft] = {}
        self._dead: set[int] = set()
        self._handed_over: set[tuple[int, int]] = set()  # term and trainer
        self._finished = False

    def transport(self, trainer: int) -> LocalTransport:
        """Return a member's transport in the current term."""
        with self._changed:
            return self._hub.transports()[self.term.members.index(trainer)]

    def await_membership(self, trainer: int) -> bool:
        """Wait until a term has the trainer as a member. Returns False if training finishes first."""
        with self._changed:
            self._changed.wait_for(lambda: trainer in self.term.members or self._finished)
            return trainer in self.term.members

    def report_copies(self, trainer: int, lanes: Collection[int]) -> None:
        """Note the lanes of which a trainer holds complete copies."""
        with self._changed:
            self._complete[trainer] = lanes

    def plan_end(self, trainer: int, step: int) -> None:
        """If this is the leader and a change is due, end the term after the training step that follows `step`.

        The leader sends nothing of that step before it has called this, so every trainer that finishes the step knows.
        """
        with self._changed:
            if trainer != self.term.leader or self._ends_after is not None:
                return
            for due in sorted(at for at in self._changes if at <= step + 1):
                self._add_change(self._changes.pop(due))
            complete = [
                {*holders, *(holder for holder, lanes in self._complete.items() if lane in lanes)}
                for lane, holders in enumerate(self.term.complete)
            ]
            if wants_change(self.term, complete, self._change):
                self._ends_after = step + 1

    def _add_change(self, change: Change) -> None:
        joining, leaving = (*self._change.joining, *change.joining), (*self._change.leaving, *change.leaving)
        self._change = Change(joining, leaving, change.targets)

    def ends_after(self, step: int) -> bool:
        """Return whether the current term ends after training step `step`."""
        with self._changed:
            return step == self._ends_after

    def next(self, trainer: int, left: TermLeft) -> Term:
        """Leave the current term and return the next one, once every living member has left.

        Raises Died if training finishes instead.
        """
        with self._changed:
            before = self.term
            assert left.term == before.number
            self._left[trainer] = left
            self._disconnect(trainer)
            self._state_next()
            self._wait("a further term", lambda: self.term is not before)
            return self.term

    def crash(self, trainer: int) -> None:
        """Note that a trainer has crashed. Raises LanesLost if no complete copy of one of its lanes is left."""
        with self._changed:
            self._dead.add(trainer)
            self._disconnect(trainer)
            self._state_next()

    def finish(self) -> None:
        """Training is over: nobody waits for a further term."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def hand_over(self, trainer: int) -> None:
        """Note that a trainer no longer hosts the lanes that the current term gives to others."""
        with self._changed:
            self._handed_over.add((self.term.number, trainer))
            self._changed.notify_all()

    def await_handed_over(self, term: Term, lanes: Sequence[int]) -> None:
        """Wait until the former hosts of these lanes have handed them over, or are dead."""
        former = {host for lane in lanes if term.former and (host := term.former[lane]) is not None}
        with self._changed:
            self._wait("lanes", lambda: all((term.number, host) in self._handed_over or host in self._dead for host in former))

    def _wait(self, what: str, satisfied: Callable[[], bool]) -> None:
        assert self._changed.wait_for(lambda: satisfied() or self._finished, PATIENCE_SECONDS), (
            f"no trainer brought about: {what}"
        )
        if not satisfied():
            raise Died

    def _disconnect(self, trainer: int) -> None:
        if trainer in self.term.members:
            self._hub.transports()[self.term.members.index(trainer)].close()

    def _state_next(self) -> None:
        before = self.term
        alive = [trainer for trainer in before.members if trainer not in self._dead]
        if alive and not self._finished and all(trainer in self._left for trainer in alive):
            standings = {trainer: self._left[trainer] for trainer in alive}
            if len(alive) == len(before.members) and all(left.why is None for left in standings.values()):
                self.term = changed_term(before, standings, self._copies, self._change)
                members = self.term.members
                joining = tuple(trainer for trainer in self._change.joining if trainer not in members)
                leaving = tuple(trainer for trainer in self._change.leaving if trainer in members)
                self._change = Change(joining, leaving)
            else:
                self.term = next_term(before, standings, self._copies)
            self.terms.append(self.term)
            self._hub = LocalHub(self.term.members)
            self._ends_after, self._left, self._complete = None, {}, {}
        self._changed.notify_all()
