"""A model of step time, fitted to the profiles of runs.

Processor time and waits are sums of non-negative terms. The wall time of a step is the processor
time of its thread, on the trainer that needs most, plus the time that this thread waits: for other
trainers, for messages, and for a core if there are fewer cores than runnable threads. The wait for
a core follows from the processor time of all work (the trainers' threads, the traffic with the
store, the servers). So there are three fits: `thread`, `processor` and `waits`. The counts that the
schedule states for its steps enter unchanged. The model does not depend on the code that makes
decisions with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from foreload.trainer.resources.features import StepCounts
from foreload.trainer.run.history import Profile

_TOLERANCE = 1e-10


def non_negative_fit(terms: np.ndarray, values: np.ndarray, shared: float = 0.0) -> np.ndarray:
    """Fit non-negative coefficients by least squares (Lawson and Hanson 1974, chapter 23).

    Minimizes |terms @ coefficients - values|. A term that is 0 throughout gets the coefficient 0.

    Args:
        terms: [m, n].
        values: [m].
        shared: the strength of the ridge regression, for terms scaled to length 1. If above 0,
            terms that cannot be distinguished share the values that they explain. Otherwise one of
            them might get all.

    Returns:
        The coefficients, float64 [n].
    """
    scales = np.linalg.norm(terms, axis=0)
    scales[scales == 0] = 1.0
    matrix = terms / scales
    size = matrix.shape[1]
    if shared:
        matrix, values = np.concatenate([matrix, np.sqrt(shared) * np.eye(size)]), np.concatenate([values, np.zeros(size)])
    passive = np.zeros(size, bool)
    solution = np.zeros(size)
    gradient = matrix.T @ values
    for _ in range(10 * size):
        candidates = np.where(passive, -np.inf, gradient)
        best = int(np.argmax(candidates)) if size else 0
        if not size or candidates[best] <= _TOLERANCE * max(np.abs(values).max(initial=0.0), 1e-300):
            break
        # Passive terms are those whose coefficients may be above 0. The term with the steepest
        # descent joins them.
        passive[best] = True
        while True:
            trial = np.zeros(size)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], values, rcond=None)[0]
            below = passive & (trial <= 0)
            if not below.any():
                break
            # Move towards the unconstrained solution until the first coefficient reaches 0. Terms
            # that reach 0 are no longer passive.
            ratios = solution[below] / np.maximum(solution[below] - trial[below], 1e-300)
            solution = solution + ratios.min() * (trial - solution)
            passive &= solution > _TOLERANCE
            solution[~passive] = 0.0
            if not passive.any():
                break
        solution = np.where(passive, trial, 0.0)
        gradient = matrix.T @ (values - matrix @ solution)
    result: np.ndarray = solution / scales
    return result


CONFIDENCE = 0.9  # the probability that a measured value lies within an interval
WINDOWS = 4  # the most windows into which a run's steps are divided
_WINDOW_STEPS = 8  # the fewest steps of a window
# With fewer configurations than _FEW, leave-one-out errors say little. The relative half-width of
# an interval is then at least _UNKNOWN.
_FEW = 6
_UNKNOWN = 0.3
_MEGA = 1e6
# See non_negative_fit. There are few runs, and many of their terms grow together.
_SHARED = 0.03


@dataclass(frozen=True, slots=True)
class Setup:
    """A configuration, and the given properties of the job and machine.

    Attributes:
        trainers: the number of trainers.
        threads: the number of threads of each trainer.
        copies: the number of trainers that hold a lane, including its owner.
        shards: the number of store shards.
        k: the number of data rows in a stripe.
        r: the number of parity rows in a stripe.
        lanes: the number of lanes.
        dense: the number of dense parameters.
        cores: the number of cores.
        local: whether the store's servers share these cores.
    """

    trainers: int
    threads: int
    copies: int
    shards: int
    k: int
    r: int
    lanes: int
    dense: int
    cores: int
    local: bool = True

    @property
    def share(self) -> float:
        """The share of a step's work on the trainer with the most lanes."""
        return -(-self.lanes // self.trainers) / self.lanes


@dataclass(frozen=True, slots=True)
class Load:
    """The work of steps, float64 [n]: means per step, for all trainers together.

    Attributes:
        samples: the number of samples.
        used: rows used.
        arrived: rows that arrived in slots.
        fetched: rows fetched from the store.
        ended: rows written back.
        sent: bytes that trainers send each other.
    """

    samples: np.ndarray
    used: np.ndarray
    arrived: np.ndarray
    fetched: np.ndarray
    ended: np.ndarray
    sent: np.ndarray

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class Observation:
    """The measured times of a run's steps, in any unit, float64 [n] like the load.

    Attributes:
        setup: the configuration of the run.
        load: the work of the steps.
        total: the wall time.
        thread: the part of it that is processor time of the step's thread.
        processor: the processor time of all trainers and servers together.
    """

    setup: Setup
    load: Load
    total: np.ndarray
    thread: np.ndarray
    processor: np.ndarray


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of steps, float64 [n].

    Attributes:
        total: the wall time.
        low: the lower bound of the interval that contains a share CONFIDENCE of measured times.
        high: the upper bound of that interval.
        thread: as in Observation.
        processor: as in Observation.
    """

    total: np.ndarray
    low: np.ndarray
    high: np.ndarray
    thread: np.ndarray
    processor: np.ndarray


Terms = Mapping[str, np.ndarray]


def _thread_terms(setup: Setup, load: Load, counts: bool) -> Terms:
    share, one = setup.share, np.ones(len(load))
    samples = load.samples * share / setup.threads
    terms = {
        "fixed": one,
        "samples": samples,
        "dense": samples * setup.dense / _MEGA,
        "peers": one * (setup.trainers - 1),
    }
    if not counts:
        return terms
    return terms | {"moved": (load.arrived + load.ended) * share, "sent": load.sent / setup.trainers / _MEGA}


def _processor_terms(setup: Setup, load: Load, counts: bool) -> Terms:
    one, protected, dense = np.ones(len(load)), setup.r / max(setup.k, 1), setup.dense / _MEGA
    terms = {
        "trainers": one * setup.trainers,
        "shards": one * setup.shards,
        "connections": one * setup.trainers * setup.shards,
        "samples": load.samples,
        "dense": load.samples * dense,
        "update": one * dense * setup.trainers,
        "peers": one * setup.trainers * (setup.trainers - 1),
    }
    if not counts:
        return terms | {"parity": load.samples * protected}
    return terms | {
        "new": load.arrived - load.fetched,
        "fetched": load.fetched,
        "written": load.ended,
        "parity": load.ended * protected,
        "sent": load.sent / _MEGA,
        "copies": load.used * (setup.copies - 1),
    }


def _wait_terms(setup: Setup, load: Load, counts: bool, thread: np.ndarray, processor: np.ndarray) -> Terms:
    one, work = np.ones(len(load)), processor / setup.cores
    terms = {
        "fixed": one,
        # The work of all processes on all cores may take longer than the step's thread alone.
        "cores": np.maximum(work - thread, 0.0),
        "work": work,
        "peers": one * (setup.trainers - 1),
        "crowded": thread * max(setup.trainers / setup.cores - 1, 0.0),
    }
    if not counts:
        return terms
    written = load.ended * setup.share
    return terms | {
        "sent": load.sent / setup.trainers / _MEGA,
        "store": load.fetched * setup.share + written,
        "parity": written * setup.r / max(setup.k, 1),
    }


@dataclass
class StepModel:
    """A fitted model.

    Attributes:
        observations: the observations that it was fitted to, one per run.
        counts: whether the model uses the schedule's counts.
        tail: the average step time over the median.
        coefficients: the coefficients of each of the three fits, by the names of the terms.
    """

    observations: Sequence[Observation]
    counts: bool = True
    tail: float = 1.0
    coefficients: dict[str, dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.coefficients = _coefficients(self.observations, self.counts)

    def predict(self, setup: Setup, load: Load) -> Prediction:
        """Predict the times of steps with this load."""
        total, thread, processor = _predict(self.coefficients, setup, load, self.counts)
        margin = self.margin
        return Prediction(total, total / (1 + margin), total * (1 + margin), thread, processor)

    @cached_property
    def margin(self) -> float:
        """The relative half-width of the intervals.

        Each configuration is predicted by a model fitted to all others. The margin is the
        CONFIDENCE quantile of the errors.
        """
        groups = self.groups()
        off: list[float] = []
        if len(groups) >= _FEW:
            for group in groups:
                rest = [one for one in self.observations if one.setup != group]
                fitted = _coefficients(rest, self.counts)
                off += [_off(fitted, one, self.counts) for one in self.observations if one.setup == group]
            # As in conformal prediction, a higher quantile is used if there are few errors.
            level = min(CONFIDENCE * (1 + 1 / len(off)), 1.0)
            return float(np.quantile(off, level))
        off = [_off(self.coefficients, one, self.counts) for one in self.observations]
        return max(2 * float(np.quantile(off, CONFIDENCE)), _UNKNOWN) if off else 1.0

    def groups(self) -> list[Setup]:
        """Return the different setups that the model was fitted to."""
        return list(dict.fromkeys(one.setup for one in self.observations))

    @classmethod
    def of_profiles(cls, profiles: Iterable[Profile]) -> StepModel:
        """Fit a model to profiles of similar jobs on similar machines.

        Profiles with too few steps are left out.
        """
        tails, observations = [], []
        for profile in profiles:
            observed = observation_of(profile)
            if observed is not None:
                observations.append(observed)
                late = profile.steps["ms"][_warm_up(profile.points) :]
                tails.append(float(np.mean(np.minimum(late, 10 * np.median(late))) / np.median(late)))
        return cls(observations, tail=float(np.median(tails)) if tails else 1.0)


def _coefficients(observations: Sequence[Observation], counts: bool) -> dict[str, dict[str, float]]:
    def fitted(
        target: Callable[[Observation], np.ndarray],
        terms: Callable[[Observation], Terms],
        scale: Callable[[Observation], np.ndarray],
    ) -> dict[str, float]:
        rows, values = [], []
        for one in observations:
            # The weights make errors relative, and give each run the same influence.
            weight = 1 / (scale(one) * np.sqrt(len(one.load)))
            rows.append(np.stack(list(terms(one).values()), axis=1) * weight[:, None])
            values.append(target(one) * weight)
        if not rows:
            return {}
        names = list(terms(observations[0]))
        return dict(zip(names, non_negative_fit(np.concatenate(rows), np.concatenate(values), _SHARED).tolist(), strict=True))

    return {
        "thread": fitted(lambda one: one.thread, lambda one: _thread_terms(one.setup, one.load, counts), lambda one: one.total),
        "processor": fitted(
            lambda one: one.processor, lambda one: _processor_terms(one.setup, one.load, counts), lambda one: one.total
        ),
        "waits": fitted(
            lambda one: np.maximum(one.total - one.thread, 0.0),
            lambda one: _wait_terms(one.setup, one.load, counts, one.thread, one.processor),
            lambda one: one.total,
        ),
    }


def _predict(
    coefficients: Mapping[str, Mapping[str, float]], setup: Setup, load: Load, counts: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the total, thread and processor times."""

    def of(fit: str, terms: Terms) -> np.ndarray:
        known = coefficients[fit]
        result: np.ndarray = np.sum([known.get(name, 0.0) * values for name, values in terms.items()], axis=0)
        return result

    thread = of("thread", _thread_terms(setup, load, counts))
    processor = of("processor", _processor_terms(setup, load, counts))
    return thread + of("waits", _wait_terms(setup, load, counts, thread, processor)), thread, processor


def _off(coefficients: Mapping[str, Mapping[str, float]], one: Observation, counts: bool) -> float:
    """Return the relative error of a fit, for the average over an observation."""
    total = _predict(coefficients, one.setup, one.load, counts)[0].mean()
    measured = one.total.mean()
    return float(max(total, measured) / max(min(total, measured), 1e-12) - 1)


def _warm_up(points: int) -> int:
    """Return the number of steps at the beginning to leave out.

    Their times contain compiling, seeding and filling the cache.
    """
    return min(max(5, points // 10), points // 2)


def setup_of(profile: Profile) -> Setup:
    """Return the setup of a profile."""
    settings = profile.settings
    names = ("trainers", "threads", "copies", "shards", "k", "r", "lanes")
    given = {name: int(settings[name]) for name in names}
    cores = int(profile.machine["cores"])
    return Setup(**given, dense=int(settings["dense_parameters"]), cores=cores, local=bool(settings["local_store"]))


def observation_of(profile: Profile) -> Observation | None:
    """Return the step times of a profile, in milliseconds, or None if it has too few steps.

    The times are medians over up to WINDOWS windows of steps.
    """
    first = _warm_up(profile.points)
    windows = min((profile.points - first) // _WINDOW_STEPS, WINDOWS)
    if windows < 1:
        return None
    setup = setup_of(profile)
    parts = np.array_split(np.arange(first, profile.points), windows)

    def means(name: str) -> np.ndarray:
        return np.array([profile.steps[name][part].mean() for part in parts])

    def medians(values: np.ndarray) -> np.ndarray:
        return np.array([np.median(values[part]) for part in parts])

    load = Load(
        *(means(name) for name in ("samples", "rows_used", "rows_arrived", "rows_fetched", "rows_written_back", "bytes_sent"))
    )
    steps = profile.steps
    processor = medians(steps["ms_processor"]) + _store_ms(profile, load) * setup.local
    return Observation(setup, load, medians(steps["ms"]), medians(steps["ms_thread"]), processor)


def _store_ms(profile: Profile, load: Load) -> np.ndarray:
    """Return the processor time of the servers in each window, in milliseconds.

    The servers report only their total, which is divided in proportion to the rows that each window
    moved.
    """
    steps, stride = profile.steps, profile.stride
    # Arrivals stand for all write-backs, because rows that are in slots at the end are also
    # written, though not in a step.
    moved = stride * float((steps["rows_fetched"] + steps["rows_arrived"]).sum())
    per_row = 1000 * profile.processor_seconds("store") / max(moved, 1.0)
    result: np.ndarray = per_row * (load.fetched + load.ended)
    return result


def loads_of(
    counts: StepCounts, setup: Setup, weights: int, state: int, dense: int, windows: int = 64
) -> tuple[Load, np.ndarray]:
    """Return the work of a schedule's steps, and the number of steps that each entry stands for.

    Args:
        weights: floats per row, as in StepCounts.trainers_bytes.
        state: floats of optimizer state per row.
        dense: the number of dense parameters.
        windows: the most entries.

    Returns:
        The load, as means over windows of steps, and the number of steps in each window, int64.
    """
    parts = np.array_split(np.arange(counts.steps), max(min(windows, counts.steps), 1))
    sent = counts.trainers_bytes(setup.trainers, weights, state, dense, setup.copies)
    of = (counts.samples, *(lanes.sum(axis=1) for lanes in (counts.used, counts.arrived, counts.fetched, counts.ended)), sent)
    return Load(*(np.array([values[part].mean() for part in parts]) for values in of)), np.array([len(part) for part in parts])
