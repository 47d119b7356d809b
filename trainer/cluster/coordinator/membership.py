"""The coordinator's side of terms: the members, the copies that they hold, who was lost, and the next term (docs/internals/trainer.md, Terms)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from datetime import timedelta

from foreload.trainer.cluster.coordinator.terms import NO_CHANGE, changed_term, next_term, wants_change
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.control import CopyStatus
from foreload.trainer.cluster.messages.facts import Admitted, HandedOver, Lease, StopWanted, Term, TermBegins, TermOver
from foreload.trainer.cluster.messages.rendezvous import Rendezvous, clear_agreement
from foreload.trainer.cluster.messages.trainers import CopiesTold, Ready, SeededCopy, TermLeft
from foreload.trainer.errors import LanesLost, after_step
from foreload.trainer.job.succession import next_hosts
from foreload.trainer.run.event_log import (
    CopiesComplete,
    CopiesIncomplete,
    LanesMoved,
    LanesTakenOver,
    TermBegan,
    TrainerJoined,
    TrainerLeft,
    TrainerLost,
)

# For a member that is alive to leave a term that is over, which it may not see before a store shard that it asks has been silent for too long, or a
# group has failed to form; one that does not is lost, too.
LEAVE_TIMEOUT = timedelta(seconds=30)
# For members that are silent, or do not leave, where the others have no complete copy of their lanes: as long as they are not dead, all may go on.
UNCOVERED_TIMEOUT = timedelta(seconds=300)
SILENT, _LATE = "it is silent", "it does not leave the term"
FRUITLESS_TERMS = (
    3  # ended in a row without a step committed, all members alive: then one of them must go, since two cannot reach each other
)


class Membership:
    """The members of a job through its terms.

    term: the newest, which is in the rendezvous store once the first was put there; ready: who has reported in it that it can begin. kill: ends a
    trainer's process, if it is this machine's, and returns whether it is dead.

    change: who can join and who is to leave, set by the caller; members and lanes then change as soon as may be.
    """

    def __init__(
        self,
        call: TrainingCall,
        rendezvous: Rendezvous,
        term: Term,
        kill: Callable[[int], bool],
    ) -> None:
        self._call, self._rendezvous, self.term, self._kill, self._clock = call, rendezvous, term, kill, call.clock
        self._copies, self._silence = call.job.replicas_wanted, call.job.peer_silence
        self.ready: dict[int, Ready] = {}
        self.begun = False  # whether the term's steps have begun
        self.change = NO_CHANGE
        self.lost: tuple[int, ...] = ()  # with the term before
        self._left: dict[int, TermLeft] = {}
        self._lost: dict[int, str] = {}  # of this term: who is gone, and why
        self._complete: dict[int, set[int]] = {}  # trainer -> the lanes whose copies it has reported complete
        self._asked = False  # whether the end of this term was asked for
        self._over_at: float | None = None  # when the term was ended
        self._waited_for: list[int] = []  # those that were reported to the user
        self._stated_at = call.clock()
        self._handing: set[int] = set()  # who left with the term before, and has yet to hand its lanes over
        self._fruitless = 0
        self._leases: dict[int, tuple[int, float]] = {}  # trainer -> its last count, and when that came
        self._looked_at = call.clock()

    @property
    def survives(self) -> bool:
        """Whether the loss of a trainer is survived at all, in this term."""
        return any(self.term.copies)

    @property
    def all_ready(self) -> bool:
        """Whether every member can begin."""
        return self.ready.keys() == set(self.term.members)

    @property
    def changing(self) -> bool:
        """Whether a term is over, or about to be, or the next one has not begun: then somebody waits."""
        return self._over_at is not None or bool(self._left) or not self.begun

    @property
    def at_rest(self) -> bool:
        """Whether nothing is to change: the term's steps run, and every lane is where it is to be."""
        return self.begun and not self.lanes_to_move and not self._asked and not wants_change(self.term, (), self.change)

    @property
    def lanes_to_move(self) -> int:
        """How many lanes are not where they are to be."""
        return sum(host != target for host, target in zip(self.term.hosts, self.term.targets, strict=True))

    def receive(self, trainer: int, event: Ready | TermLeft | CopiesTold) -> None:
        """What a member reports; of an earlier term it does not count."""
        if event.term != self.term.number:
            return
        match event:
            case Ready():
                self.ready[trainer] = event
            case TermLeft() if self._lost.get(trainer, SILENT) in (SILENT, _LATE):
                # It has come back in time.
                self._lost.pop(trainer, None)
                self._left[trainer] = event
            case CopiesTold():
                # In a term none becomes incomplete again, whatever an older report says that comes later.
                self._complete.setdefault(trainer, set()).update(lane for lane, copy in event.copies.items() if copy.complete)

    def poll(self, gone: Mapping[int, str], ended: Iterable[int], may_change: bool = True) -> bool:
        """See to the term: end it where a member is gone, begin the next one when all that are there have left. Returns whether one began.

        gone: whose process has ended before its time, and how; ended: who needs no other trainer any more; may_change: whether a term may be ended so
        that members or lanes change. Raises LanesLost.
        """
        dead = {trainer: gone[trainer] for trainer in self.term.members if trainer in gone}
        if self.survives:
            self._lost = {trainer: why for trainer, why in dead.items() if trainer not in ended} | self._lost
            for trainer in self.silent():
                if trainer not in self._left:
                    self._lost.setdefault(trainer, SILENT)
        self._see_handed_over(gone)
        if self._over_at is None:
            planned = all(left.why is None for left in self._left.values())
            if not self._lost and planned and self._left.keys() != set(self.term.members):
                if (
                    may_change
                    and self.begun
                    and not self._asked
                    and wants_change(self.term, self._complete_replicas(), self.change)
                ):
                    self._asked = True
                    self._rendezvous.publish(StopWanted(self.term.number))
                return False
            self._over_at = self._clock()
            if self._lost or not planned:
                self._rendezvous.publish(TermOver(), self.term.number)
        # Who has ended is needed, too, by those that have not.
        self._lost = dead | self._lost
        present = [trainer for trainer in self.term.members if trainer not in self._lost]
        late = [trainer for trainer in present if trainer not in self._left]
        if self._handing or (late and self._clock() - self._over_at < LEAVE_TIMEOUT.total_seconds()):
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
            self._call.say(
                f"{named}; waited for, since no other trainer has a complete copy of lane {', '.join(map(str, lacking))}"
            )
        self._waited_for = alive
        return True

    def _complete_replicas(self) -> list[set[int]]:
        """Of each lane, the trainers with complete copies by now."""
        return [
            {*complete, *(trainer for trainer, lanes in self._complete.items() if lane in lanes)}
            for lane, complete in enumerate(self.term.complete)
        ]

    def _see_handed_over(self, gone: Mapping[int, str]) -> None:
        """See to those that left with the term before: once one is dead, nobody waits for what it hands over, and one that is too slow is ended."""
        for trainer in list(self._handing):
            handed = self._rendezvous.poll(HandedOver, self.term.number, trainer) is not None
            if not handed and (trainer in gone or self._clock() - self._stated_at > LEAVE_TIMEOUT.total_seconds()):
                self._kill(trainer)
                self._rendezvous.publish(HandedOver(), self.term.number, trainer)
                handed = True
            if handed:
                self._handing.discard(trainer)

    def _begin_next(self, present: list[int]) -> None:
        before, positions = self.term, {trainer: self._left[trainer] for trainer in present}
        if not self._lost and all(position.why is None for position in positions.values()):
            killed = []
            self.term = changed_term(before, positions, self._copies, self.change, self._call.machines)
        else:
            if not self._lost and not any(position.keeps for position in positions.values()):
                # All are alive: a connection between two of them broke.
                self._fruitless += 1
                if self._fruitless >= FRUITLESS_TERMS and len(present) > 1:
                    last = present.pop()
                    self._lost[last] = f"the trainers cannot reach each other ({positions.pop(last).why})"
            killed = [self._kill(trainer) for trainer in self._lost]
            for trainer, why in self._lost.items():
                self._call.events.note(TrainerLost(trainer=trainer, cause=why))
            try:
                self.term = next_term(before, positions, self._copies, all(killed), self._call.machines, self.change.leaving)
            except LanesLost as error:
                raise LanesLost(error.lanes, error.trainers, self._lost) from None
        if self.term.committed > before.committed:
            self._fruitless = 0
        self._call.events.step, self._call.events.term = self.term.committed, self.term.number
        self._tell_lost(before)
        self._tell_changed(before)
        self._call.raise_term(self.term.number)
        clear_agreement(self._rendezvous, before)
        self.lost = tuple(self._lost)
        self.ready, self._left, self._lost, self._over_at, self.begun = {}, {}, {}, None, False
        self._waited_for = []
        self._complete, self._asked, self._stated_at = {}, False, self._clock()
        self._handing = {former for former in self.term.former if former is not None} - set(self.term.members)
        self._rendezvous.publish(self.term, self.term.number)
        for trainer in set(self.term.members) - set(before.members):
            self._rendezvous.publish(Admitted(self.term.number), trainer)

    def _tell_lost(self, before: Term) -> None:
        """Report those that were lost, and who has their lanes."""
        term = self.term
        for trainer, why in self._lost.items():
            takers = {lane: term.hosts[lane] for lane in before.lanes_of(trainer)}
            for taker in sorted(set(takers.values())):
                lanes = tuple(lane for lane, host in takers.items() if host == taker)
                self._call.events.note(LanesTakenOver(lanes=lanes, from_trainer=trainer, to_trainer=taker))
            to = ", lane " + ", ".join(f"{lane} to trainer {host}" for lane, host in takers.items()) if takers else ""
            self._call.say(f"trainer {trainer}: lost ({why}); training goes on {after_step(term.committed)}{to}")
        if self._lost and len(term.members) < self._copies:
            count = len(term.members)
            self._call.say(
                f"{count} trainer{'s are' if count > 1 else ' is'} left: "
                + ("a further loss is not survived" if count == 1 else f"each lane is held by {count} at most")
            )

    def _tell_changed(self, before: Term) -> None:
        """Report those that came and left in order, and the lanes that were handed over."""
        term = self.term
        for trainer in term.members:
            if trainer not in before.members:
                self._call.events.note(TrainerJoined(trainer=trainer))
                self._call.say(f"trainer {trainer}: joined {after_step(term.committed)}; it gets copies of its lanes first")
        moves: dict[tuple[int, int], list[int]] = {}
        for lane, former in enumerate(term.former):
            if former is not None:
                moves.setdefault((former, term.hosts[lane]), []).append(lane)
        for (giver, taker), lanes in moves.items():
            self._call.events.note(LanesMoved(lanes=tuple(lanes), from_trainer=giver, to_trainer=taker))
            named = ", ".join(map(str, lanes))
            self._call.say(f"lane {named}: handed over from trainer {giver} to trainer {taker} {after_step(term.committed)}")
        for trainer in term.left:
            if trainer not in before.left:
                self._call.events.note(TrainerLeft(trainer=trainer))
                self._call.say(f"trainer {trainer}: left {after_step(term.committed)}")

    def begin(self) -> bool:
        """Have the term's steps begin if all members are ready; returns whether they did just now."""
        if self.begun or self._over_at is not None or not self.all_ready:
            return False
        self.begun = True
        self._rendezvous.publish(TermBegins(), self.term.number)
        self._call.events.note(TermBegan(members=self.term.members, lanes=self.term.hosts))
        return True

    def silent(self) -> list[int]:
        """Members whose lease has run out; none where there is only one, whose lanes nobody else has."""
        if len(self.term.members) == 1:
            return []
        now = self._clock()
        # Where this process was stopped itself, nobody can be blamed for its silence meanwhile.
        if now - self._looked_at > self._silence.total_seconds() / 2:
            self._leases = {trainer: (count, now) for trainer, (count, _) in self._leases.items()}
        self._looked_at = now
        silent = []
        for trainer in self.term.members:
            lease = self._rendezvous.poll(Lease, trainer)
            if lease is None:
                continue  # it is still starting; if it dies, its process ends
            known = self._leases.get(trainer)
            if known is None or known[0] != lease.count:
                self._leases[trainer] = lease.count, now
            elif now - known[1] > self._silence.total_seconds():
                silent.append(trainer)
        return silent


