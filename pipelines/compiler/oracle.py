"""The oracle: which row sits in which slot, when it arrives and when it leaves, by Belady's MIN.

The kernels here are pure functions on the arrays of one lane; lanes do not depend on each other. A
lane's rows are numbered in the order in which the schedule first uses them. For each access the
oracle knows the row's number and the step of its next use. These come from all accesses of the
schedule (`next_uses`), or from as many as a window holds (`windowed`).

All rows of a step sit in slots. Among the other rows, the one whose next use is furthest away
leaves (Belady 1966). A row with no known next use leaves before any other; of several such rows,
the one that has waited longest leaves first.

Slots stand in stacks, one stack for each step of next use, linked from slot to slot. A bitmap of
two levels says which stacks hold any slot. So a decision costs O(1), nothing is sorted, and memory
grows with rows, slots and steps, not with accesses.

Loops over rows prefetch memory AHEAD rows before they need it, and do not branch on conditions that
the processor cannot predict. Array indices are uint64, because numba adds a check for negative
indices to signed ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.intrinsics import prefetch
from foreload.pipelines.compiler.row_table import AHEAD

NEVER = np.int32(2**31 - 1)  # the row has no next use, or none that is known
SLOT, LAST = range(2)  # columns of Lane.rows
USED, FURTHEST, OLDEST, NEWEST = range(4)  # places in Lane.scalars
# Columns of a step's counts. The first three are also places in `fill`.
ROWS_USED, ENDS, ARRIVALS, INITIAL = range(4)


class Lane(NamedTuple):
    """The slots of a lane, and the state of its rows at the step that the oracle has reached.

    Steps are counted from the schedule's first.

    Attributes:
        scalars: int64 [4]: USED, the number of slots ever taken; FURTHEST, a step after which no
            stack holds a slot; OLDEST and NEWEST, the first and last slot of the queue, -1 if it is
            empty.
        rows: int32 [rows, 2], by number. SLOT is the row's slot, or -(boundary + 2) of its last
            write-back, or -1 if it has neither. LAST is 1 + the last step that used it, 0 for
            never.
        held: int32 [slots], the number of the row in each slot, -1 for a free slot.
        stored: int32 [slots], the tag of the row's version in the store, 0 for never written.
        below: int32 [slots], the slot below in the stack, or, for a slot in the queue of rows with
            no known use, the next younger one; -1 for none.
        older: int32 [slots], for a slot in the queue the next older one, -1 for none.
        tops: int32 [steps], the slot on top of each step's stack, -1 for an empty stack.
        words: uint64 [steps / 64], a bit for each step whose stack holds a slot.
        groups: uint64 [steps / 4096], a bit for each entry of `words` that is not 0.
        ordinals: int64 [tables], how many ordinals the oracle has passed.
    """

    scalars: np.ndarray
    rows: np.ndarray
    held: np.ndarray
    stored: np.ndarray
    below: np.ndarray
    older: np.ndarray
    tops: np.ndarray
    words: np.ndarray
    groups: np.ndarray
    ordinals: np.ndarray


class Accesses(NamedTuple):
    """Accesses of a lane, step by step; access n is at index n & ring.

    Attributes:
        numbers: int32, the row's number.
        nexts: int32, the step of the row's next use, in the count that `plan_steps` is given, or
            NEVER.
        next_users: unsigned, the lanes of the next use if that is in the step right after, else 0.
        ring: The size of a ring buffer - 1, or all bits set if the arrays hold all accesses.
    """

    numbers: np.ndarray
    nexts: np.ndarray
    next_users: np.ndarray
    ring: np.uint64


class Moves(NamedTuple):
    """The output of `plan_steps`: one lane's moves in consecutive steps, one step after the other.

    There are three groups of columns, each with a length of its own: rows used, residencies ended,
    and arrivals. See docs/schedule.md, "Moves".

    Attributes:
        slots: int32 [rows used], the slot of each row.
        early: uint8 [rows used], 1 if the row may be sent while the step before still computes.
        next_users: unsigned [rows used], the lanes that use the row in the next step.
        ends: int32 [ended], the slots whose rows are written back.
        slot: int32 [arrivals], the slot that each row takes.
        table: int16 [arrivals].
        ordinal: int64 [arrivals].
        id: int64 [arrivals].
        tag: int32 [arrivals], the tag of the stored version to expect, 0 for an initial arrival.
        after: int32 [arrivals], the boundary of the row's last write-back, -1 for never written.
    """

    slots: np.ndarray
    early: np.ndarray
    next_users: np.ndarray
    ends: np.ndarray
    slot: np.ndarray
    table: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray
    after: np.ndarray


def empty_lane(slots: int, steps: int, ordinals: np.ndarray) -> Lane:
    """Return a lane of free slots that knows no rows yet.

    The large arrays are filled, so the memory that they take does not depend on the data.

    Args:
        steps: The number of steps of the schedule.
        ordinals: int64 [tables], the number of ordinals given before the first step.
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
    """Return the lane with more rows added.

    Args:
        tags: int32 [more], the tag of each row's version in the store before this schedule, 0 for
            none.
    """
    more = np.empty((len(tags), 2), np.int32)
    more[:, SLOT], more[:, LAST] = -1, tags
    return lane._replace(rows=np.concatenate([lane.rows, more]))


