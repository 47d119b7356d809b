"""Decide which change of a run's size comes next, if any.

Pure functions of what was measured, what the schedule says of the steps to come, what the pool has,
and what was tried. A change must pay back what it costs before the schedule ends. One that did not
make the steps faster is undone, and its size is not tried again, unless conditions change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from foreload.trainer.adjusting.prediction import Ahead, Machine, Measured, predicted
from foreload.trainer.adjusting.shares import Choice, Grant
from foreload.trainer.adjusting.size import Size

# The least share of the time to come that a change must be predicted to save.
LEAST_GAIN = 0.05
# The time that a change saves must be so many times what it costs.
PAYS_BACK = 2.0
# What trials that did not pay have cost in all, as a share of the time trained, before there is
# another one.
_MOST_SPENT = 0.05
_SLOW = 2.0  # x the median of the others' time for a lane: a slow trainer
_MOST_NUMBERS = 12  # of trainers, and of shards, that are considered, besides those next to the present
# Sizes whose times are within this factor of the best count as equally fast; the smallest is best.
_ALIKE = 1.03
# The least share by which the steps must have become faster for a change to be kept.
_KEPT = 0.02
# If the same size is slower or faster than before by more than this factor, for the same work,
# conditions have changed: what was measured at other sizes is no longer true.
_CHANGED = 1.3


@dataclass(frozen=True, slots=True)
class Costs:
    """What a change costs in time, and how long it takes.

    Attributes:
        stored_bytes: the bytes of all rows in the store.
        bytes_per_second: how many bytes of rows a server can read or write in a second.
        moving_share: the share of that which rows that move may take.
        trainer_seconds: the time that a trainer's start, or its leaving, takes from training.
        start_seconds: the time from a trainer's start to its first step.
    """

    stored_bytes: float
    bytes_per_second: float
    moving_share: float
    trainer_seconds: float
    start_seconds: float

    def _moving(self, before: Size, after: Size) -> float:
        """Return the seconds for which the rows that move keep the busiest server busy."""
        fewer, more = sorted((before.shards, after.shards))
        return (more - fewer) / more * self.stored_bytes / fewer / self.bytes_per_second

    def of(self, before: Size, after: Size) -> float:
        """Return the seconds that the change takes from training."""
        return self._moving(before, after) + self.trainer_seconds * abs(after.trainers - before.trainers)

    def until_done(self, before: Size, after: Size) -> float:
        """Return the seconds until the change is complete. It brings nothing earlier."""
        start = self.start_seconds if after.trainers > before.trainers else 0.0
        return self._moving(before, after) / self.moving_share + start


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that is under way, or not judged yet.

    Attributes:
        origin: the size before it.
        target: the size that it leads to, by one action or two.
        measured: what was measured at the origin.
        reason: why it is made, for a person to read.
        undoes: whether it undoes a change that did not pay.
        further: whether it goes on from a target that did not pay by itself, and so goes on no
            further.
    """

    origin: Size
    target: Size
    measured: Measured
    reason: str
    undoes: bool = False
    further: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether it follows from an earlier one."""
        return self.undoes or self.further


@dataclass(frozen=True, slots=True)
class SlowShard:
    """A store shard that holds up the others, and whose rows can move to another server.

    Attributes:
        shard: its number.
        times: how many times longer its answers take than the median of the others'.
    """

    shard: int
    times: float


@dataclass(frozen=True, slots=True)
class SlowTrainer:
    """A trainer that computes its lanes far slower than the others, and has given up lanes already.

    Attributes:
        trainer: its number.
        times: how many times longer it takes for a lane than the median of the others.
        saved_seconds: by how much a step would be shorter with a trainer like the others.
    """

    trainer: int
    times: float
    saved_seconds: float


def slow_trainer(compute: Mapping[int, float], lanes: Mapping[int, int]) -> SlowTrainer | None:
    """Return the trainer that is slow though it hosts no more lanes than any other, if there is one.

    Args:
        compute: trainer -> the seconds that it computes in a step.
        lanes: trainer -> the number of lanes that it hosts, at least one.
    """
    if len(compute) < 2:
        return None
    each = {trainer: seconds / lanes[trainer] for trainer, seconds in compute.items()}
    slowest = max(each, key=lambda trainer: each[trainer])
    usual = float(np.median([seconds for trainer, seconds in each.items() if trainer != slowest]))
    most = max(count for trainer, count in lanes.items() if trainer != slowest)
    # As long as it has as many lanes as others, some may still leave it, unless each has only one.
    gave_up = lanes[slowest] < most or most == 1
    if not gave_up or each[slowest] < _SLOW * usual:
        return None
    even = usual * -(-sum(lanes.values()) // len(lanes))
    return SlowTrainer(slowest, each[slowest] / max(usual, 1e-9), max(max(compute.values()) - even, 0.0))


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is made from.

    Attributes:
        now: the present size.
        least: the smallest allowed size: what replicas, parity and memory need.
        most: the largest allowed size: what the pool has, and the schedule's lanes.
        known: what was last measured with each size. Without the present one no change is made to
            save time.
        trial: the change that is not judged yet.
        rejected: the sizes that were tried and did not pay.
        spent_seconds: what trials that did not pay have cost.
        trained_seconds: how long training has gone on.
        full_after: the step after which a store shard would be full. None if none would.
        slow_shard: a slow shard that can be moved now.
        slow_trainer: a slow trainer that can be replaced now.
        grant: the job's share of a pool that it shares with others. None if it shares none, or as
            long as the share is not known.
        shards_needed: how many shards have enough memory for the whole schedule.
        seconds_left: the time within which training is to end. None without a deadline.
    """

    now: Size
    least: Size
    most: Size
    machine: Machine
    ahead: Ahead
    costs: Costs
    known: Mapping[Size, Measured] = field(default_factory=dict)
    trial: Trial | None = None
    rejected: frozenset[Size] = frozenset()
    spent_seconds: float = 0.0
    trained_seconds: float = 0.0
    full_after: int | None = None
    shards_needed: int = 0
    seconds_left: float | None = None
    slow_shard: SlowShard | None = None
    slow_trainer: SlowTrainer | None = None
    grant: Grant | None = None

    def is_granted(self, size: Size) -> bool:
        """Whether the job's share of the pool has room for a size."""
        return self.grant is None or self.grant.has_room_for(size)


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the number of trainers, or of store shards, but not both.

    Attributes:
        to: the size after it.
        trial: what it is part of. None for a change that is not made to save time.
        gain_seconds: the time that the trial is predicted to save, after what it costs. None if
            that is not its purpose.
        cost_seconds: what the trial is predicted to cost.
        reason: why, for a person to read.
        for_memory: whether memory needs it, so that it is never undone.
    """

    to: Size
    trial: Trial | None
    gain_seconds: float | None
    cost_seconds: float
    reason: str
    for_memory: bool = False


@dataclass(frozen=True, slots=True)
class MoveShard:
    """Move a slow shard's rows to another server."""

    shard: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceTrainer:
    """Have a slow trainer leave, and another one join."""

    trainer: int
    reason: str


