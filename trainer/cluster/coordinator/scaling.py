"""Change the number of trainers during training, and move lanes from slow ones (--rebalance)."""

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

# The trainers' speeds are compared once the slowest one has computed for this long.
WINDOW = timedelta(seconds=5)
# The same trainer must be the slowest in this many windows in a row before a lane leaves it.
WINDOWS = 3
# The slowest trainer's time to compute a step must shrink by at least this share.
GAIN = 0.1


def better_hosts(hosts: Sequence[int], held: Sequence[Collection[int]], seconds: Mapping[int, float]) -> tuple[int, ...] | None:
    """Return hosts for the lanes with which the slowest trainer takes less time for a step.

    Every trainer keeps a lane. All lanes of a trainer are assumed to take the same time there.

    Args:
        hosts: lane -> its trainer so far.
        held: lane -> the trainers that have replicas of it.
        seconds: trainer -> the seconds that it takes to compute a step for its lanes.

    Returns:
        The new trainer of each lane. If None, the gain is below `GAIN`.
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
        # The last lanes move first. The host of lane 0 leads the others, so lane 0 should stay.
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
    """The steps that trainers reported since the window began.

    Attributes:
        steps: trainer -> the number of its steps.
        seconds: trainer -> the seconds that it computed.
    """

    steps: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, trainer: int, report: StepReport) -> None:
        self.steps[trainer] = self.steps.get(trainer, 0) + 1
        self.seconds[trainer] = self.seconds.get(trainer, 0.0) + report.seconds_compute

    def mean_seconds(self, members: Collection[int]) -> dict[int, float] | None:
        """Return each member's mean seconds per step, or None while the window is not over.

        It is over once every member has reported a step and the slowest has computed for `WINDOW`.
        """
        if self.steps.keys() < set(members) or max(self.seconds.values(), default=0.0) < WINDOW.total_seconds():
            return None
        return {trainer: self.seconds[trainer] / self.steps[trainer] for trainer in members}


class Rebalancing:
    """The coordinator's side of --rebalance.

    Attributes:
        moves: The lane moves that were planned so far, in the form of the run's report.
    """

    def __init__(self, call: TrainingCall) -> None:
        self._call = call
        self.moves: list[dict[str, object]] = []
        self._window = _Window()
        # The slowest trainer, and the number of windows in a row that would take a lane from it.
        self._slowest, self._times = -1, 0
        self._term = -1  # the term of these windows
        self._targets: tuple[int, ...] | None = None  # planned in this term

    def add(self, trainer: int, report: StepReport) -> None:
        """Add a step that a trainer has trained."""
        self._window.add(trainer, report)

    def poll(self, members: Membership) -> None:
        """Plan lane moves if the speeds call for them.

        Call it after all others have set `members.change`: their changes come first.
        """
        term = members.term
        if term.number != self._term:
            self._term, self._targets, self._times = term.number, None, 0
            self._window = _Window()
        if self._targets is None and members.is_stable:
            self._look(members)
        if self._targets is not None:
            members.change = replace(members.change, targets=self._targets)

    def _look(self, members: Membership) -> None:
        """Plan lane moves if the same trainer was the slowest in `WINDOWS` windows in a row."""
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


# How long trainers that can join wait for others that are still starting, so that all join at once.
JOIN_PATIENCE = timedelta(seconds=60)
# After so many started trainers in a row that were lost before they trained a step, no further
# trainer is started unless the user asks for it.
FRUITLESS_STARTS = 3


class Scaling:
    """The coordinator's side of changing the number of trainers.

    Args:
        start: Starts the process of the trainer with this number.
        end: Ends that process.
    """

    def __init__(
        self,
        call: TrainingCall,
        start: Callable[[int], None],
        end: Callable[[int], object],
    ) -> None:
        trainers, self._lanes, self._restarts = call.job.trainers, call.schedule.header.lanes, not call.job.no_restart
        self._call, self._start, self._end, self._clock = call, start, end, call.clock
        self._rebalancing = Rebalancing(call) if call.job.rebalance or call.job.auto is True else None
        self._wanted, self._next = trainers, trainers
        self._starting: dict[int, bool] = {}  # trainer -> whether it can join
        # The starting trainers that other hosts offered, without a request for more trainers.
        self._offered: set[int] = set()
        self._waited_since: float | None = None  # since when a trainer that can join waits
        self._leaving: set[int] = set()
        self._new: set[int] = set()  # members that have not trained a step yet
        self._reasons: dict[int, str] = {}  # trainer -> why it cannot join, in its own words
        self._fruitless = 0
        self._asked = 0  # the number of requests for another number of trainers
        self._failed: str | None = None
        self._progress = (0, ScaleProgress(trainers, trainers, 0, 0, True))

    def ask(self, request: AskScale, members: Membership) -> ScaleBegun | Refused:
        """Set the number of trainers to have from now on, or have a trainer replaced."""
        trainers, replaced = self._wanted if request.trainers is None else request.trainers, request.replaces
        if not 1 <= trainers <= self._lanes:
            return Refused(
                f"the number of trainers must be 1 to the schedule's lanes, {self._lanes}; got {trainers}; prepare with more --lanes"
            )
        if replaced is not None:
            staying = self._staying(members)
            if replaced not in staying:
                return Refused(
                    f"trainer {replaced} does not train, or is leaving; the trainers are {', '.join(map(str, sorted(staying)))}"
                )
            if replaced in self._call.guests:
                return Refused(
                    f"trainer {replaced} is on another host: start one in its place with `foreload join`, then send it SIGTERM"
                )
            self.replace(replaced)
        before, self._wanted, self._failed, self._fruitless = self._wanted, trainers, None, 0
        self._offered.clear()
        self._asked += 1
        return ScaleBegun(self._asked, before, trainers)

    def offer(self) -> int | None:
        """Accept a further trainer, which another host starts.

        Returns:
            The trainer's number. If None, the job already has as many trainers as lanes.
        """
        if self._wanted >= self._lanes:
            return None
        self._wanted += 1
        trainer, self._next = self._next, self._next + 1
        self._starting[trainer] = False
        self._offered.add(trainer)
        return trainer

    def progress(self, request: AskScaled) -> ScaleProgress | Refused:
        """Return the progress of a request for another number of trainers."""
        seen, progress = self._progress
        if request.number != self._asked:
            return Refused(f"another number of trainers was requested meanwhile, {self._wanted}")
        if seen != request.number:
            return ScaleProgress(progress.trainers, self._wanted, progress.starting, progress.lanes_to_move, False)
        return progress

    @property
    def wanted(self) -> int:
        """The number of trainers to have."""
        return self._wanted

    def is_changing(self, members: Membership) -> bool:
        """Whether trainers start, or there are more or fewer than wanted."""
        return bool(self._starting) or len(members.term.members) != self._wanted

    def can_join(self, trainer: int) -> None:
        """Note that a started trainer can join."""
        if trainer in self._starting:
            self._starting[trainer] = True

    def cannot_join(self, trainer: int, why: str) -> None:
        """Note why a started trainer cannot join. It ends by itself."""
        self._reasons[trainer] = why

    def is_starting(self, trainer: int) -> bool:
        """Return whether a trainer was started and is not a member yet."""
        return trainer in self._starting

    def has_trained(self, trainer: int, report: StepReport) -> None:
        """Note a step that a trainer has trained."""
        if trainer in self._new:
            self._new.discard(trainer)
            self._fruitless = 0
        if self._rebalancing is not None:
            self._rebalancing.add(trainer, report)

    @property
    def rebalanced(self) -> list[dict[str, object]]:
        """The lane moves that were planned, and why, in the form of the run's report."""
        return [] if self._rebalancing is None else self._rebalancing.moves

    def leave(self, trainer: int, members: Membership) -> bool:
        """Have a trainer leave at its own request. Returns False if no other trainer would stay."""
        if not self._staying(members) - {trainer}:
            return False
        if trainer not in self._leaving:
            self._wanted = max(self._wanted - 1, 1)
        self._leaving.add(trainer)
        return True

    def replace(self, trainer: int) -> None:
        """Have a trainer leave. Another one is started in its place."""
        self._leaving.add(trainer)

    def lost(self, trainer: int) -> None:
        """Note that a member was lost.

        Unless --no-restart is given, another trainer takes its place. A trainer of another host is
        not replaced: its host has to offer it again.
        """
        if trainer in self._leaving:
            return
        if not self._restarts or trainer in self._call.guests:
            self._wanted = max(self._wanted - 1, 1)
        elif trainer in self._new:
            self._fruitless += 1

    def poll(self, members: Membership, ended: Mapping[int, str], goes_on: bool) -> None:
        """Start and end trainers as needed, and set in `members.change` who joins and leaves.

        Args:
            ended: The trainers whose process has ended, and how.
            goes_on: Whether training goes on. If False, no trainer is started.
        """
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
            self._failed = f"{self._fruitless} trainers in a row were lost before they trained a step; no more are started"
            self._call.say(f"{self._failed}, until `foreload scale` requests them")
        # A starting process uses a core for seconds, so none is started during a takeover.
        self._start_and_end(staying, goes_on, members.begun)
        joining = self._can_join_now()
        # If all members are to leave, since those that would have stayed were lost, they stay until
        # another trainer can join.
        members.change = Change(joining, tuple(sorted(self._leaving)) if joining or self._staying(members) else ())
        if self._rebalancing is not None:
            self._rebalancing.poll(members)
        done = members.is_stable and not self._starting and not self._leaving and len(there) == self._wanted
        progress = ScaleProgress(len(there), self._wanted, len(self._starting), members.lanes_to_move, done, self._failed)
        self._progress = self._asked, progress

    def end_starting(self) -> None:
        """End the trainers that are not members yet, since there is no longer a term to join."""
        for trainer in list(self._starting):
            del self._starting[trainer]
            self._end(trainer)

    def _staying(self, members: Membership) -> set[int]:
        return set(members.term.members) - self._leaving

    def _did_not_join(self, trainer: int, how: str) -> None:
        del self._starting[trainer]
        if trainer in self._offered:
            # The offer had raised the wanted number by one. No trainer is started in its place.
            self._offered.discard(trainer)
            self._wanted -= 1
        else:
            self._fruitless += 1
        why = self._reasons.pop(trainer, None) or f"it {how} before it joined"
        self._call.say(f"trainer {trainer}: did not join: {why}")
        self._end(trainer)

    def _start_and_end(self, staying: set[int], goes_on: bool, may_start: bool) -> None:
        """Start the missing trainers, or end or dismiss those that are too many.

        Args:
            staying: The members that are not to leave.
            goes_on: Whether training goes on. If False, no trainer is missing.
            may_start: Whether trainers may be started now.
        """
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
                # The members that joined last leave first, so that the leader stays.
                self._leaving.add(max(staying - self._leaving))

    def _can_join_now(self) -> tuple[int, ...]:
        """Return the trainers that can join.

        There are none until all starting trainers can join, or `JOIN_PATIENCE` is over.
        """
        ready = tuple(sorted(trainer for trainer, can in self._starting.items() if can))
        if not ready:
            self._waited_since = None
            return ()
        if self._waited_since is None:
            self._waited_since = self._clock()
        waited = self._clock() - self._waited_since >= JOIN_PATIENCE.total_seconds()
        return ready if waited or len(ready) == len(self._starting) else ()
