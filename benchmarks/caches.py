"""What the schedule's arrivals are held against: an LRU cache that works, and Belady's minimum by counting."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np

_NONE = -1


@dataclass(frozen=True, slots=True)
class LruStep:
    """What an LRU cache does for a step's lookups.

    rows int64 [U]: the distinct rows by first lookup; slots int32 [U]: where they sit now; index int32 [lookups]: each lookup's place in
    them; missing int32 [M]: places of the rows that were not there; evicted int64 [M]: who sat in each one's slot, -1: nobody.
    """

    rows: np.ndarray
    slots: np.ndarray
    index: np.ndarray
    missing: np.ndarray
    evicted: np.ndarray


class LruCache:
    """Slots of which the least recently used are taken for the rows that are not there; all rows of a step sit in slots.

    Rows are numbers below `rows`, looked up by direct address, which is the fastest there is.
    """

    def __init__(self, slots: int, rows: int) -> None:
        self._slot_of = np.full(rows, _NONE, np.int32)
        self._row_in = np.full(slots, _NONE, np.int64)
        # A doubly linked list from the least to the most recently used slot; place `slots` is its head and tail.
        self._newer = np.roll(np.arange(slots + 1, dtype=np.int32), -1)
        self._older = np.roll(np.arange(slots + 1, dtype=np.int32), 1)
        self._used_at = np.full(slots, _NONE, np.int32)
        self._place = np.zeros(slots, np.int32)
        self._step = 0

    def step(self, lookups: np.ndarray) -> LruStep:
        """Make room for a step; lookups int64 [l]. Raises ValueError where its rows do not fit."""
        most = len(lookups)
        rows, slots, index = np.empty(most, np.int64), np.empty(most, np.int32), np.empty(most, np.int32)
        missing, evicted = np.empty(most, np.int32), np.empty(most, np.int64)
        state = (self._slot_of, self._row_in, self._newer, self._older, self._used_at, self._place)
        used, missed = _lru(lookups, self._step, *state, rows, slots, index, missing, evicted)
        if used < 0:
            raise ValueError(f"slots: step {self._step} has more rows than {len(self._row_in)}")
        self._step += 1
        return LruStep(rows[:used], slots[:used], index, missing[:missed], evicted[:missed])


@nb.njit(nogil=True, cache=True)
def _move_to_newest(slot: int, newer: np.ndarray, older: np.ndarray) -> None:
    end = newer.size - 1
    newer[older[slot]], older[newer[slot]] = newer[slot], older[slot]
    last = older[end]
    newer[last], older[slot], newer[slot], older[end] = slot, last, end, slot


@nb.njit(nogil=True, cache=True)
def _lru(
    lookups: np.ndarray,
    step: int,
    slot_of: np.ndarray,
    row_in: np.ndarray,
    newer: np.ndarray,
    older: np.ndarray,
    used_at: np.ndarray,
    place: np.ndarray,
    rows: np.ndarray,
    slots: np.ndarray,
    index: np.ndarray,
    missing: np.ndarray,
    evicted: np.ndarray,
) -> tuple[int, int]:
    """A step of `LruCache`, on its arrays and those of `LruStep`; returns how many rows it uses and how many were missing, (-1, 0): no room."""
    used = missed = 0
    for l in range(lookups.size):
        row = lookups[l]
        slot = slot_of[row]
        if slot >= 0:
            if used_at[slot] != step:
                used_at[slot], place[slot] = step, used
                _move_to_newest(slot, newer, older)
                rows[used], slots[used] = row, slot
                used += 1
            index[l] = place[slot]
        elif slot == _NONE:
            # Until all hits are known nothing can leave: the row's place stands where its slot will.
            slot_of[row] = -2 - used
            rows[used], missing[missed], index[l] = row, used, used
            used, missed = used + 1, missed + 1
        else:
            index[l] = -2 - slot
    for m in range(missed):
        slot = newer[newer.size - 1]
        if used_at[slot] == step:
            return -1, 0
        old, row = row_in[slot], rows[missing[m]]
        if old >= 0:
            slot_of[old] = _NONE
        evicted[m], row_in[slot], slot_of[row], used_at[slot], slots[missing[m]] = old, row, slot, step, slot
        _move_to_newest(slot, newer, older)
    # Of a step's rows, those that were there already count as the later used: they are the more frequent ones.
    m = 0
    for u in range(used):
        if m < missed and missing[m] == u:
            m += 1
        else:
            _move_to_newest(slots[u], newer, older)
    return used, missed


def lru_arrivals(lookups: np.ndarray, slots: int, rows: int) -> int:
    """Arrivals of an LRU cache that begins empty. lookups: int64 [steps, l], numbers below `rows`."""
    lru = LruCache(slots, rows)
    return sum(len(lru.step(of_step).missing) for of_step in lookups)


def minimum_arrivals(lookups: np.ndarray, slots: int, rows: int) -> int:
    """Belady's minimum of arrivals, all rows of a step in slots, from an empty cache. lookups: int64 [steps, l], numbers below `rows`.

    Which rows stay does not matter, only how many of those whose next use is step t: whoever is used next last leaves first. So counts
    per step are enough. Raises ValueError where a step's rows do not fit.
    """
    steps = len(lookups)
    next_use = np.full(rows, steps, np.int32)
    used = np.zeros(steps, np.int64)
    # By step, last step first: the steps at which its rows are used next (`steps`: never), and how many of its rows at each.
    pairs = []
    for step in range(steps - 1, -1, -1):
        coming = np.zeros(steps + 1, np.int32)
        used[step] = _note(lookups[step], step, next_use, coming)
        following = np.flatnonzero(coming)
        pairs.append((following, coming[following]))
    waiting = np.zeros(steps + 1, np.int64)  # residents by the step of their next use
    residents = arrivals = 0
    furthest = steps
    for step, (following, counts) in enumerate(reversed(pairs)):
        if used[step] > slots:
            raise ValueError(f"slots: step {step} has {used[step]} rows, more than {slots}")
        hits = int(waiting[step])
        arrivals += int(used[step]) - hits
        residents += int(used[step]) - hits
        waiting[step] = 0
        furthest = steps
        while residents > slots:
            leaving = min(int(waiting[furthest]), residents - slots)
            waiting[furthest] -= leaving
            residents -= leaving
            furthest -= 1
        waiting[following] += counts
    return arrivals


@nb.njit(nogil=True, cache=True)
def _note(lookups: np.ndarray, step: int, next_use: np.ndarray, coming: np.ndarray) -> int:
    """Count the distinct rows of a step by their next use, going backwards in time; returns how many they are.

    next_use: int32 [rows], of the steps after this one, updated; coming: int32 [steps + 1], zeros before, then rows by the step of their next use.
    """
    distinct = 0
    for l in range(lookups.size):
        following = next_use[lookups[l]]
        if following != step:
            coming[following] += 1
            distinct += 1
            next_use[lookups[l]] = step
    return distinct