Action = Resize | MoveShard | ReplaceTrainer


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial has brought.

    Attributes:
        paid: whether it is kept.
        gain: by which share the steps are faster than they would be with the size before it.
            Negative if they are slower.
    """

    paid: bool
    gain: float


def _expected(before: Measured, size: Size, now: Measured, machine: Machine) -> float:
    """Return the seconds, above 0, that a step with the work of `now` would take as measured before with a size."""
    work = Ahead(np.array([1]), np.array([now.samples]), np.array([now.rows]))
    return max(float(predicted(before, size, size, machine, work)[0]), 1e-9)


def judged(trial: Trial, now: Measured, machine: Machine) -> Verdict:
    """Judge a trial by what was measured at its target.

    The steps since may have more or less to do than those before it, which counts.
    """
    gain = 1 - now.seconds / _expected(trial.measured, trial.origin, now, machine)
    return Verdict(gain >= _KEPT, gain)


def remembered(
    known: Mapping[Size, Measured], rejected: frozenset[Size], now: Size, measured: Measured, machine: Machine
) -> tuple[dict[Size, Measured], frozenset[Size]]:
    """Return what is known, and what was rejected, after a measurement.

    If the same work now takes another time with the same size, all that is known of other sizes is
    forgotten.
    """
    before = known.get(now)
    if before is not None and not 1 / _CHANGED < measured.seconds / _expected(before, now, measured, machine) < _CHANGED:
        return {now: measured}, frozenset()
    return {**known, now: measured}, rejected


def decide(situation: Situation) -> Action | None:
    """Return the next action, or None.

    A store that would be full comes first, then a share of the pool that has become smaller, then a
    slow shard, then a slow trainer, then a trial that is half way, then a new one.
    """
    now, trial = situation.now, situation.trial
    if situation.full_after is not None and now.shards < situation.most.shards:
        to = replace(now, shards=min(max(situation.shards_needed, now.shards + 1), situation.most.shards))
        cost = situation.costs.of(now, to)
        return Resize(to, None, None, cost, f"a store shard would be full after step {situation.full_after:,}", for_memory=True)
    if not situation.is_granted(now) and (fewer := _within_share(situation)) is not None:
        return fewer
    if situation.slow_shard is not None:
        slow = situation.slow_shard
        return MoveShard(slow.shard, f"its answers take {slow.times:.1f} x the median of the others'")
    if situation.slow_trainer is not None:
        late = situation.slow_trainer
        if late.saved_seconds * situation.ahead.count >= PAYS_BACK * 2 * situation.costs.trainer_seconds:
            return ReplaceTrainer(late.trainer, f"it takes {late.times:.1f} x the median of the others for a lane")
    if trial is not None:
        if now == trial.target or not _is_allowed(situation, trial.target):
            return None
        return _step_towards(situation, trial, None)
    if now not in situation.known or not situation.ahead.count:
        return None
    return _best(situation)


def undone(situation: Situation, trial: Trial, verdict: Verdict) -> Resize | None:
    """Return the action that undoes a trial which did not pay.

    None if it cannot be undone, or if that would cost more than it returns.
    """
    origin = trial.origin
    if not _is_allowed(situation, origin) or situation.now == origin:
        return None
    cost, left = situation.costs.of(situation.now, origin), _seconds(situation, situation.now)
    if PAYS_BACK * cost > left:
        return None
    much = "not faster" if verdict.gain > -_KEPT else f"slower by {-verdict.gain:.0%}"
    back = Trial(situation.now, origin, trial.measured, f"{trial.target} is {much}", undoes=True)
    return _step_towards(situation, back, -verdict.gain * left - cost)


def gone_further(situation: Situation, trial: Trial) -> Resize | None:
    """Return the action that goes on from a trial's target, which did not pay by itself.

    That pays if another resource had become the busiest, and a further change takes that away.
    """
    further = (
        None if trial.further else _best(replace(situation, spent_seconds=0.0, rejected=situation.rejected | {trial.origin}))
    )
    if further is None or further.trial is None:
        return None
    target = further.trial.target
    if _seconds(situation, target) > (1 - LEAST_GAIN) * _seconds(situation, trial.origin):
        return None
    return _step_towards(situation, replace(trial, target=target, reason=further.reason, further=True), further.gain_seconds)


def _best(situation: Situation) -> Resize | None:
    now, costs = situation.now, situation.costs
    if situation.spent_seconds > _MOST_SPENT * situation.trained_seconds:
        return None
    left = {size: _seconds(situation, size) for size in _sizes(situation)}
    # The time up to the end, with each size as the next one.
    total = {}
    for size in left:
        done = min(costs.until_done(now, size) / max(left[now], 1e-9), 1.0)
        total[size] = costs.of(now, size) + done * left[now] + (1 - done) * left[size]
    in_time = [size for size in total if situation.seconds_left is not None and total[size] <= situation.seconds_left]
    # With a deadline, nothing is added that it does not need.
    if now in in_time:
        return None
    fastest = min(total.values())
    enough = in_time or [size for size in total if total[size] <= _ALIKE * fastest]
    best = min(enough, key=lambda size: (size.trainers + size.shards, total[size]))
    cost, saved = costs.of(now, best), left[now] - total[best] + costs.of(now, best)
    if best == now or saved < PAYS_BACK * cost or saved - cost < LEAST_GAIN * left[now]:
        return None
    count = situation.ahead.count
    reason = f"{best} would take {1000 * left[best] / count:.1f} ms a step, {now} {1000 * left[now] / count:.1f} ms"
    return _step_towards(situation, Trial(now, best, situation.known[now], reason), saved - cost)


def _within_share(situation: Situation) -> Resize | None:
    """Return the first step to the fastest size for which the job's share of the pool has room."""
    now, least, grant = situation.now, situation.least, situation.grant
    assert grant is not None
    fewer = [
        Size(trainers, shards)
        for trainers in range(now.trainers, least.trainers - 1, -1)
        for shards in range(now.shards, least.shards - 1, -1)
        if grant.has_room_for(Size(trainers, shards))
    ]
    target = min(fewer or [least], key=lambda size: _seconds(situation, size))
    # Trainers leave at once, and rows take a while to move.
    to = replace(now, trainers=target.trainers) if target.trainers < now.trainers else replace(now, shards=now.shards - 1)
    if to.shards < least.shards:
        return None
    reason = f"the pool leaves {grant.granted.cores:g} cores to this run, which uses {grant.needs.of(now).cores:g}"
    return Resize(to, None, None, situation.costs.of(now, to), reason)


