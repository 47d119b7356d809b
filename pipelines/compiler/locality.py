"""Locality placement: which samples of a training step go to which slice.

A sample goes to the lane that owns most of its rarer rows, so that lanes exchange fewer rows. Rows
that most slices use anyway say nothing about where a sample belongs, and are left out. Herald (NSDI
2024) places inputs in a similar way at run time; here the schedule does. All arithmetic is on
integers, because the placement decides what is trained and must be the same on every machine. See
docs/definitions.md, "Placement by locality".
"""

from __future__ import annotations

import numpy as np

from foreload.base.compiled import nb

MOST_LOOKUPS = 16
"""A row with more lookups than this in a step counts as used by every slice."""

_WEIGHT = 64  # of a row with one lookup in the step; a row with c lookups has _WEIGHT // c

# A word for each distinct row holds all that a lookup needs to know: bits 0-6 its weight, 8-14 its
# lane + 1 (0 for none), 15 whether it is shared, 32 whether it has only one lookup, 34-63 its
# number among the shared rows. Shared rows are those with 2 .. MOST_LOOKUPS lookups.
_LANE_SHIFT, _SHARED_SHIFT, _SINGLE_SHIFT, _NUMBER_SHIFT = np.uint64(8), np.uint64(15), np.uint64(32), np.uint64(34)
_SEVEN_BITS = np.uint64(127)
_ONE = np.uint64(1)
# The parts of a word that are summed for each sample and lane: weights below, single rows above.
_SUMMED = _SEVEN_BITS | _ONE << _SINGLE_SHIFT
_WEIGHTS = np.uint64((1 << 32) - 1)


@nb.njit(nogil=True, cache=True)
def assign_samples(inverse: np.ndarray, starts: np.ndarray, lane: np.ndarray, lookups: np.ndarray, lanes: int) -> np.ndarray:
    """Return the samples of a step in the order of its slices.

    Four passes lead there. `_score` computes every sample's score with every lane. `_deal` deals
    samples by regret: those that lose most with their second-best lane go first. Then the rows of
    each slice are counted (`present`). Finally `_swap` exchanges pairs of samples between two
    slices if that saves rows.

    Args:
        inverse: int32 [lookups], the distinct row of every lookup.
        starts: int64 [n + 1], the first lookup of every sample.
        lane: int32 [distinct], the lane of each distinct row, -1 if it has none yet.
        lookups: int32 [distinct], the number of lookups of each row in the step.

    Returns:
        int64 [n], places in the batch, ascending within a slice. Slice v is order[v * n // lanes :
            (v + 1) * n // lanes].
    """
    n = starts.size - 1
    order = np.empty(n, np.int64)
    if lanes == 1:
        for i in range(n):
            order[i] = i
        return order
    present = np.zeros((lookups.size, lanes), np.uint8)
    words = _words(lane, lookups, present)
    shared = np.empty(inverse.size + 1, np.int32)
    bounds = np.empty(n + 1, np.int64)
    sums = np.zeros((n, lanes + 1), np.uint64)
    regrets, most = _score(inverse, starts, words, shared, bounds, sums)
    # Slices differ by one sample at most, whichever samples they have.
    firsts = np.empty(lanes + 1, np.int64)
    for v in range(lanes + 1):
        firsts[v] = v * n // lanes
    chosen = _deal(_by_regret(regrets), sums, firsts)
    members = np.empty(n, np.int32)
    filled = firsts.copy()
    for i in range(n):
        v = chosen[i]
        members[filled[v]] = i
        filled[v] += 1
        for k in range(bounds[i], bounds[i + 1]):
            present[np.uint64(shared[k]), np.uint64(v)] += np.uint8(1)
    _swap(members, firsts, chosen, shared, bounds, present, sums, most)
    # Go through the samples in order, so that each slice is in the order of the batch.
    filled[:] = firsts
    for i in range(n):
        v = chosen[i]
        order[filled[v]] = i
        filled[v] += 1
    return order


