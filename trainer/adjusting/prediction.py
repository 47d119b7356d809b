"""Predict the time of the steps to come with other numbers of trainers and store shards.

A step is as slow as the busiest of three resources: the thread that computes a trainer's lanes, the
links to the store, and the machine's cores (asymptotic bounds: Denning and Buzen 1978, The
operational analysis of queueing network models). How busy each is was measured in the last steps,
with the present numbers. How much there is to do in the steps to come is in the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import LaneMoves
from foreload.trainer.adjusting.size import Size

# From this share of a step on that trainers wait for rows, the links to the store are always busy.
_STORE_BOUND = 0.1
# A step takes longer than its busiest resource alone, by at most this factor.
_MOST_OVERLAP = 2.0
# What the exchange takes, as a share of the computing, before two trainers have been tried.
_EXCHANGE_GUESS = 0.1
# How much more processor time twice as many trainers take for the same step.
_MORE_TRAINERS = 0.15
_WINDOWS = 64  # the most windows into which the steps to come are divided


@dataclass(frozen=True, slots=True)
class Measured:
    """The means of a step's figures over some steps, with the same size throughout. Times are in seconds.

    Attributes:
        seconds: wall time.
        compute: what the trainer that computes longest takes for its lanes.
        exchange: the exchange between trainers.
        waiting: the time that a trainer waits for rows of the store.
        processor: the processor time of all processes on this machine.
        samples: the samples of a step.
        rows: the rows fetched and written back.
    """

    seconds: float
    compute: float
    exchange: float
    waiting: float
    processor: float
    samples: float
    rows: float

    @property
    def waits_for_store(self) -> bool:
        """Whether the links to the store are always busy."""
        return self.waiting >= _STORE_BOUND * self.seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """What is given.

    Attributes:
        lanes: the number of lanes.
        cores: the cores that all processes share. None if trainers are on several machines.
    """

    lanes: int
    cores: int | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """The work of the steps to come, in windows of steps.

    Attributes:
        steps: the number of steps of each window: int64 [windows].
        samples: the mean samples of a step: float64 [windows].
        rows: the mean rows fetched and written back: float64 [windows].
    """

    steps: np.ndarray
    samples: np.ndarray
    rows: np.ndarray

    @property
    def count(self) -> int:
        """The number of steps to come."""
        return int(self.steps.sum())


def _windows(*values: np.ndarray) -> Ahead:
    count = len(values[0])
    edges = np.linspace(0, count, max(min(_WINDOWS, count), 1) + 1).astype(np.int64)
    steps = np.diff(edges)
    # The zero is for a schedule that has no steps left.
    sums = (np.add.reduceat(np.append(of, 0.0), edges[:-1]) for of in values)
    return Ahead(steps, *(of / np.maximum(steps, 1) for of in sums))


class Work:
    """The work of a schedule's training steps, as far as the schedule is prepared."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._segment = 0  # the first segment that is not counted yet
        # Of each step: the samples, the rows fetched and written back, and the rows that are new.
        self._samples, self._rows, self._new = (np.zeros(0) for _ in range(3))

    def advance(self) -> Work:
        """Count the steps of the segments published since. Raises ScheduleError for a damaged file."""
        schedule, samples, first = self._schedule, list[int](), self._segment
        moved = [np.zeros((4, 0), np.int64)]
        while schedule.published(self._segment) and (segment := schedule.segment(self._segment)) is not None:
            if segment.kind == "train":
                samples += segment.samples
                lanes = range(schedule.header.lanes)
                of = (LaneMoves(segment.first, segment.last, schedule.moves(segment.index, lane)).counts() for lane in lanes)
                moved.append(np.sum(list(of), axis=0))
            self._segment += 1
        if self._segment == first:
            return self
        _, arrived, fetched, ended = np.concatenate(moved, axis=1).astype(np.float64)
        self._samples = np.concatenate([self._samples, np.array(samples, np.float64)])
        self._rows = np.concatenate([self._rows, fetched + ended])
        self._new = np.concatenate([self._new, arrived - fetched])
        return self

    def _of(self, step: int) -> int:
        return max(step - self._schedule.header.first_step, 0)

    def ahead(self, step: int) -> Ahead:
        """Return the work of the steps after `step`.

        Steps that are not prepared yet count as those before them do on average.
        """
        done, end = self._of(step + 1), self._of(self._schedule.header.end_step)
        unknown = max(end - max(len(self._samples), done), 0)
        parts = []
        for values in (self._samples, self._rows):
            mean_known = values.mean() if len(values) else 0.0
            parts.append(np.concatenate([values[done:], np.full(unknown, mean_known)]))
        return _windows(*parts)

    def over(self, first: int, last: int) -> tuple[float, float]:
        """Return the mean samples and rows of the steps from `first` to `last`, which are prepared."""
        of = slice(self._of(first), self._of(last + 1))
        return float(self._samples[of].mean()), float(self._rows[of].mean())

    def rows_until(self, step: int) -> float:
        """Return how many different rows the steps up to `step` use."""
        return float(self._new[: self._of(step + 1)].sum())


def predicted(
    measured: Measured, at: Size, to: Size, machine: Machine, ahead: Ahead, exchange: float | None = None
) -> np.ndarray:
    """Return the predicted seconds of a step in each window of the steps to come: float64 [windows].

    Args:
        measured: what was measured with the size `at`.
        to: the size that is asked about.
        exchange: the seconds that the exchange takes for each further trainer, where `at` has only
            one. None if that was never measured.
    """
    samples, rows = ahead.samples / max(measured.samples, 1.0), ahead.rows / max(measured.rows, 1.0)
    one = np.ones_like(samples)
    before = _busiest(measured, at, at, machine, one, one, exchange)
    overlap = np.clip(measured.seconds / np.maximum(before, 1e-9), 1.0, _MOST_OVERLAP)
    result: np.ndarray = overlap * _busiest(measured, at, to, machine, samples, rows, exchange)
    return result


def _busiest(
    measured: Measured, at: Size, to: Size, machine: Machine, samples: np.ndarray, rows: np.ndarray, exchange: float | None
) -> np.ndarray:
    share = ceil(machine.lanes / to.trainers) / ceil(machine.lanes / at.trainers)
    thread = measured.compute * share * samples + _exchange(measured, at, to, exchange)
    store = rows * (measured.seconds * at.shards / to.shards if measured.waits_for_store else 0.0)
    cores = samples * 0.0
    if machine.cores is not None:
        more = max(1 + _MORE_TRAINERS * log2(to.trainers / at.trainers), 0.5)
        cores = samples * measured.processor * more / machine.cores
    busiest: np.ndarray = np.maximum(np.maximum(thread, store), cores)
    return busiest


def _exchange(measured: Measured, at: Size, to: Size, each: float | None) -> float:
    if at.trainers > 1:
        each = measured.exchange / (at.trainers - 1)
    elif each is None:
        each = _EXCHANGE_GUESS * measured.compute / max(to.trainers - 1, 1)
    return each * (to.trainers - 1)


def mean(of: Sequence[float]) -> float:
    """Return the mean of some steps' seconds, in which a single long one counts as ten usual ones."""
    values = np.asarray(of, np.float64)
    return float(np.minimum(values, 10 * np.median(values)).mean()) if len(values) else 0.0