def choices(situation: Situation) -> tuple[Choice, ...]:
    """Return what other sizes would bring, whatever the job's share is: those that no other beats in all respects.

    Empty as long as nothing was measured, and where the job shares no pool.
    """
    if situation.grant is None or not situation.known or not situation.ahead.count:
        return ()
    needs, sizes = situation.grant.needs, _sizes(replace(situation, grant=None))
    every = sorted((Choice(needs.of(size), max(_seconds(situation, size), 1e-9)) for size in sizes), key=lambda one: one.seconds)
    kept: list[Choice] = []
    for one in reversed(every):
        # The slowest come first. One that is hardly faster, or that takes no less than a faster one, is left out.
        kept = [other for other in kept if not one.takes.fits(other.takes)]
        if not any(other.takes.fits(one.takes) and other.seconds < _ALIKE * one.seconds for other in kept):
            kept.append(one)
    return tuple(kept)


def _sizes(situation: Situation) -> Iterator[Size]:
    least, most, now = situation.least, situation.most, situation.now
    yield now
    for trainers in _numbers(least.trainers, most.trainers, now.trainers):
        for shards in _numbers(least.shards, most.shards, now.shards):
            size = Size(trainers, shards)
            if size != now and size not in situation.rejected and situation.is_granted(size):
                yield size