@nb.njit(nogil=True, cache=True, inline="always")
def _top_bit(word: np.uint64) -> np.uint64:
    """Return the number of the highest bit of a word that is not 0."""
    bit = np.uint64(0)
    for width in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(width) != np.uint64(0):
            word >>= np.uint64(width)
            bit += np.uint64(width)
    return bit


@nb.njit(nogil=True, cache=True, inline="always")
def _mark(lane: Lane, step: np.uint64) -> None:
    """Record in the bitmap that the stack of a step holds a slot."""
    lane.words[step >> np.uint64(6)] |= np.uint64(1) << (step & np.uint64(63))
    lane.groups[step >> np.uint64(12)] |= np.uint64(1) << ((step >> np.uint64(6)) & np.uint64(63))


@nb.njit(nogil=True, cache=True, inline="always")
def _clear(lane: Lane, step: np.uint64) -> None:
    """Record in the bitmap that the stack of a step is empty."""
    word = step >> np.uint64(6)
    lane.words[word] &= ~(np.uint64(1) << (step & np.uint64(63)))
    if lane.words[word] == np.uint64(0):
        lane.groups[word >> np.uint64(6)] &= ~(np.uint64(1) << (word & np.uint64(63)))


@nb.njit(nogil=True, cache=True)
def _furthest(lane: Lane, bound: int) -> int:
    """Return the last step, `bound` at most, whose stack holds a slot; -1 if no stack does.

    Before: no stack after step `bound` holds a slot.
    """
    word = np.uint64(bound) >> np.uint64(6)
    if lane.words[word] == np.uint64(0):
        # The word of step `bound` is empty. Look for an earlier word that is not, first within the
        # same group and then in earlier groups.
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
    """Put a slot that is in no stack and not in the queue on the stack of a step.

    The caller updates FURTHEST.
    """
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

    Before each step: the step's stack holds the slots of exactly those of its rows that sit in a
    slot. After each step: every row of the step has a slot, and every slot that was ever taken
    stands in the stack of its row's next use, or in the queue if no next use is known.

    Args:
        lane: The lane, brought forward to the end of these steps.
        rows: LANE_ROW, the lane's rows by number.
        first: The first of the steps, counted from the schedule's first.
        first_step: The number of the schedule's first training step.
        accesses: The accesses of these steps.
        starts: int64 [steps + 1], the number of each step's first access, and the end of the last
            step.
        span: A pair (shift, never). A next use at or beyond step `never` counts as never; `shift`
            is added to all others.
        fill: int64 [3], the entries of `moves` that rows used, ends and arrivals take. Advanced.
        moves: Have room for as many more entries in each group as there are accesses.
        counts: int64 [steps, 4], filled for each step with its rows used, residencies ended,
            arrivals, and initial arrivals.

    Returns:
        0, or the number of rows that a step needs if the slots do not suffice.
    """
    for k in range(len(counts)):
        at, start, used = np.uint64(first + k), np.uint64(starts[k]), int(starts[k + 1] - starts[k])
        if used > lane.held.size:
            return used
        # Empty the step's own stack, so that `_choose` cannot take the slots of rows that this step
        # uses.
        lane.tops[at] = -1
        _clear(lane, at)
        # `_arrive` chooses among slots whose rows wait for later steps. So this step's own rows go
        # on the stacks of their next uses only after it.
        waiting = _use(lane, first_step + first + k, start, used, accesses, fill, moves)
        ended_and_initial = _arrive(lane, rows, first_step + first + k, waiting, fill, moves)
        if ended_and_initial < 0:
            return used
        _wait_for_next(lane, start, accesses, span, moves.slots[fill[ROWS_USED] : fill[ROWS_USED] + used])
        counts[k, ROWS_USED], counts[k, ENDS] = used, ended_and_initial & 0xFFFFFFFF
        counts[k, ARRIVALS], counts[k, INITIAL] = waiting, ended_and_initial >> 32
        fill[ROWS_USED] += used
        fill[ENDS] += ended_and_initial & 0xFFFFFFFF
        fill[ARRIVALS] += waiting
    return 0


@nb.njit(nogil=True, cache=True)
def _use(lane: Lane, step: int, start: np.uint64, used: int, accesses: Accesses, fill: np.ndarray, moves: Moves) -> int:
    """Fill the entries of a step's rows used, and enter the rows without a slot as arrivals.

    After: moves.slots is negative for a row that must arrive. For each arrival, moves.slot holds
    the row's place among the rows used and moves.ordinal the row's number; `_arrive` replaces these
    by the slot and the ordinal. The loop does not branch on which rows must arrive: it writes each
    row as the next arrival, which then either counts or is overwritten.

    Returns:
        The number of rows that must arrive.
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
        # A row must not be sent early in two cases. The step before may change the row. Or the row
        # left a slot at the boundary before that step, and is written back only once that step's
        # gradients are in.
        moves.early[row0 + i] = np.uint8((before == 0) | ((before != step) & (slot != left_before)))
        moves.next_users[row0 + i] = next_users[(start + i) & ring]
        moves.slot[missing] = np.int32(i)
        moves.ordinal[missing] = number
        moves.tag[missing] = before
        moves.after[missing] = -slot - 2
        # If the row has a slot, the next row overwrites this arrival.
        missing += np.uint64(slot < 0)
    return int(missing - arrival0)


