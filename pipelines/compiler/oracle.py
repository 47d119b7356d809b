"""The oracle: which row sits in which slot, when it arrives and when it leaves, by Belady's MIN.

Pure kernels over the arrays of one lane; lanes know nothing of each other. A lane's rows have numbers, in the order in which the schedule comes to
them. Of each access the oracle has the row's number and the step of its next use: from all accesses of the schedule (`next_uses`), or from as many
as a window holds (`windowed`). Rows of one step all sit in slots; among the others the one whose next use is furthest leaves (Belady 1966), one with
no known next use first, oldest first. Slots stand in stacks, one per step of next use, linked from slot to slot, and a bitmap in two levels says
which stacks hold any: a decision costs O(1), nothing is sorted, and what it takes of memory follows rows, slots and steps, not accesses.

Loops over rows ask for memory AHEAD rows before they need it, and do not branch on what the processor cannot guess. Places are uint64, for which
numba does not look for negative ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.intrinsics import prefetch
from foreload.pipelines.compiler.row_table import AHEAD

NEVER = np.int32(2**31 - 1)  # no next use, or none that is known
SLOT, LAST = range(2)  # columns of Lane.rows
USED, FURTHEST, OLDEST, NEWEST = range(4)  # places in Lane.scalars
ROWS_USED, ENDS, ARRIVALS, INITIAL = range(4)  # columns of a step's counts; the first three are places in `fill`, too


class Lane(NamedTuple):
    """A lane's slots, and its rows as far as the oracle has come. Steps are counted from the schedule's first."""

    scalars: (
        np.ndarray
    )  # int64 [4]: slots taken, no step after this has a slot in its stack, first and last slot of the queue (-1: empty)
    # int32 [rows, 2]: by number: the row's slot, or -(boundary + 2) of its last write-back, -1: none; and 1 + the last step that used it, 0: never
    rows: np.ndarray
    held: np.ndarray  # int32 [slots]: the number of the row there, -1 free
    stored: np.ndarray  # int32 [slots]: tag of the version in the store, 0 never written
    below: (
        np.ndarray
    )  # int32 [slots]: the slot below in the stack, -1 none; in the queue of those with no use known the next younger one
    older: np.ndarray  # int32 [slots]: of a slot in the queue the next older one, -1 none
    tops: np.ndarray  # int32 [steps]: the slot on top of each step's stack, -1 empty
    words: np.ndarray  # uint64 [steps / 64]: a bit for each step whose stack holds any
    groups: np.ndarray  # uint64 [steps / 4096]: a bit for each word that is not 0
    ordinals: np.ndarray  # int64 [tables]: ordinals that the oracle has passed


class Accesses(NamedTuple):
    """Accesses of a lane, step by step: number n stands at place n & ring."""

    numbers: np.ndarray  # int32: the row's number
    nexts: np.ndarray  # int32: the step of its next use, counted as given to `plan_steps`, or NEVER
    next_users: np.ndarray  # unsigned: the lanes of the next use, where that is the step after, else 0
    ring: np.uint64


class Moves(NamedTuple):
    """What `plan_steps` writes: one lane's parts of consecutive steps, one after the other (docs/schedule.md, Moves).

    Three lists of their own lengths: rows used, residencies ended, arrivals.
    """

    slots: np.ndarray  # int32 [rows used]: where each row sits
    early: np.ndarray  # uint8 [rows used]: 1: the row may be sent while the step before still computes
    next_users: np.ndarray  # unsigned [rows used]: the lanes that use it in the next step
    ends: np.ndarray  # int32 [ended]: the slots that are written back
    slot: np.ndarray  # int32 [arrivals]: where each row is put
    table: np.ndarray  # int16 [arrivals]
    ordinal: np.ndarray  # int64 [arrivals]
    id: np.ndarray  # int64 [arrivals]
    tag: np.ndarray  # int32 [arrivals]: of the stored version to expect, 0: an initial arrival
    after: np.ndarray  # int32 [arrivals]: the boundary of the row's last write-back, -1: never written


def empty_lane(slots: int, steps: int, ordinals: np.ndarray) -> Lane:
    """A lane of so many free slots, for so many steps, that knows no rows yet. ordinals int64 [tables]: given before the first step.

    The arrays are filled, so that what they take does not depend on the data.
    """
    return Lane(
        np.array([0, 0, -1, -1], np.int64),
        np.zeros((0, 2), np.int32),
        np.full(slots, -1, np.int32),
        np.full(slots, 0, np.int32),
        np.full(slots, -1, np.int32),
        np.full(slots, -1, np.int32),
        np.full(max(steps, 1), -1, np.int32),
        np.zeros((max(steps, 1) + 63) // 64, np.uint64),
        np.zeros((max(steps, 1) + 4095) // 4096, np.uint64),
        ordinals.copy(),
    )


def with_rows(lane: Lane, tags: np.ndarray) -> Lane:
    """The same lane with more rows; tags int32 [more]: of their versions in the store before this schedule, 0: none."""
    more = np.empty((len(tags), 2), np.int32)
    more[:, SLOT], more[:, LAST] = -1, tags
    return lane._replace(rows=np.concatenate([lane.rows, more]))


@nb.njit(nogil=True, cache=True, inline="always")
def _top_bit(word: np.uint64) -> np.uint64:
    """The number of the highest bit of a word that is not 0."""
    bit = np.uint64(0)
    for width in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(width) != np.uint64(0):
            word >>= np.uint64(width)
            bit += np.uint64(width)
    return bit


@nb.njit(nogil=True, cache=True, inline="always")
def _mark(lane: Lane, step: np.uint64) -> None:
    """Note that the stack of a step holds a slot."""
    lane.words[step >> np.uint64(6)] |= np.uint64(1) << (step & np.uint64(63))
    lane.groups[step >> np.uint64(12)] |= np.uint64(1) << ((step >> np.uint64(6)) & np.uint64(63))


@nb.njit(nogil=True, cache=True, inline="always")
def _clear(lane: Lane, step: np.uint64) -> None:
    """Note that the stack of a step is empty."""
    word = step >> np.uint64(6)
    lane.words[word] &= ~(np.uint64(1) << (step & np.uint64(63)))
    if lane.words[word] == np.uint64(0):
        lane.groups[word >> np.uint64(6)] &= ~(np.uint64(1) << (word & np.uint64(63)))


@nb.njit(nogil=True, cache=True)
def _furthest(lane: Lane, bound: int) -> int:
    """The last step, `bound` at most, whose stack holds a slot; -1: there is none. No later stack holds any."""
    word = np.uint64(bound) >> np.uint64(6)
    if lane.words[word] == np.uint64(0):
        group = np.int64(word >> np.uint64(6))
        bits = lane.groups[group] & ((np.uint64(1) << (word & np.uint64(63))) - np.uint64(1))
        while bits == np.uint64(0):
            group -= 1
            if group < 0:
                return -1
            bits = lane.groups[group]
        word = np.uint64(group) << np.uint64(6) | _top_bit(bits)
    return int(word << np.uint64(6) | _top_bit(lane.words[word]))


@nb.njit(nogil=True, cache=True, inline="always")
def push(lane: Lane, slot: np.uint64, step: np.uint64) -> None:
    """Put a slot that is in no stack and no queue on the stack of a step; FURTHEST is the caller's."""
    top = lane.tops[step]
    lane.below[slot] = top
    lane.tops[step] = np.int32(slot)
    if top < 0:
        _mark(lane, step)


