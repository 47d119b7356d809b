"""The coordinator's side of terms: the members, their replicas, their losses, and the next term.

See "Terms" in docs/internals/trainer.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from datetime import timedelta

from foreload.trainer.cluster.coordinator.terms import NO_CHANGE, changed_term, next_term, wants_change
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.control import CopyStatus
from foreload.trainer.cluster.messages.facts import Admitted, HandedOver, Lease, StopWanted, Term, TermBegins, TermOver
from foreload.trainer.cluster.messages.rendezvous import Rendezvous, clear_agreement
from foreload.trainer.cluster.messages.trainers import CopiesReport, Ready, SeededCopy, TermLeft
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

# How long a live member has to leave a term that is over. It may notice the end only once a silent
# store shard has timed out, or a process group has failed to form. A member that takes longer is
# lost, too.
LEAVE_TIMEOUT = timedelta(seconds=30)
# How long to wait for members that are silent, or do not leave, if the others lack a complete
# replica of one of their lanes. As long as such a member is not dead, training may still go on.
UNCOVERED_TIMEOUT = timedelta(seconds=300)
# A member that does not leave a term is lost as soon as another one found its connection closed, and
# it has not renewed its lease for this share of --peer-timeout, two renewals. It died with all that
# could report it, such as its machine, or cannot be reached.
CLOSED_SILENCE = 0.2
SILENT, _LATE, _CLOSED = (
    "it sends no messages",
    "it does not leave the term",
    "its connections are closed, and it sends no messages",
)
# After so many terms in a row that ended without a committed step although all members were alive,
# two members cannot reach each other, and one of them must go.
FRUITLESS_TERMS = 3


class Membership:
    """The members of a job through its terms.

    Args:
        term: The first term. The caller publishes it; the later ones are published here.
        kill: Ends a trainer's process and returns whether the trainer is known to be dead.

    Attributes:
        term: The newest term.
        ready: The members that have reported that they can begin it, with their reports.
        begun: Whether the steps of the term have begun.
        change: The trainers that can join, the members that are to leave, and planned lane
            targets. The caller sets it; members and lanes then change as soon as possible.
        lost: The trainers that were lost with the term before.
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
        self.begun = False
        self.change = NO_CHANGE
        self.lost: tuple[int, ...] = ()
        self._left: dict[int, TermLeft] = {}
        self._lost: dict[int, str] = {}  # members lost in this term -> why
        self._complete: dict[int, set[int]] = {}  # trainer -> lanes of which it reported a complete replica
        self._asked = False  # whether a planned end of this term was requested
        self._over_at: float | None = None  # when the term was ended
        # The lost members of which the user has already read that they are waited for.
        self._waited_for: list[int] = []
        self._stated_at = call.clock()
        # Trainers that left with the term before and have not handed over their lanes yet.
        self._handing: set[int] = set()
        self._fruitless = 0
        self._leases: dict[int, tuple[int, float]] = {}  # trainer -> last lease count, and when it came
        self._looked_at = call.clock()

    @property
    def survives(self) -> bool:
        """Whether the job can survive the loss of a trainer in this term at all."""
        return any(self.term.copies)

    @property
    def all_ready(self) -> bool:
        """Whether every member has reported that it can begin the term."""
        return self.ready.keys() == set(self.term.members)

    @property
    def changing(self) -> bool:
        """Whether trainers may be waiting: a term is over or ending, or the next has not begun."""
        return self._over_at is not None or bool(self._left) or not self.begun

    @property
    def is_stable(self) -> bool:
        """Whether the term's steps run, every lane is with its target, and no change is planned."""
        return self.begun and not self.lanes_to_move and not self._asked and not wants_change(self.term, (), self.change)

    @property
    def lanes_to_move(self) -> int:
        """The number of lanes whose host is not yet their target."""
        return sum(host != target for host, target in zip(self.term.hosts, self.term.targets, strict=True))

    def receive(self, trainer: int, event: Ready | TermLeft | CopiesReport) -> None:
        """Handle a member's report. Reports of earlier terms are ignored."""
        if event.term != self.term.number:
            return
        match event:
            case Ready():
                self.ready[trainer] = event
            case TermLeft() if self._lost.get(trainer, SILENT) in (SILENT, _LATE, _CLOSED):
                # A member that was only silent or late is back in time, so it is not lost.
                self._lost.pop(trainer, None)
                self._left[trainer] = event
            case CopiesReport():
                # Within a term a complete replica stays complete, so the sets only grow, even if an
                # older report arrives late.
                self._complete.setdefault(trainer, set()).update(lane for lane, copy in event.copies.items() if copy.complete)

    def poll(self, gone: Mapping[int, str], ended: Iterable[int], may_change: bool = True) -> bool:
        """End the term if a member was lost or a change is due; begin the next once all have left.

        Args:
            gone: The trainers whose process has ended before its time, and how.
            ended: The members that have ended and no longer need the others.
            may_change: Whether a term may be ended so that members or lanes change.

        Returns:
            Whether a new term began.

        Raises:
            LanesLost: No owner and no complete replica of a lane is left.
        """
        dead = {trainer: gone[trainer] for trainer in self.term.members if trainer in gone}
        if self.survives:
            self._lost = {trainer: why for trainer, why in dead.items() if trainer not in ended} | self._lost
            for trainer, why in self.silent().items():
                if trainer not in self._left:
                    self._lost.setdefault(trainer, why)
        self._see_handed_over(gone)
        # `_over_at` is None while the term goes on. A term is over once a member is lost, a member
        # has left because of a failure, or all have left as planned.
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
            # After a planned end all members have left already, and none has to be interrupted.
            if self._lost or not planned:
                self._rendezvous.publish(TermOver(), self.term.number)
        # From here on a dead member is lost even if it had ended: the others need its lanes, too.
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
        """Whether to wait for a lost member that may be alive and has the only state of a lane."""
        alive = [trainer for trainer in self._lost if trainer not in gone]
        complete = [[trainer for trainer in there if lane in self._left[trainer].copies] for lane in range(len(self.term.hosts))]
        lacking = [lane for lane, host in enumerate(next_hosts(self.term.hosts, complete, there)) if host is None]
        assert self._over_at is not None
        if not alive or not lacking or self._clock() - self._over_at > UNCOVERED_TIMEOUT.total_seconds():
            return False
        if self._waited_for != alive:
            named = ", ".join(f"trainer {trainer}: {self._lost[trainer]}" for trainer in alive)
            self._call.say(
                f"{named}; waiting for it, since no other trainer has a complete copy of lane {', '.join(map(str, lacking))}"
            )
        self._waited_for = alive
        return True

    def _complete_replicas(self) -> list[set[int]]:
        """Return, for each lane, the trainers that have a complete replica by now."""
        return [
            {*complete, *(trainer for trainer, lanes in self._complete.items() if lane in lanes)}
            for lane, complete in enumerate(self.term.complete)
        ]

    def _see_handed_over(self, gone: Mapping[int, str]) -> None:
        """Follow the handing over by the trainers that left with the term before.

        A trainer that takes longer than `LEAVE_TIMEOUT` is killed. For it, and for one that died,
        the coordinator publishes `HandedOver`, so that the new owners stop waiting and go on by the
        fence.
        """
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
                # All members are alive, so a connection between two of them broke.
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
        self._report_lost(before)
        self._report_changed(before)
        # The term's number is in the run's folder before any trainer owns lanes in that term.
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

    def _report_lost(self, before: Term) -> None:
        """Report the lost trainers and the new hosts of their lanes."""
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
                + ("the run does not survive a further loss" if count == 1 else f"at most {count} trainers have each lane")
            )

    def _report_changed(self, before: Term) -> None:
        """Report the trainers that joined or left as planned, and the lanes handed over."""
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

    @property
    def may_begin(self) -> bool:
        """Whether the term's steps have not begun, and all members are ready for them."""
        return not self.begun and self._over_at is None and self.all_ready

    def begin(self) -> None:
        """Begin the term's steps. Call it if they may begin."""
        assert self.may_begin
        self.begun = True
        self._rendezvous.publish(TermBegins(), self.term.number)
        self._call.events.note(TermBegan(members=self.term.members, lanes=self.term.hosts))

    def silent(self) -> dict[int, str]:
        """Return the members that have not renewed their lease for too long, and why they are lost.

        An only member never counts as silent, since no other trainer could host its lanes.
        """
        if len(self.term.members) == 1:
            return {}
        now, patience = self._clock(), self._silence.total_seconds()
        # If this process was itself stopped since the last look, no lease could be seen meanwhile,
        # so all leases start anew.
        if now - self._looked_at > patience / 2:
            self._leases = {trainer: (count, now) for trainer, (count, _) in self._leases.items()}
        self._looked_at = now
        closed = {left.closed for left in self._left.values()}
        silent = {}
        for trainer in self.term.members:
            lease = self._rendezvous.poll(Lease, trainer)
            # Without a lease the trainer is still starting. Its death shows by its process.
            if lease is None:
                continue
            known = self._leases.get(trainer)
            if known is None or known[0] != lease.count:
                self._leases[trainer] = lease.count, now
            elif now - known[1] > patience:
                silent[trainer] = SILENT
            elif trainer in closed and now - known[1] > CLOSED_SILENCE * patience:
                silent[trainer] = _CLOSED
        return silent