@nb.njit(nogil=True, cache=True)
def _words(lane: np.ndarray, lookups: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the words of the distinct rows, uint64 [distinct], in the layout described above.

    Args:
        lane: See `assign_samples`.
        lookups: See `assign_samples`.
        present: uint8 [shared rows, lanes], set to 1 where a lane owns a shared row, because the
            owner has the row in any case.
    """
    words = np.zeros(lookups.size, np.uint64)
    number = 0
    for d in range(lookups.size):
        count = lookups[d]
        owner = lane[d]
        if count == 1:
            words[d] = np.uint64(_WEIGHT) | np.uint64(owner + 1) << _LANE_SHIFT | _ONE << _SINGLE_SHIFT
        elif count <= MOST_LOOKUPS:
            words[d] = (
                np.uint64(_WEIGHT // count)
                | np.uint64(owner + 1) << _LANE_SHIFT
                | _ONE << _SHARED_SHIFT
                | np.uint64(number) << _NUMBER_SHIFT
            )
            if owner >= 0:
                present[number, owner] = 1
            number += 1
    return words


@nb.njit(nogil=True, cache=True)
def _score(
    inverse: np.ndarray, starts: np.ndarray, words: np.ndarray, shared: np.ndarray, bounds: np.ndarray, sums: np.ndarray
) -> tuple[np.ndarray, int]:
    """Sum up every sample's rows by lane, and gather its shared rows.

    The word of each lookup is added to the sum of its row's lane, or to column 0 for a row without
    a lane. Weights and the count of single rows do not overflow into each other below 2^25 lookups
    a sample. The loop over lookups has no branch, because the processor could not predict one: it
    writes every row as the next shared one, and advances only if the row is shared.

    Before: sums are zeros.

    Args:
        inverse: See `assign_samples`.
        starts: See `assign_samples`.
        words: uint64 [distinct], of `_words`.
        shared: int32 [lookups + 1], filled with the shared rows of every sample.
        bounds: int64 [n + 1], filled, CSR into `shared`.
        sums: uint64 [n, lanes + 1], filled; column v + 1 is lane v.

    Returns:
        int32 [n], each sample's largest score minus its second largest, and the most rows that a
            gain (`_rank`) can count.
    """
    n = starts.size - 1
    regrets = np.empty(n, np.int32)
    most = 0
    place = np.uint64(0)
    bounds[0] = 0
    for i in range(n):
        own = sums[i]
        for k in range(np.uint64(starts[i]), np.uint64(starts[i + 1])):
            word = words[np.uint64(inverse[k])]
            own[(word >> _LANE_SHIFT) & _SEVEN_BITS] += word & _SUMMED
            shared[place] = word >> _NUMBER_SHIFT
            place += (word >> _SHARED_SHIFT) & _ONE
        bounds[i + 1] = place
        counted = bounds[i + 1] - bounds[i]
        best = second = np.int32(-1)
        for v in range(1, own.size):
            score = np.int32(own[v] & _WEIGHTS)
            counted += np.int64(own[v] >> _SINGLE_SHIFT)
            second = max(second, min(best, score))
            best = max(best, score)
        most = max(most, counted)
        regrets[i] = best - second
    return regrets, most


@nb.njit(nogil=True, cache=True)
def _by_regret(regrets: np.ndarray) -> np.ndarray:
    """Return the samples by descending regret, then by place: int32 [n].

    This is a counting sort, because regrets are small.
    """
    top = np.int32(0)
    for i in range(regrets.size):
        top = max(top, regrets[i])
    heads = np.zeros(top + 2, np.int32)
    for i in range(regrets.size):
        heads[top - regrets[i] + 1] += 1
    for k in range(top + 1):
        heads[k + 1] += heads[k]
    order = np.empty(regrets.size, np.int32)
    for i in range(regrets.size):
        order[heads[top - regrets[i]]] = i
        heads[top - regrets[i]] += 1
    return order


@nb.njit(nogil=True, cache=True)
def _deal(order: np.ndarray, sums: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Deal each sample in turn to the lane with the largest score among those that have room.

    Of several such lanes, the one with most room gets the sample, then the lowest. Score and room
    are compared as one number, with the score in the upper half. After: lane v has firsts[v + 1] -
    firsts[v] samples.

    Args:
        order: int32 [n], the samples in the order in which they are dealt.
        sums: uint64 [n, lanes + 1], of `_score`.
        firsts: int64 [lanes + 1], the first place of each slice.

    Returns:
        int32 [n], the lane of each sample.
    """
    lanes = firsts.size - 1
    room = firsts[1:] - firsts[:-1]
    chosen = np.empty(order.size, np.int32)
    for k in range(order.size):
        i = np.uint64(order[k])
        best, rank = 0, np.int64(-1)
        for v in range(lanes):
            here = np.int64(sums[i, v + 1] & _WEIGHTS) << 32 | room[v]
            if room[v] > 0 and here > rank:
                best, rank = v, here
        chosen[i] = best
        room[best] -= 1
    return chosen


@nb.njit(nogil=True, cache=True)
def _swap(
    members: np.ndarray,
    firsts: np.ndarray,
    chosen: np.ndarray,
    shared: np.ndarray,
    bounds: np.ndarray,
    present: np.ndarray,
    sums: np.ndarray,
    most: int,
) -> None:
    """For every two lanes, exchange the pairs of samples whose exchange saves rows.

    A row is exchanged to every lane whose entry in `present` is not 0, except its owner. The
    samples with the largest gains go first. Gains are those of each move alone. So a pair is moved,
    the rows exchanged are counted, and the pair is moved back if nothing is saved.

    Before: `chosen` and `present` agree with `members`. After: they agree again, and no more rows
    are exchanged than before.

    Args:
        members: int32 [n], the samples slice by slice.
        firsts: int64 [lanes + 1], the first place of each slice.
        chosen: int32 [n], the lane of each sample.
        shared: Of `_score`.
        bounds: Of `_score`.
        present: uint8 [shared rows, lanes], the lookups of a row in a slice, plus 1 for its owner.
        sums: Of `_score`.
        most: The most rows that a gain can count.
    """
    lanes = firsts.size - 1
    largest = (members.size + lanes - 1) // lanes
    places, gains = np.empty((2, largest), np.int32), np.empty((2, largest), np.int32)
    work, heads = np.empty(largest, np.int32), np.empty(2 * most + 2, np.int32)
    for a in range(lanes):
        ours = members[firsts[a] : firsts[a + 1]]
        for b in range(a + 1, lanes):
            theirs = members[firsts[b] : firsts[b + 1]]
            _rank(ours, a, b, shared, bounds, present, sums, most, work, heads, places[0], gains[0])
            _rank(theirs, b, a, shared, bounds, present, sums, most, work, heads, places[1], gains[1])
            for k in range(min(ours.size, theirs.size)):
                # Both lists are in descending order of gain, so no later pair gains anything.
                if gains[0, k] + gains[1, k] <= 0:
                    break
                i, j = ours[places[0, k]], theirs[places[1, k]]
                first_rows, second_rows = shared[bounds[i] : bounds[i + 1]], shared[bounds[j] : bounds[j + 1]]
                fewer = _single_gain(sums[i], a, b) + _single_gain(sums[j], b, a)
                fewer += _move(first_rows, a, b, present) + _move(second_rows, b, a, present)
                if fewer > 0:
                    ours[places[0, k]], theirs[places[1, k]] = j, i
                    chosen[i], chosen[j] = b, a
                else:
                    _move(first_rows, b, a, present)
                    _move(second_rows, a, b, present)


@nb.njit(nogil=True, cache=True, inline="always")
def _single_gain(sums: np.ndarray, source: int, target: int) -> np.int64:
    """Return how many rows with one lookup are no longer exchanged if their sample moves.

    A row without a lane does not count: the lane that uses it becomes its owner, so it is not
    exchanged wherever its sample goes.

    Args:
        sums: uint64 [lanes + 1], the sums of the sample.
        source: The lane that the sample leaves.
        target: The lane that the sample goes to.
    """
    return np.int64(sums[np.uint64(target + 1)] >> _SINGLE_SHIFT) - np.int64(sums[np.uint64(source + 1)] >> _SINGLE_SHIFT)


@nb.njit(nogil=True, cache=True)
def _rank(
    members: np.ndarray,
    source: int,
    target: int,
    shared: np.ndarray,
    bounds: np.ndarray,
    present: np.ndarray,
    sums: np.ndarray,
    most: int,
    work: np.ndarray,
    heads: np.ndarray,
    places: np.ndarray,
    gains: np.ndarray,
) -> None:
    """Rank the samples of a slice by what their move to another slice would gain.

    A gain is what a sample's move alone would save, from -most to most. So this is a counting sort,
    by descending gain, then by place.

    Args:
        members: int32, the samples of the slice.
        source: The slice's lane.
        target: The other lane.
        shared: Of `_score`.
        bounds: Of `_score`.
        present: See `_swap`.
        sums: Of `_score`.
        most: The most rows that a gain can count.
        work: Space for the sort.
        heads: Space for the sort.
        places: Filled with places in `members`.
        gains: Filled with their gains.
    """
    heads[:] = 0
    s, t = np.uint64(source), np.uint64(target)
    for k in range(members.size):
        i = np.uint64(members[k])
        gain = _single_gain(sums[i], source, target)
        for q in range(np.uint64(bounds[i]), np.uint64(bounds[i + _ONE])):
            d = np.uint64(shared[q])
            gain += np.int64(present[d, s] == 1) - np.int64(present[d, t] == 0)
        work[k] = most - gain
        heads[np.uint64(most - gain + 1)] += 1
    for k in range(heads.size - 1):
        heads[k + 1] += heads[k]
    for k in range(members.size):
        place = np.uint64(heads[np.uint64(work[k])])
        places[place], gains[place] = k, most - work[k]
        heads[np.uint64(work[k])] += 1


@nb.njit(nogil=True, cache=True)
def _move(rows: np.ndarray, source: int, target: int, present: np.ndarray) -> np.int64:
    """Move a sample's shared rows to another slice; return how many fewer rows are exchanged."""
    s, t = np.uint64(source), np.uint64(target)
    fewer = np.int64(0)
    for q in range(rows.size):
        d = np.uint64(rows[q])
        present[d, s] -= np.uint8(1)
        fewer += np.int64(present[d, s] == 0) - np.int64(present[d, t] == 0)
        present[d, t] += np.uint8(1)
    return fewer