@nb.njit(nogil=True, cache=True)
def plan_steps(
    lane: Lane,
    rows: np.ndarray,
    first: int,
    first_step: int,
    accesses: Accesses,
    starts: np.ndarray,
    span: tuple[int, int],
    fill: np.ndarray,
    moves: Moves,
    counts: np.ndarray,
) -> int:
    """Decide one lane's moves in consecutive training steps.

    rows LANE_ROW: the lane's rows by number; first: the first step, counted from the schedule's first, which is training step `first_step`; accesses,
    starts int64 [steps + 1]: those of these steps, and the numbers of each step's first and of the last one's end; span: what is added to the steps
    of next uses, and from which number on such a step is never; fill int64 [3]: entries of `moves` that are taken by rows used, ends and arrivals,
    advanced; moves have room for as many more of each as there are accesses; counts int64 [steps, 4]: filled with each step's rows used, residencies
    ended, arrivals, and initial ones. Returns 0, or the rows that a step needs where the slots do not suffice.

    Before each step: its stack has the slots of exactly those of its rows that sit in one. After it: every row of the step has a slot, and every slot
    stands in the stack of its row's next use, or in the queue where none is known.
    """
    for k in range(len(counts)):
        at, start, used = np.uint64(first + k), np.uint64(starts[k]), int(starts[k + 1] - starts[k])
        if used > lane.held.size:
            return used
        # The slots of rows that this step uses are out of reach from here on.
        lane.tops[at] = -1
        _clear(lane, at)
        waiting = _use(lane, first_step + first + k, start, used, accesses, fill, moves)
        ended_and_initial = _arrive(lane, rows, first_step + first + k, waiting, fill, moves)
        if ended_and_initial < 0:
            return used  # every slot is needed by this step
        _wait_for_next(lane, start, accesses, span, moves.slots[fill[ROWS_USED] : fill[ROWS_USED] + used])
        counts[k, ROWS_USED], counts[k, ENDS] = used, ended_and_initial & 0xFFFFFFFF
        counts[k, ARRIVALS], counts[k, INITIAL] = waiting, ended_and_initial >> 32
        fill[ROWS_USED] += used
        fill[ENDS] += ended_and_initial & 0xFFFFFFFF
        fill[ARRIVALS] += waiting
    return 0