_NOTHING = SeededCopy(0, 0, False)


class LaneReplicas:
    """The state of the lanes' replicas in the current term.

    Attributes:
        exposed: Whether the last message to the user was that the loss of a trainer is not
            survived, because a lane has no complete replica yet.
    """

    def __init__(self, call: TrainingCall, term: Term) -> None:
        self._call, self._term = call, term
        self._reported: dict[int, CopiesReport] = {}  # trainer -> its last report of this term
        self.exposed = False

    def on_term(self, term: Term) -> None:
        """Begin a new term, in which trainers report their replicas anew."""
        self._term, self._reported = term, {}

    def on_copies(self, trainer: int, event: CopiesReport) -> None:
        """Record a trainer's replicas, and report when a further loss becomes (un)survivable."""
        if event.term != self._term.number:
            return
        self._reported[trainer] = event
        holders = {holder for lane in self._term.copies for holder in lane}
        # Without --copies only the lanes that are to move have replicas, and there is nothing to
        # report. Until every holder has reported, the state is not known.
        if not all(self._term.copies) or not holders <= self._reported.keys():
            return
        lacking = self.lacking
        if lacking and not self.exposed:
            lanes = ", ".join(map(str, lacking))
            self._call.say(
                f"lane {lanes}: has no complete copy yet; until it has one, the run does not survive the loss of its trainer"
            )
            self._call.events.note(CopiesIncomplete(lanes=tuple(lacking)))
        elif self.exposed and not lacking:
            self._call.say("every lane has a complete copy again; the run survives a further loss")
            self._call.events.note(CopiesComplete())
        self.exposed = bool(lacking)

    @property
    def lacking(self) -> list[int]:
        """The lanes without a complete replica, as far as trainers have reported."""
        status = self.status
        return [lane for lane in range(len(self._term.hosts)) if not any(copy.lane == lane and copy.complete for copy in status)]

    @property
    def status(self) -> tuple[CopyStatus, ...]:
        """The state of each replica of each lane."""
        term, reported = self._term, self._reported
        found = []
        for lane, holders in enumerate(term.copies):
            for trainer in holders:
                copy = reported[trainer].copies.get(lane, _NOTHING) if trainer in reported else _NOTHING
                found.append(CopyStatus(lane, trainer, copy.slots, copy.of, copy.complete))
        return tuple(found)