_NOTHING = SeededCopy(0, 0, False)


class LaneReplicas:
    """The copies in the term that is."""

    def __init__(self, call: TrainingCall, term: Term) -> None:
        self._call, self._term = call, term
        self._reported: dict[int, CopiesTold] = {}  # by each trainer, of the term
        self._exposed = False  # whether the user knows that the loss of a trainer is not survived for now

    def on_term(self, term: Term) -> None:
        """A further term: how its copies are is reported anew."""
        self._term, self._reported = term, {}

    def on_copies(self, trainer: int, event: CopiesTold) -> None:
        """Note how a trainer's copies are, and tell the user when that decides whether a further loss is survived."""
        if event.term != self._term.number:
            return
        self._reported[trainer] = event
        holders = {holder for lane in self._term.copies for holder in lane}
        # Without --copies there are some only of lanes that are to move.
        if not all(self._term.copies) or not holders <= self._reported.keys():
            return
        lacking = self.lacking
        if lacking and not self._exposed:
            lanes = ", ".join(map(str, lacking))
            self._call.say(f"lane {lanes}: no complete copy yet; until there is, the loss of its trainer is not survived")
            self._call.events.note(CopiesIncomplete(lanes=tuple(lacking)))
        elif self._exposed and not lacking:
            self._call.say("every lane has a complete copy again; a further loss is survived")
            self._call.events.note(CopiesComplete())
        self._exposed = bool(lacking)

    @property
    def lacking(self) -> list[int]:
        """The lanes that no trainer but their owner has whole, as far as the trainers have reported."""
        status = self.status
        return [lane for lane in range(len(self._term.hosts)) if not any(copy.lane == lane and copy.complete for copy in status)]

    @property
    def status(self) -> tuple[CopyStatus, ...]:
        """Each copy of each lane."""
        term, reported = self._term, self._reported
        found = []
        for lane, holders in enumerate(term.copies):
            for trainer in holders:
                copy = reported[trainer].copies.get(lane, _NOTHING) if trainer in reported else _NOTHING
                found.append(CopyStatus(lane, trainer, copy.slots, copy.of, copy.complete))
        return tuple(found)
