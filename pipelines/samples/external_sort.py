"""External sort: sorted runs are cut, by keys alone, into buckets that are sorted in memory. (docs/definitions.md, Order)

A *run* is a piece whose samples are sorted by key, ties in the former order; a *bucket* is what lies between two splitters in all runs. Runs are
numbered in the order of the sources, since pieces are named so that sorting their names gives it; so equal keys keep that order. Everything here is
a function of its inputs alone, and holds a bounded number of keys whatever the length of the data.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MOST_CANDIDATES = 65_536  # sampled keys from which splitters are chosen, about, at most; more where four a bucket are more


class Keys(Protocol):
    """Sort keys of a run, ascending: a NumPy array, an Arrow binary array, or keys computed when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class Runs(Protocol):
    """The keys of runs, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, run: int, /) -> Keys: ...


def stable_order(keys: np.ndarray | pa.Array) -> np.ndarray:
    """int64 [n]: the places of the samples in ascending order of their keys, ties in their former order."""
    if isinstance(keys, np.ndarray):
        return np.argsort(keys, kind="stable")
    return np.asarray(pc.array_sort_indices(keys)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Splitter:
    """A place between two samples in the order of all runs: all before have a smaller (key, run, row)."""

    key: Any
    run: int
    row: int


def cut(keys: Keys, run: int, splitter: Splitter) -> int:
    """How many samples of run number `run` come before the splitter."""
    if run == splitter.run:
        return splitter.row
    # equal keys: those of earlier runs come before, those of later ones after
    side = bisect.bisect_right if run < splitter.run else bisect.bisect_left
    if isinstance(keys, pa.Array):
        return side(range(len(keys)), splitter.key, key=lambda row: keys[row].as_py())
    return side(keys, splitter.key)


def sampled(keys: Keys, run: int, start: int, end: int, stride: int) -> list[Splitter]:
    """Every stride-th sample of rows start .. end - 1 of a run, as candidates for splitters."""
    values = ((row, keys[row]) for row in range(start + stride - 1, end, stride))
    return [Splitter(value.as_py() if isinstance(value, pa.Scalar) else value, run, row) for row, value in values]


def stride_for(total: int, target: int) -> int:
    """Samples between two candidates, for buckets of about `target` of `total` samples."""
    return max(1, min(total // _MOST_CANDIDATES, target // 4))


def choose(candidates: list[Splitter], stride: int, target: int) -> list[Splitter]:
    """Splitters, in order, between buckets of about `target` samples; candidates stand for `stride` samples each."""
    ordered = sorted(candidates, key=lambda s: (s.key, s.run, s.row))
    step = max(1, target // stride)
    return ordered[step - 1 :: step]


def buckets(runs: Runs, starts: np.ndarray, ends: np.ndarray, target: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut rows starts[i] .. ends[i] - 1 of each run i into parts in key order, each of at most 2 * target samples.

    Yields (starts, ends), int64 [runs] each. A few keys are looked at, of one run after the other, so that runs may be opened when
    they are asked for.
    """
    total = int((ends - starts).sum())
    if total == 0:
        return
    if total <= 2 * target:
        yield starts, ends
        return
    used = np.flatnonzero(ends > starts).tolist()
    for stride in (stride_for(total, target), 1):
        candidates = [s for i in used for s in sampled(runs[i], i, int(starts[i]), int(ends[i]), stride)]
        splitters = choose(candidates, stride, target)
        if splitters:
            break  # else the runs are too short for the stride: look at every key
    stops = np.tile(ends, (len(splitters) + 1, 1))  # (parts, runs)
    for i in used:
        keys = runs[i]
        stops[:-1, i] = [min(max(cut(keys, i, splitter), starts[i]), ends[i]) for splitter in splitters]
    for stop in stops:
        yield from buckets(runs, starts, stop, target)
        starts = stop


def first_rows(runs: Runs, count: int, target: int) -> np.ndarray:
    """How many samples of each run are among the first `count` of all, int64 [runs]; about `target` keys are held in memory."""
    ends = np.array([len(runs[i]) for i in range(len(runs))], np.int64)
    before = 0
    for starts, stops in buckets(runs, np.zeros(len(runs), np.int64), ends, target):
        size = int((stops - starts).sum())
        if before + size > count:  # the bucket in which sample number `count` lies, which is the first that is left out
            used = np.flatnonzero(stops > starts).tolist()
            candidates = [s for i in used for s in sampled(runs[i], i, int(starts[i]), int(stops[i]), 1)]
            following = choose(candidates, 1, 1)[count - before]
            starts = starts.copy()
            for i in used:
                starts[i] = min(max(cut(runs[i], i, following), starts[i]), stops[i])
            return starts
        before += size
    return ends
