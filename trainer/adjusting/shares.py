"""Divide the cores and memory of a cluster among the jobs that share it.

Pure functions of what each job asks for. Every job first gets the least that it needs, in the order
of arrival. What is left goes, piece by piece, to the job whose weighted gain for it is highest. A
job gains the logarithm of its speed, so that jobs that would use any core equally well get cores in
proportion to their weights (proportional fairness: Kelly, Maulloo and Tan 1998, Rate control for
communication networks), and a job that would not be faster leaves its part to others. Of cores and
memory, that counts of which a piece takes the larger part of the cluster's (Ghodsi et al. 2011,
Dominant resource fairness).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

from foreload.trainer.adjusting.size import Size

LEAST_GAIN = 0.05
"""The shares stay as they are unless all jobs, in their weighted mean, would be faster by this share."""


class Resources(NamedTuple):
    """An amount of cores, and of memory in bytes."""

    cores: float = 0.0
    memory: float = 0.0

    def plus(self, other: Resources) -> Resources:
        """Return the sum."""
        return Resources(self.cores + other.cores, self.memory + other.memory)

    def times(self, count: int) -> Resources:
        """Return what so many take."""
        return Resources(self.cores * count, self.memory * count)

    def less(self, other: Resources) -> Resources:
        """Return what is left after taking away another amount, of each at least nothing."""
        return Resources(max(self.cores - other.cores, 0.0), max(self.memory - other.memory, 0.0))

    def most(self, other: Resources) -> Resources:
        """Return the larger amount of each."""
        return Resources(max(self.cores, other.cores), max(self.memory, other.memory))

    def least(self, other: Resources) -> Resources:
        """Return the smaller amount of each."""
        return Resources(min(self.cores, other.cores), min(self.memory, other.memory))

    def fits(self, room: Resources) -> bool:
        """Whether there is room for it."""
        return self.cores <= room.cores and self.memory <= room.memory

    def part_of(self, whole: Resources) -> float:
        """Return the larger of the parts that it is of another amount's cores and memory."""
        return max(self.cores / max(whole.cores, 1e-9), self.memory / max(whole.memory, 1.0))


@dataclass(frozen=True, slots=True)
class Needs:
    """What each trainer, and each server of a store shard, takes.

    Attributes:
        fixed: what the job takes besides.
    """

    trainer: Resources
    server: Resources
    fixed: Resources = Resources()

    def of(self, size: Size) -> Resources:
        """Return what a job of some size takes."""
        return self.trainer.times(size.trainers).plus(self.server.times(size.shards)).plus(self.fixed)


@dataclass(frozen=True, slots=True)
class Grant:
    """A job's share of a pool.

    Attributes:
        needs: what the job's trainers and servers take.
        granted: what they may take.
    """

    needs: Needs
    granted: Resources

    def has_room_for(self, size: Size) -> bool:
        """Whether the job may have a size."""
        return self.needs.of(size).fits(self.granted)


class Choice(NamedTuple):
    """A size that a job could have.

    Attributes:
        takes: what it takes.
        seconds: the predicted time up to the end of training.
    """

    takes: Resources
    seconds: float


@dataclass(frozen=True, slots=True)
class Bid:
    """What a job asks for.

    Attributes:
        weight: how much its speed counts, beside that of other jobs.
        least: what it needs in any case.
        uses: what its processes take now.
        choices: the sizes that it could make use of. Empty if nothing is known of their speed.
    """

    weight: float
    least: Resources
    uses: Resources
    choices: tuple[Choice, ...] = ()

    @property
    def has_begun(self) -> bool:
        """Whether the job has processes."""
        return self.uses.cores > 0

    def seconds(self, given: Resources) -> float:
        """Return the time with the fastest choice for which there is room."""
        return min((choice.seconds for choice in self.choices if choice.takes.fits(given)), default=float("inf"))


class _Piece(NamedTuple):
    """What a job would have with one more piece, and its weighted gain for the part that the piece is of the pool."""

    worth: float
    takes: Resources


def divided(bids: Sequence[Bid], pool: Resources) -> list[Resources | None]:
    """Return what each job is to have. None for one that has to wait, as those that come after it.

    Args:
        bids: in the order in which the jobs have come.
        pool: what there is for all of them.
    """
    given: dict[int, Resources] = {}
    free, waits = pool, False
    # A job that has begun never waits for one that has not.
    for job in sorted(range(len(bids)), key=lambda one: not bids[one].has_begun):
        bid = bids[job]
        if bid.has_begun or (not waits and bid.least.fits(free)):
            given[job], free = bid.least, free.less(bid.least)
        else:
            waits = True
    pieces = {job: piece for job, has in given.items() if (piece := _best_piece(bids[job], has, free, pool))}
    while pieces:
        job = max(pieces, key=lambda one: (pieces[one].worth, -one))
        piece = pieces.pop(job)
        if piece.takes.less(given[job]).fits(free):
            free = free.plus(given[job]).less(piece.takes)
            given[job] = piece.takes
        if (further := _best_piece(bids[job], given[job], free, pool)) is not None:
            pieces[job] = further
    return [given.get(job) for job in range(len(bids))]