@nb.njit(nogil=True, cache=True)
def _arrive(lane: Lane, rows: np.ndarray, step: int, waiting: int, fill: np.ndarray, moves: Moves) -> int:
    """Give a slot to every row that `_use` found without one.

    A row takes a slot that was never used, or else the slot of the row whose next use is furthest
    away.

    After: the rows that left have the boundary of their write-back, the rows that arrived have
    their slots, and the entries of the arrivals are complete. The slots are in no stack and not in
    the queue.

    Returns:
        residencies ended | initial arrivals << 32, or -1 if this step needs more slots than exist.
    """
    held, state = lane.held, lane.rows
    row0, end0, arrival0 = np.uint64(fill[ROWS_USED]), np.uint64(fill[ENDS]), np.uint64(fill[ARRIVALS])
    ahead = np.uint64(AHEAD)
    unused = lane.scalars[USED]
    # Slots that were never taken come first. Only the rest of the rows need another row to leave.
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
        # An initial arrival is a row's first use, so the oracle passes the row's ordinal here.
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
    """Take slots from the rows whose next use is furthest away.

    Belady's choice takes the rows with no known use first, those that have waited longest before
    others. Then come the rows of the furthest step, and so on down to the step after this one. This
    step's own stack is empty by now. After: the slots taken are in no stack and not in the queue.

    Args:
        wanted: How many slots to take.
        end0: The first entry of `moves.ends` to fill with them.

    Returns:
        False if there are not that many slots.
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
    # Now the queue is empty, or all wanted slots are taken. Go on with the stacks, the furthest
    # first.
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
    """Put the slots of a step's rows on the stacks of their next use, or at the end of the queue.

    Args:
        start: The number of the step's first access.
        span: See `plan_steps`.
        slots: int32 [used], the slot of each of the step's rows.
    """
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
    """Take a slot out of the queue of slots whose rows have no known next use."""
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
    """Plan one lane's part of an evaluation step.

    Rows in slots are read there. Other rows arrive in evaluation slots, from `first_slot` on. Only
    `fill`, `moves` and `counts` change.

    Args:
        rows: LANE_ROW, the lane's rows by number.
        unknown: LANE_ROW, the rows that were never trained.
        numbers: int32 [rows used], the row's number, or -1 - n for the nth row of `unknown`.
        first_slot: The first evaluation slot.
        fill: As for `plan_steps`.
        moves: As for `plan_steps`.
        counts: int64 [4], filled as by `plan_steps`.
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
        # During the first epoch, a row that training uses only later has no ordinal yet.
        moves.ordinal[arrivals] = what.ordinal if tag != 0 else -1
        moves.tag[arrivals] = tag
        moves.after[arrivals] = -lane.rows[number, SLOT] - 2 if number >= 0 else -1
        counts[INITIAL] += moves.tag[arrivals] == 0
        arrivals += 1
    counts[ROWS_USED], counts[ENDS], counts[ARRIVALS] = numbers.size, 0, arrivals - fill[ARRIVALS]
    fill[ROWS_USED] += numbers.size
    fill[ARRIVALS] = arrivals


def occupants(lane: Lane, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the row in each of the slots 0 .. USED - 1: a partition's entry state.

    Args:
        rows: LANE_ROW, the lane's rows by number.

    Returns:
        The columns of schedule.Occupants, by name.
    """
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