@nb.njit(nogil=True, cache=True)
def _use(lane: Lane, step: int, start: np.uint64, used: int, accesses: Accesses, fill: np.ndarray, moves: Moves) -> int:
    """Fill a step's rows used, but for the slots of those that must arrive, which are put down as arrivals; returns how many.

    After: moves.slots is negative where a row must arrive, and of each arrival moves.slot has the place among the rows used, moves.ordinal the row's
    number: `_arrive` puts slot and ordinal there. Nothing branches on which rows must arrive: each is written as the next arrival, and counts as one
    or is overwritten.
    """
    rows, numbers, next_users, ring = lane.rows, accesses.numbers, accesses.next_users, accesses.ring
    row0, arrival0 = np.uint64(fill[ROWS_USED]), np.uint64(fill[ARRIVALS])
    last = start + np.uint64(max(used - 1, 0))
    missing = arrival0
    tag, left_before = np.int32(step + 1), np.int32(-(step + 1))
    for k in range(np.uint64(used)):
        i = np.uint64(k)
        prefetch(rows, np.int64(numbers[min(start + i + np.uint64(AHEAD), last) & ring]) * 2)
        number = np.uint64(numbers[(start + i) & ring])
        slot, before = rows[number, SLOT], rows[number, LAST]
        rows[number, LAST] = tag
        moves.slots[row0 + i] = slot
        # The step before changes the row; or it left a slot at the boundary before that, and is written back once that step's gradients are in.
        moves.early[row0 + i] = np.uint8((before == 0) | ((before != step) & (slot != left_before)))
        moves.next_users[row0 + i] = next_users[(start + i) & ring]
        moves.slot[missing] = np.int32(i)
        moves.ordinal[missing] = number
        moves.tag[missing] = before
        moves.after[missing] = -slot - 2
        missing += np.uint64(slot < 0)
    return int(missing - arrival0)


