"""`--rebalance`: lanes leave a trainer that is persistently slower than the others (docs/internals/trainer.md, Terms)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from foreload.trainer.cluster.coordinator.membership import Membership
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
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
