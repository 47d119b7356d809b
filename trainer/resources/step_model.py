"""A model of step time: processor time and waits, each a sum of terms none of which is negative, fitted to what runs took.

A step's wall time is the processor time of the thread that runs it, of the trainer that takes most, and what that thread waits: for other trainers,
for messages, and for a core where there are fewer than what wants to run. What it waits for a core follows from the processor time of all
(trainers' threads, traffic with the store, servers). So there are three fits: `thread`, `processor` and `waits`. What the schedule states of the
steps enters as it is; nobody who decides is known here.
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
    """The coefficients float64 [n], none below 0, for which |terms @ coefficients - values| is least (Lawson and Hanson 1974, chapter 23).

    terms: [m, n]; values: [m]. A term that is 0 throughout gets 0. shared: with more than 0, terms that cannot be told apart share what they explain
    (ridge regression, of terms scaled to length 1), where else one of them might get all.
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
        passive[best] = True
        while True:
            trial = np.zeros(size)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], values, rcond=None)[0]
            below = passive & (trial <= 0)
            if not below.any():
                break
            # Towards the unconstrained solution as far as nothing falls below 0; what comes to 0 leaves.
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


CONFIDENCE = 0.9  # that what is measured lies within an interval
WINDOWS = 4  # into which a run's steps are cut, at most
_WINDOW_STEPS = 8  # of a window, at least
_FEW = 6  # configurations: with fewer, leaving one out says little
_UNKNOWN = 0.3  # relative half-width of an interval then, at least
_MEGA = 1e6
_SHARED = 0.03  # see non_negative_fit: runs are few, and many of their terms grow together


@dataclass(frozen=True, slots=True)
class Setup:
    """What is chosen: trainers, threads of each, copies of a lane (its own included), store shards, k and r; and what is given: lanes, dense
    parameters, cores.

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
        """Of a step's work, that of the trainer with most lanes."""
        return -(-self.lanes // self.trainers) / self.lanes


@dataclass(frozen=True, slots=True)
class Load:
    """What steps do, float64 [n], means a step: samples, rows used, arrived, fetched and written back, bytes that trainers send, all together."""

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
    """What steps of a run took, in any unit of time, float64 [n] as its load: all of it, of it `thread` by the step's thread; processor: time of the
    processor, all trainers and servers together.
    """

    setup: Setup
    load: Load
    total: np.ndarray
    thread: np.ndarray
    processor: np.ndarray


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of steps, float64 [n]: their time, with bounds between which CONFIDENCE of what is measured lies; thread, processor as in Observation."""

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
        # All the work on all the cores takes longer than the step's thread does by itself.
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
    """A fitted model. observations: what it was fitted to, one a run; counts: whether the schedule's counts are used.

    coefficients: of each of the three fits, by the names of the terms. tail: what steps take on average, over their median.
    """

    observations: Sequence[Observation]
    counts: bool = True
    tail: float = 1.0
    coefficients: dict[str, dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.coefficients = _coefficients(self.observations, self.counts)

    def predict(self, setup: Setup, load: Load) -> Prediction:
        """What steps with this load would take."""
        total, thread, processor = _predict(self.coefficients, setup, load, self.counts)
        margin = self.margin
        return Prediction(total, total / (1 + margin), total * (1 + margin), thread, processor)

    @cached_property
    def margin(self) -> float:
        """Relative half-width of the intervals: of each configuration, what the model fitted to all others is off by; the CONFIDENCE quantile."""
        groups = self.groups()
        off: list[float] = []
        if len(groups) >= _FEW:
            for group in groups:
                rest = [one for one in self.observations if one.setup != group]
                fitted = _coefficients(rest, self.counts)
                off += [_off(fitted, one, self.counts) for one in self.observations if one.setup == group]
            # As in conformal prediction: with few of them, the quantile is further out.
            level = min(CONFIDENCE * (1 + 1 / len(off)), 1.0)
            return float(np.quantile(off, level))
        off = [_off(self.coefficients, one, self.counts) for one in self.observations]
        return max(2 * float(np.quantile(off, CONFIDENCE)), _UNKNOWN) if off else 1.0

    def groups(self) -> list[Setup]:
        """The different setups that it was fitted to."""
        return list(dict.fromkeys(one.setup for one in self.observations))

    @classmethod
    def of_profiles(cls, profiles: Iterable[Profile]) -> StepModel:
        """A model of profiles, all of a like job and machine. Those with too few steps are left out."""
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
            # Relative errors count, and each run as much as any other.
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
    """Total, thread and processor."""

    def of(fit: str, terms: Terms) -> np.ndarray:
        known = coefficients[fit]
        result: np.ndarray = np.sum([known.get(name, 0.0) * values for name, values in terms.items()], axis=0)
        return result

    thread = of("thread", _thread_terms(setup, load, counts))
    processor = of("processor", _processor_terms(setup, load, counts))
    return thread + of("waits", _wait_terms(setup, load, counts, thread, processor)), thread, processor


def _off(coefficients: Mapping[str, Mapping[str, float]], one: Observation, counts: bool) -> float:
    """How far a fit is off on average over an observation, relative."""
    total = _predict(coefficients, one.setup, one.load, counts)[0].mean()
    measured = one.total.mean()
    return float(max(total, measured) / max(min(total, measured), 1e-12) - 1)


def _warm_up(points: int) -> int:
    """Steps at the beginning that measure compiling, seeding and filling, not a step."""
    return min(max(5, points // 10), points // 2)


def setup_of(profile: Profile) -> Setup:
    """The setup of a profile."""
    settings = profile.settings
    names = ("trainers", "threads", "copies", "shards", "k", "r", "lanes")
    given = {name: int(settings[name]) for name in names}
    cores = int(profile.machine["cores"])
    return Setup(**given, dense=int(settings["dense_parameters"]), cores=cores, local=bool(settings["local_store"]))


def observation_of(profile: Profile) -> Observation | None:
    """What a profile says of its steps, in milliseconds: medians over up to WINDOWS stretches of them; None where there are too few."""
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
    """Processor time of the servers, by the rows that each window moved; they report only what they used in all."""
    steps, stride = profile.steps, profile.stride
    # Rows that sit in slots at the end are written once more, and not in a step.
    moved = stride * float((steps["rows_fetched"] + steps["rows_arrived"]).sum())
    per_row = 1000 * profile.processor_seconds("store") / max(moved, 1.0)
    result: np.ndarray = per_row * (load.fetched + load.ended)
    return result


def loads_of(
    counts: StepCounts, setup: Setup, weights: int, state: int, dense: int, windows: int = 64
) -> tuple[Load, np.ndarray]:
    """What a schedule's steps do, as means over up to `windows` stretches, and how many steps each has (int64). See StepCounts.trainers_bytes."""
    parts = np.array_split(np.arange(counts.steps), max(min(windows, counts.steps), 1))
    sent = counts.trainers_bytes(setup.trainers, weights, state, dense, setup.copies)
    of = (counts.samples, *(lanes.sum(axis=1) for lanes in (counts.used, counts.arrived, counts.fetched, counts.ended)), sent)
    return Load(*(np.array([values[part].mean() for part in parts]) for values in of)), np.array([len(part) for part in parts])