@nb.njit(nogil=True, cache=True)
def _arrive(lane: Lane, rows: np.ndarray, step: int, waiting: int, fill: np.ndarray, moves: Moves) -> int:
    """Give a slot to every row that `_use` found without: an unused one, or that of the row whose next use is furthest.

    After: the rows that left have the boundary of their write-back, the rows that arrived have their slots, and the arrivals are whole. The slots are
    in no stack and no queue yet. Returns residencies ended | initial arrivals << 32, or -1 where all slots are needed.
    """
    held, state = lane.held, lane.rows
    row0, end0, arrival0 = np.uint64(fill[ROWS_USED]), np.uint64(fill[ENDS]), np.uint64(fill[ARRIVALS])
    ahead = np.uint64(AHEAD)
    unused = lane.scalars[USED]
    into_unused = np.uint64(min(held.size - unused, waiting))
    ends = np.uint64(waiting) - into_unused
    if not _choose(lane, ends, end0, moves):
        return -1
    for n in range(ends):
        e = end0 + np.uint64(n)
        near = np.uint64(moves.ends[min(e + ahead, end0 + ends - np.uint64(1))])
        prefetch(state, np.int64(held[near]) * 2)
        state[np.uint64(held[np.uint64(moves.ends[e])]), SLOT] = np.int32(-(step + 2))
    initial = 0
    last = arrival0 + np.uint64(waiting) - np.uint64(1)
    for n in range(np.uint64(waiting)):
        k = np.uint64(n)
        a = arrival0 + k
        prefetch(rows, moves.ordinal[min(a + ahead, last)])
        slot = np.uint64(unused) + k if k < into_unused else np.uint64(moves.ends[end0 + k - into_unused])
        i, number, tag = np.uint64(moves.slot[a]), np.uint64(moves.ordinal[a]), moves.tag[a]
        moves.slot[a] = np.int32(slot)
        moves.ordinal[a] = rows[number].ordinal
        moves.id[a] = rows[number].id
        moves.table[a] = rows[number].table
        if tag == 0:
            initial += 1
            lane.ordinals[rows[number].table] += 1
        held[slot] = np.int32(number)
        lane.stored[slot] = tag
        state[number, SLOT] = np.int32(slot)
        moves.slots[row0 + i] = np.int32(slot)
    lane.scalars[USED] = unused + np.int64(into_unused)
    return int(np.int64(ends) | np.int64(initial) << 32)


@nb.njit(nogil=True, cache=True)
def _choose(lane: Lane, wanted: np.uint64, end0: np.uint64, moves: Moves) -> bool:
    """Take so many slots from the rows whose next use is furthest, into moves.ends from end0 on; False where that many do not exist.

    Belady's choice: rows with no use known first, those that wait longest before others, then the rows of the furthest step, and so on down to
    the step after this one, whose own stack is empty by now. After: the slots taken are in no stack and no queue.
    """
    below, held = lane.below, lane.held
    taken = np.uint64(0)
    slot = lane.scalars[OLDEST]
    while taken < wanted and slot >= 0:
        moves.ends[end0 + taken] = np.int32(slot)
        prefetch(held, slot)
        taken += np.uint64(1)
        slot = np.int64(below[np.uint64(slot)])
    lane.scalars[OLDEST] = slot
    if slot >= 0:
        lane.older[np.uint64(slot)] = -1
    else:
        lane.scalars[NEWEST] = -1
    while taken < wanted:
        furthest = _furthest(lane, lane.scalars[FURTHEST])
        if furthest < 0:
            return False
        lane.scalars[FURTHEST] = furthest
        slot = np.int64(lane.tops[np.uint64(furthest)])
        while taken < wanted and slot >= 0:
            moves.ends[end0 + taken] = np.int32(slot)
            prefetch(held, slot)
            taken += np.uint64(1)
            slot = np.int64(below[np.uint64(slot)])
        lane.tops[np.uint64(furthest)] = np.int32(slot)
        if slot < 0:
            _clear(lane, np.uint64(furthest))
    return True