def _best_piece(bid: Bid, has: Resources, free: Resources, pool: Resources) -> _Piece | None:
    """Return the piece of what is free from which a job gains most."""
    now, best = bid.seconds(has), None
    for choice in bid.choices:
        takes = choice.takes.most(bid.least)
        further = takes.less(has)
        if choice.seconds >= now or not further.fits(free):
            continue
        # Where nothing is known of the present size, a piece counts as if it doubled the speed.
        gain = bid.weight * (log(now / choice.seconds) if now < float("inf") else log(2))
        worth = gain / max(further.part_of(pool), 1e-9)
        if best is None or worth > best.worth:
            best = _Piece(worth, takes)
    return best


@dataclass(frozen=True, slots=True)
class Share:
    """A job's share of a pool.

    Attributes:
        granted: what it may use now. None if it has to wait.
        aim: what it is to have once others have given back what is too much. None as above.
        pool: what there is for all jobs.
        jobs: the number of jobs.
    """

    granted: Resources | None
    aim: Resources | None
    pool: Resources
    jobs: int


@dataclass(frozen=True, slots=True)
class PooledJob:
    """A job that shares a pool.

    Attributes:
        run: the run's folder.
    """

    run: str
    bid: Bid
    share: Share


@dataclass(frozen=True, slots=True)
class PoolState:
    """The jobs that share a cluster.

    Attributes:
        cluster: what the cluster has.
        others: what other programs use of it, and what servers of stopped runs hold.
        jobs: in the order in which they have come.
    """

    cluster: Resources
    others: Resources
    jobs: tuple[PooledJob, ...]


@dataclass(slots=True)
class _Job:
    bid: Bid
    granted: Resources | None = None
    aim: Resources | None = None

    @property
    def holds(self) -> Resources:
        """What no other job can have now."""
        return self.bid.uses.most(self.granted or Resources())


@dataclass(slots=True)
class Shares:
    """The jobs that share a pool.

    A share shrinks at once. It grows only by what no other job still holds, so there is always room
    for what a job is granted.
    """

    _jobs: dict[str, _Job] = field(default_factory=dict)
    _divided: tuple[Resources, tuple[str, ...]] | None = None  # the pool and the jobs that were last divided

    @property
    def used(self) -> Resources:
        """What the processes of all jobs take. A job that begins takes what it was granted, as soon as it can."""
        total = Resources()
        for job in self._jobs.values():
            total = total.plus(job.bid.uses if job.bid.has_begun else job.holds)
        return total

    def bid(self, name: str, bid: Bid, pool: Resources) -> Share:
        """Note what a job asks for, and return its share."""
        if name in self._jobs:
            self._jobs[name].bid = bid
        else:
            # After the pool's own failure, a job comes again that uses something already.
            self._jobs[name] = _Job(bid, bid.uses if bid.has_begun else None)
        self._divide(pool)
        return self._share(self._jobs[name], pool)

    def _share(self, job: _Job, pool: Resources) -> Share:
        return Share(job.granted, job.aim, pool, len(self._jobs))

    def all(self, pool: Resources) -> list[tuple[str, Bid, Share]]:
        """Return what each job has last asked for, and its share, in the order in which they have come."""
        return [(name, job.bid, self._share(job, pool)) for name, job in self._jobs.items()]

    def leave(self, name: str) -> None:
        """Note that a job has ended."""
        del self._jobs[name]

    def _divide(self, pool: Resources) -> None:
        jobs, what = list(self._jobs.values()), (pool, tuple(self._jobs))
        aims = divided([one.bid for one in jobs], pool)
        # What was measured differs a little from time to time, for which no job should change.
        before = [one.aim for one in jobs]
        if what != self._divided or _gain(jobs, before, aims) >= LEAST_GAIN:
            self._divided = what
        else:
            aims = before
        for job, aim in zip(jobs, aims, strict=True):
            job.aim = aim
            if job.granted is not None:
                # What it needs in any case is not taken from a job that has begun.
                job.granted = job.granted.least((aim or job.bid.least).most(job.bid.least))
        for job in jobs:
            if job.aim is None:
                continue
            free = pool
            for other in jobs:
                free = free.less(other.holds)
            if job.granted is not None:
                job.granted = job.granted.plus(job.aim.less(job.granted).least(free))
            elif job.bid.least.fits(free):
                job.granted = job.aim.least(free)


def _gain(jobs: Sequence[_Job], before: Sequence[Resources | None], after: Sequence[Resources | None]) -> float:
    """Return by how much all jobs would be faster with other shares: the weighted mean of the logarithms."""
    total = 0.0
    for job, had, has in zip(jobs, before, after, strict=True):
        if (had is None) != (has is None):
            return float("inf")
        if had is not None and has is not None and had != has:
            was, now = job.bid.seconds(had), job.bid.seconds(has)
            if now < float("inf"):
                total += job.bid.weight * log(min(was / max(now, 1e-9), 1e9))
    return total / sum(job.bid.weight for job in jobs)
