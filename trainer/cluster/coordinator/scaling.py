"""The number of trainers: start trainers and have them leave while the others train, and move lanes away from slow ones (`--rebalance`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from foreload.trainer.cluster.coordinator.membership import Membership
from foreload.trainer.cluster.coordinator.terms import Change
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.control import AskScale, AskScaled, Refused, ScaleBegun, ScaleProgress
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.run.event_log import Rebalanced

WINDOW = timedelta(seconds=5)  # of computing by the trainer that computes longest: as long as one look at the trainers' speed
WINDOWS = 3  # in a row in which the same trainer must be the slowest before a lane leaves it
GAIN = 0.1  # by which part the slowest trainer's time to compute a step must become shorter at least


def better_hosts(hosts: Sequence[int], held: Sequence[Collection[int]], seconds: Mapping[int, float]) -> tuple[int, ...] | None:
    """Of each lane the trainer that is to host it, so that who computes longest does so for a shorter time; None where that gains too little.

    hosts: lane -> its trainer so far; held: lane -> the trainers that have copies of it; seconds: trainer -> what it took to compute for its lanes,
    each of which is taken to cost as much as another one there. Every trainer keeps a lane.
    """
    lanes = {trainer: sum(host == trainer for host in hosts) for trainer in seconds}
    each = {trainer: seconds[trainer] / lanes[trainer] for trainer in seconds}
    targets = list(hosts)
    while True:
        giver = max(seconds, key=lambda trainer: (lanes[trainer] * each[trainer], trainer))
        others = [trainer for trainer in seconds if trainer != giver]
        taker = min(others, key=lambda trainer: ((lanes[trainer] + 1) * each[trainer], trainer), default=giver)
        if taker == giver or lanes[giver] == 1 or (lanes[taker] + 1) * each[taker] >= lanes[giver] * each[giver]:
            break
        # The last lanes go first: who has lane 0 leads, and had better stay.
        lane = max(
            (lane for lane, host in enumerate(targets) if host == giver), key=lambda lane: (lane > 0, taker in held[lane], lane)
        )
        targets[lane] = taker
        lanes[giver] -= 1
        lanes[taker] += 1
    longest = max(lanes[trainer] * each[trainer] for trainer in seconds)
    return tuple(targets) if longest <= (1 - GAIN) * max(seconds.values()) else None


@dataclass(slots=True)
class _Window:
    """What trainers reported of the steps since it began: how many, and how long each computed."""

    steps: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, trainer: int, report: StepReport) -> None:
        self.steps[trainer] = self.steps.get(trainer, 0) + 1
        self.seconds[trainer] = self.seconds.get(trainer, 0.0) + report.seconds_compute

    def mean_seconds(self, members: Collection[int]) -> dict[int, float] | None:
        """Of a step, once every member has reported one, and the one that takes longest has computed for as long as a window."""
        if self.steps.keys() < set(members) or max(self.seconds.values(), default=0.0) < WINDOW.total_seconds():
            return None
        return {trainer: self.seconds[trainer] / self.steps[trainer] for trainer in members}


class Rebalancing:
    """The coordinator's side. moves: what was done so far, as the run's report has it."""

    def __init__(self, call: TrainingCall) -> None:
        self._call = call
        self.moves: list[dict[str, object]] = []
        self._window = _Window()
        self._slowest, self._times = -1, 0  # from whom the last windows would have a lane move, and how many in a row
        self._term = -1  # which these are of
        self._targets: tuple[int, ...] | None = None  # asked for in this term

    def add(self, trainer: int, report: StepReport) -> None:
        """A trainer has trained a step."""
        self._window.add(trainer, report)

    def poll(self, members: Membership) -> None:
        """Have lanes move, if it is time. To be called after whoever else says what is to change, which comes first."""
        term = members.term
        if term.number != self._term:
            self._term, self._targets, self._times = term.number, None, 0
            self._window = _Window()
        if self._targets is None and members.at_rest:
            self._look(members)
        if self._targets is not None:
            members.change = replace(members.change, targets=self._targets)

    def _look(self, members: Membership) -> None:
        """See whether the slowest trainer is to give lanes away."""
        term = members.term
        seconds = self._window.mean_seconds(term.members)
        if seconds is None:
            return
        self._window = _Window()
        slowest = max(seconds, key=lambda trainer: seconds[trainer])
        targets = better_hosts(term.hosts, term.complete, seconds)
        if targets is None or slowest != self._slowest:
            self._slowest, self._times = slowest, 0
        if targets is None:
            return
        self._times += 1
        if self._times < WINDOWS:
            return
        self._targets = targets
        others = max(seconds[trainer] for trainer in seconds if trainer != slowest)
        cause = f"trainer {slowest} computes {1000 * seconds[slowest]:.1f} ms a step, the others {1000 * others:.1f} at most"
        self._call.events.note(Rebalanced(lanes=targets, cause=cause))
        self._call.say(f"{cause}; lanes move: {_moves(term.hosts, targets)}")
        self.moves.append({"step": self._call.events.step, "lanes": list(targets), "cause": cause})


def _moves(before: Sequence[int], after: Sequence[int]) -> str:
    return ", ".join(
        f"{lane} from trainer {was} to trainer {host}"
        for lane, (was, host) in enumerate(zip(before, after, strict=True))
        if was != host
    )


JOIN_PATIENCE = timedelta(
    seconds=60
)  # for which trainers that can join wait for others that are still starting, so that all join at once
FRUITLESS_STARTS = (
    3  # trainers started in a row that were lost before they trained a step; then no further one is started by itself
)


class Scaling:
    """The coordinator's side.

    start, end: start a trainer's process by its number, and end it.
    """

    def __init__(
        self,
        call: TrainingCall,
        start: Callable[[int], None],
        end: Callable[[int], object],
    ) -> None:
        trainers, self._lanes, self._restarts = call.job.trainers, call.schedule.header.lanes, not call.job.no_restart
        self._call, self._start, self._end, self._clock = call, start, end, call.clock
        self._rebalancing = Rebalancing(call) if call.job.rebalance else None
        self._wanted, self._next = trainers, trainers
        self._starting: dict[int, bool] = {}  # trainer -> whether it can join
        self._offered: set[int] = set()  # those of these that other hosts started, and nobody asked for
        self._waited_since: float | None = None  # since when one that can join waits for others
        self._leaving: set[int] = set()
        self._new: set[int] = set()  # members that have not trained a step yet
        self._reasons: dict[int, str] = {}  # why trainers that could not join say so
        self._fruitless = 0
        self._asked = 0  # how often another number was asked for
        self._failed: str | None = None
        self._progress = (0, ScaleProgress(trainers, trainers, 0, 0, True))

    def ask(self, request: AskScale) -> ScaleBegun | Refused:
        """Have so many trainers from now on."""
        trainers = request.trainers
        if not 1 <= trainers <= self._lanes:
            return Refused(
                f"the number of trainers must be 1 to the schedule's lanes, {self._lanes}; got {trainers}; prepare with more --lanes"
            )
        before, self._wanted, self._failed, self._fruitless = self._wanted, trainers, None, 0
        self._offered.clear()
        self._asked += 1
        return ScaleBegun(self._asked, before, trainers)

    def offer(self) -> int | None:
        """A further trainer, which another host starts, is to join: its number; None where there are as many as lanes already."""
        if self._wanted >= self._lanes:
            return None
        self._wanted += 1
        trainer, self._next = self._next, self._next + 1
        self._starting[trainer] = False
        self._offered.add(trainer)
        return trainer

    def progress(self, request: AskScaled) -> ScaleProgress | Refused:
        """How far what was asked for is."""
        seen, progress = self._progress
        if request.number != self._asked:
            return Refused(f"another number of trainers was asked for meanwhile, {self._wanted}")
        if seen != request.number:
            return ScaleProgress(progress.trainers, self._wanted, progress.starting, progress.lanes_to_move, False)
        return progress

    def can_join(self, trainer: int) -> None:
        """A trainer that was started can join."""
        if trainer in self._starting:
            self._starting[trainer] = True

    def cannot_join(self, trainer: int, why: str) -> None:
        """A trainer that was started says why it cannot join; it ends."""
        self._reasons[trainer] = why

    def is_starting(self, trainer: int) -> bool:
        """Whether it was started, and is no member yet."""
        return trainer in self._starting

    def has_trained(self, trainer: int, report: StepReport) -> None:
        """A trainer has trained a step."""
        if trainer in self._new:
            self._new.discard(trainer)
            self._fruitless = 0
        if self._rebalancing is not None:
            self._rebalancing.add(trainer, report)

    @property
    def rebalanced(self) -> list[dict[str, object]]:
        """Which lanes were to leave slow trainers, and why, as the run's report has it."""
        return [] if self._rebalancing is None else self._rebalancing.moves

    def leave(self, trainer: int, members: Membership) -> bool:
        """A trainer is to leave, since it was asked to. Returns false where no other one stays."""
        if not self._staying(members) - {trainer}:
            return False
        if trainer not in self._leaving:
            self._wanted = max(self._wanted - 1, 1)
        self._leaving.add(trainer)
        return True

    def lost(self, trainer: int) -> None:
        """A member is lost; another one takes its place, where that is wanted. One on another host has to be offered by that again."""
        if trainer in self._leaving:
            return
        if not self._restarts or self._call.machines.get(trainer):
            self._wanted = max(self._wanted - 1, 1)
        elif trainer in self._new:
            self._fruitless += 1

    def poll(self, members: Membership, ended: Mapping[int, str], goes_on: bool) -> None:
        """Start trainers, have some leave, and tell `members` who joins and leaves. ended: of processes, how; goes_on: false where training ends."""
        there = set(members.term.members)
        for trainer in there & self._starting.keys():
            del self._starting[trainer]
            self._offered.discard(trainer)
            self._new.add(trainer)
        self._leaving &= there
        for trainer in [trainer for trainer in self._starting if trainer in ended]:
            self._did_not_join(trainer, ended[trainer])
        staying = self._staying(members)
        if self._fruitless >= FRUITLESS_STARTS and self._wanted > len(staying) + len(self._starting):
            self._wanted = len(staying) + len(self._starting)
            self._failed = f"{self._fruitless} trainers in a row were lost before they trained a step; no further one is started"
            self._call.say(f"{self._failed}, until `foreload scale` asks for it")
        # A process that starts takes a core for seconds: not while the others take lanes over.
        self._start_and_end(staying, goes_on, members.begun)
        joining = self._can_join_now()
        # The last one stays until another one joins, though it was asked to leave before the others were lost.
        members.change = Change(joining, tuple(sorted(self._leaving)) if joining or self._staying(members) else ())
        if self._rebalancing is not None:
            self._rebalancing.poll(members)
        done = members.at_rest and not self._starting and len(there) == self._wanted
        progress = ScaleProgress(len(there), self._wanted, len(self._starting), members.lanes_to_move, done, self._failed)
        self._progress = self._asked, progress

    def end_starting(self) -> None:
        """End those that are not members yet: there is nothing to join any more."""
        for trainer in list(self._starting):
            del self._starting[trainer]
            self._end(trainer)

    def _staying(self, members: Membership) -> set[int]:
        return set(members.term.members) - self._leaving

    def _did_not_join(self, trainer: int, how: str) -> None:
        del self._starting[trainer]
        if trainer in self._offered:
            # It would have been one more; none is started here in its place.
            self._offered.discard(trainer)
            self._wanted -= 1
        else:
            self._fruitless += 1
        why = self._reasons.pop(trainer, None) or f"it {how} before it joined"
        self._call.say(f"trainer {trainer}: did not join: {why}")
        self._end(trainer)

    def _start_and_end(self, staying: set[int], goes_on: bool, may_start: bool) -> None:
        """Have as many on their way as are missing, if any may be started now, and none that is not."""
        missing = self._wanted - len(staying) - len(self._starting) if goes_on else -len(self._starting)
        for _ in range(missing if may_start else 0):
            self._starting[self._next] = False
            self._start(self._next)
            self._next += 1
        for _ in range(-missing):
            if self._starting:
                last = max(self._starting)
                del self._starting[last]
                self._end(last)
            else:
                # Those that came last, so that who leads stays.
                self._leaving.add(max(staying - self._leaving))

    def _can_join_now(self) -> tuple[int, ...]:
        """Those that can join, once all that are starting can, or were waited for."""
        ready = tuple(sorted(trainer for trainer, can in self._starting.items() if can))
        if not ready:
            self._waited_since = None
            return ()
        if self._waited_since is None:
            self._waited_since = self._clock()
        waited = self._clock() - self._waited_since >= JOIN_PATIENCE.total_seconds()
        return ready if waited or len(ready) == len(self._starting) else ()