@nb.njit(nogil=True, cache=True)
def _wait_for_next(lane: Lane, start: np.uint64, accesses: Accesses, span: tuple[int, int], slots: np.ndarray) -> None:
    """Put the slots of a step's rows, int32 [used], on the stacks of their next use, or at the queue's end; span: see `plan_steps`."""
    nexts, ring = accesses.nexts, accesses.ring
    shift, never = span
    furthest, newest = lane.scalars[FURTHEST], lane.scalars[NEWEST]
    for k in range(np.uint64(slots.size)):
        slot, following = np.uint64(slots[k]), np.int64(nexts[(start + np.uint64(k)) & ring])
        if following < never:
            push(lane, slot, np.uint64(following + shift))
            furthest = max(furthest, following + shift)
        else:
            lane.older[slot] = np.int32(newest)
            lane.below[slot] = -1
            if newest >= 0:
                lane.below[np.uint64(newest)] = np.int32(slot)
            else:
                lane.scalars[OLDEST] = np.int64(slot)
            newest = np.int64(slot)
    lane.scalars[FURTHEST], lane.scalars[NEWEST] = furthest, newest


@nb.njit(nogil=True, cache=True)
def leave_queue(lane: Lane, slot: np.uint64) -> None:
    """Take a slot out of the queue of those with no use known."""
    older, younger = np.int64(lane.older[slot]), np.int64(lane.below[slot])
    if older >= 0:
        lane.below[np.uint64(older)] = np.int32(younger)
    else:
        lane.scalars[OLDEST] = younger
    if younger >= 0:
        lane.older[np.uint64(younger)] = np.int32(older)
    else:
        lane.scalars[NEWEST] = older


@nb.njit(nogil=True, cache=True)
def plan_evaluation(
    lane: Lane,
    rows: np.ndarray,
    unknown: np.ndarray,
    numbers: np.ndarray,
    first_slot: int,
    fill: np.ndarray,
    moves: Moves,
    counts: np.ndarray,
) -> None:
    """One lane's part of an evaluation step: rows in slots are read there, others arrive in evaluation slots from `first_slot` on.

    rows, unknown LANE_ROW: the lane's rows by number, and those never trained; numbers int32 [rows used]: -1 - n for the nth of those. Fills moves
    and counts int64 [4] as `plan_steps` does; changes nothing else.
    """
    arrivals = fill[ARRIVALS]
    for i in range(numbers.size):
        number = numbers[i]
        row = fill[ROWS_USED] + i
        moves.early[row] = 0
        moves.next_users[row] = 0
        if number >= 0 and lane.rows[number, SLOT] >= 0:
            moves.slots[row] = lane.rows[number, SLOT]
            continue
        slot = first_slot + arrivals - fill[ARRIVALS]
        what = rows[number] if number >= 0 else unknown[-1 - number]
        moves.slots[row] = slot
        moves.slot[arrivals] = slot
        moves.table[arrivals] = what.table
        moves.id[arrivals] = what.id
        tag = lane.rows[number, LAST] if number >= 0 else 0
        # Amid the first epoch, a row that is trained only later has no ordinal yet.
        moves.ordinal[arrivals] = what.ordinal if tag != 0 else -1
        moves.tag[arrivals] = tag
        moves.after[arrivals] = -lane.rows[number, SLOT] - 2 if number >= 0 else -1
        counts[INITIAL] += moves.tag[arrivals] == 0
        arrivals += 1
    counts[ROWS_USED], counts[ENDS], counts[ARRIVALS] = numbers.size, 0, arrivals - fill[ARRIVALS]
    fill[ROWS_USED] += numbers.size
    fill[ARRIVALS] = arrivals


def occupants(lane: Lane, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Who sits in slots 0 .. USED - 1: a partition's entry state (schedule.Occupants). rows LANE_ROW: the lane's rows by number."""
    taken = int(lane.scalars[USED])
    numbers = lane.held[:taken]
    of_slots = rows[numbers]
    return {
        "table": np.ascontiguousarray(of_slots["table"]),
        "ordinal": of_slots["ordinal"].astype(np.int64),
        "id": np.ascontiguousarray(of_slots["id"]),
        "tag": np.ascontiguousarray(lane.rows[numbers, LAST]),
        "stored": lane.stored[:taken].copy(),
    }