def _numbers(least: int, most: int, now: int) -> list[int]:
    """Return the numbers to consider: all, or, of many, some that are evenly apart by their ratios."""
    if most - least < _MOST_NUMBERS:
        return list(range(least, most + 1))
    apart = np.geomspace(least, most, _MOST_NUMBERS).round().astype(int).tolist()
    return sorted({one for one in (*apart, now - 1, now, now + 1) if least <= one <= most})


def _is_allowed(situation: Situation, size: Size) -> bool:
    least, most = situation.least, situation.most
    within = least.trainers <= size.trainers <= most.trainers and least.shards <= size.shards <= most.shards
    return within and situation.is_granted(size)


def _seconds(situation: Situation, size: Size) -> float:
    """Return the predicted seconds of all steps to come.

    They are predicted from the nearest known size: the same one, else one with the most similar
    number of trainers, since how trainers share the machine's cores is the hardest to predict.
    """
    known, now = situation.known, situation.now
    if not known:
        return 0.0

    def distance(one: Size) -> tuple[bool, int, bool, int]:
        return one != size, abs(one.trainers - size.trainers), one != now, abs(one.shards - size.shards)

    at = min(known, key=distance)
    exchanges = [of.exchange / (one.trainers - 1) for one, of in known.items() if one.trainers > 1]
    exchange = max(exchanges, default=None)
    steps = predicted(known[at], at, size, situation.machine, situation.ahead, exchange)
    return float(steps @ situation.ahead.steps)


def _step_towards(situation: Situation, trial: Trial, gain: float | None) -> Resize:
    """Return the action that comes first. Of two, that is the one which saves more by itself.

    Trainers join and leave together. Shards join together, and leave one at a time.
    """
    now, target = situation.now, trial.target
    steps = {replace(now, trainers=target.trainers), replace(now, shards=max(target.shards, now.shards - 1))} - {now}
    to = min(sorted(steps), key=lambda size: _seconds(situation, size) + situation.costs.of(now, size))
    return Resize(to, trial, gain, situation.costs.of(now, target), trial.reason)
