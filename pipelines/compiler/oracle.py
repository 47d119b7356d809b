"""The oracle: which row sits in which slot, when it arrives and when it leaves, by Belady's MIN over a lookahead window.

Pure kernels over the arrays of `window`. The serial pass appends the accesses of a step, lane by lane, to a ring (`link`), which tells every
pending access its row's next use; `plan_steps` then takes one lane's part of the oldest steps and decides. Rows of one step all sit in slots;
among the others the one whose next use is furthest leaves (Belady 1966), one with no known next use first, oldest first. Slots stand in stacks,
one per step of next use, so a decision costs O(1) and nothing is sorted. A stack says for which access each slot waits, so the row table is
looked at for rows that arrive or leave, and not for those that stay.

Loops over rows ask for memory AHEAD rows before they need it, and do not branch on what the processor cannot guess. Places are uint64, for which
numba does not look for negative ones.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from foreload.pipelines.base.prefetch import prefetch
from foreload.pipelines.compiler.numbering import Scratch
from foreload.pipelines.compiler.row_table import (
    ACCESS_MASK,
    AHEAD,
    FIELDS,
    ORDINAL,
    OWNER,
    PLACE,
    TAG,
    Rows,
)
from foreload.pipelines.compiler.window import (
    ARRIVALS,
    END,
    ENDS,
    FRONT,
    FURTHEST,
    HIGH,
    INITIAL,
    LOW,
    NEXT,
    OLDEST,
    RECORD,
    ROWS_USED,
    TAIL,
    UNKNOWN,
    USED,
    Moves,
    Partitions,
    Window,
)


@nb.njit(nogil=True, cache=True)
def _close_ranks(parts: Partitions, lane: int) -> None:
    """Move a lane's queue to its beginning, without the slots that were called; it holds twice the slots, so half of it is free then."""
    queue, first, base = parts.queue, 2 * parts.firsts[lane], parts.firsts[lane]
    kept = 0
    for k in range(parts.scalars[lane, OLDEST], parts.scalars[lane, END]):
        slot = queue[first + k]  # -1: `link` has called it to a stack
        if slot >= 0:
            queue[first + kept] = slot
            parts.place[base + slot] = kept
            kept += 1
    parts.scalars[lane, OLDEST], parts.scalars[lane, END] = 0, kept


@nb.njit(nogil=True, cache=True)
def link(rows: Rows, step: int, count: int, owned: np.ndarray, s: Scratch, window: Window, parts: Partitions) -> None:
    """Append the accesses of a training step to the ring, which has room, and tell each row's last access about this one.

    step: the training step's number; count, owned and s: its distinct rows, whose owners are assigned; s.state: their records before this step.
    After: a row's last access, if pending, says when and where the row is used next; a row that sat in a slot with no use known was taken out of
    its lane's queue, and its slot stands in this step's stack. So the slots of all of this step's rows get there, now or when the access before
    is planned. The row table is not changed.
    """
    accesses, tables, recent, next_users = window.accesses, window.tables, window.recent, window.next_users
    lane_accesses, stacks, starts = window.lane_accesses, window.stacks, window.starts
    order, record_of, table_of_row, users, state = s.order, s.record, s.table, s.users, s.state
    queue, place_of = parts.queue, parts.place
    ring = np.uint64(tables.size - 1)
    this, before = np.uint64(step & (len(starts) - 1)), np.uint64((step - 1) & (len(starts) - 1))
    front, tail = np.uint64(window.scalars[FRONT]), np.uint64(window.scalars[TAIL])
    previous = np.uint64(starts[before, 0])  # first access of the step before
    newest = front - np.uint64(1)  # at the first access of all this is 2^64 - 1, and `last` below the tail or at least the front
    low = np.uint64(ACCESS_MASK)  # what a record has of its last access's number: the newest with these bits is meant
    end = np.uint64(count)
    start = np.uint64(0)
    for lane in range(owned.size):
        first = front + start
        base = np.uint64(parts.firsts[lane])
        waiting = base + base
        starts[this, lane] = np.int64(first)
        height = np.uint64(0)
        for place in range(np.uint64(owned[lane])):
            k = start + np.uint64(place)
            near = np.uint64(state[np.uint64(order[min(k + np.uint64(AHEAD), end - np.uint64(1))]), OWNER])
            prefetch(accesses, np.uint64(2) * ((newest - ((newest - near) & low)) & ring))
            d = np.uint64(order[k])
            c = (front + d) & ring
            record = record_of[d]
            # The ring entry where the row's last access would be is the row's own only if that is pending.
            last = newest - ((newest - np.uint64(np.uint32(state[d, OWNER]))) & low)
            at = last & ring
            if tail <= last and last < front and accesses[at, RECORD] == record:
                accesses[at, NEXT] = np.int64(step) << HIGH | np.int64(place)
                changed = bool(last >= previous)
                if changed:
                    next_users[at] = users[d]
            else:
                tag, slot = state[d, TAG], state[d, PLACE]
                changed = bool(tag == step and tag != 0)  # by the last step of the schedule that this one continues
                if tag != 0 and slot >= 0:
                    queue[waiting + np.uint64(place_of[base + np.uint64(slot)])] = -1
                    stacks[(first + height) & ring] = np.int64(slot) | np.int64(place) << HIGH
                    height += np.uint64(1)
            accesses[c, RECORD] = record
            accesses[c, NEXT] = UNKNOWN
            tables[c] = table_of_row[d]
            recent[c] = changed
            next_users[c] = 0
            lane_accesses[(front + k) & ring] = d
        parts.stack_sizes[lane, this] = np.int32(height)
        if height:
            parts.scalars[lane, FURTHEST] = step
        start += np.uint64(owned[lane])
    starts[this, owned.size] = np.int64(front + start)
    window.scalars[FRONT] = np.int64(front + start)


@nb.njit(nogil=True, cache=True)
def plan_steps(
    rows: Rows, lane: int, first: int, window: Window, parts: Partitions, fill: np.ndarray, moves: Moves, counts: np.ndarray
) -> int:
    """Decide one lane's moves in consecutive training steps from the ring's tail on.

    first: the first step's number; fill int64 [3]: entries of `moves` that are taken by rows used, ends and arrivals, advanced; moves have
    room for as many more of each as the lane has accesses in these steps; counts int64 [steps, 4]: filled with each step's rows used,
    residencies ended, arrivals, and initial ones. Returns 0, or the rows that a step needs where the slots do not suffice.

    Before each step: the step's stack has the slots of exactly those rows of the step that sit in one. After it: every row of the step has a
    slot, and every slot waits in the stack of its row's next use, or in the queue where the window knows none. Other lanes' arrays are not
    touched, so lanes are planned at the same time.
    """
    size = parts.firsts[lane + 1] - parts.firsts[lane]
    for k in range(len(counts)):
        step = first + k
        this = np.uint64(step & (len(window.starts) - 1))
        used = window.starts[this, lane + 1] - window.starts[this, lane]
        if used > size:
            return int(used)
        waiting = _slots_held(lane, this, used, window, parts, fill, moves)
        ended_and_initial = _arrive(rows, lane, step, waiting, window, parts, fill, moves)
        if ended_and_initial < 0:
            return int(used)  # every slot is needed by this step
        _wait_for_next(lane, step, used, window, parts, moves.slots[fill[ROWS_USED] : fill[ROWS_USED] + used])
        counts[k, ROWS_USED], counts[k, ENDS] = used, ended_and_initial & LOW
        counts[k, ARRIVALS], counts[k, INITIAL] = waiting, ended_and_initial >> HIGH
        fill[ROWS_USED] += used
        fill[ENDS] += ended_and_initial & LOW
        fill[ARRIVALS] += waiting
    return 0


@nb.njit(nogil=True, cache=True)
def _slots_held(lane: int, this: np.uint64, used: int, window: Window, parts: Partitions, fill: np.ndarray, moves: Moves) -> int:
    """Fill a step's rows used but for the slots of those that must arrive, which are put down as arrivals; returns how many.

    Before: see `plan_steps`. After: the step's stack is empty, so that none of its slots can be chosen to leave; moves.slots is -1 where a row
    must arrive, and of each arrival moves.slot has the place among the rows used, moves.ordinal the record: `_arrive` puts slot and ordinal
    there. Nothing branches on which rows must arrive: each is written as the next arrival, and counts as one or is overwritten.
    """
    recent, next_users, members, stacks = window.recent, window.next_users, window.lane_accesses, window.stacks
    ring = np.uint64(len(recent) - 1)
    start, front = np.uint64(window.starts[this, lane]), np.uint64(window.starts[this, 0])
    row0, arrival0 = np.uint64(fill[ROWS_USED]), np.uint64(fill[ARRIVALS])
    accesses, tables = window.accesses, window.tables
    slots, early_rows, next_users_rows = moves.slots, moves.early, moves.next_users
    waiting, record_of, table_of_row = moves.slot, moves.ordinal, moves.table
    for k in range(np.uint64(used)):
        slots[row0 + np.uint64(k)] = -1
    # The rows in slots that this step uses are exactly those in its stack: taken out, they cannot leave.
    for k in range(np.uint64(parts.stack_sizes[lane, this])):
        entry = stacks[(start + np.uint64(k)) & ring]
        slots[row0 + np.uint64(entry >> HIGH)] = np.int32(entry & LOW)
    parts.stack_sizes[lane, this] = 0
    missing = np.uint64(0)
    for k in range(np.uint64(used)):
        i = np.uint64(k)
        c = (front + np.uint64(members[(start + i) & ring])) & ring
        early_rows[row0 + i] = recent[c] ^ np.uint8(1)
        next_users_rows[row0 + i] = next_users[c]
        waiting[arrival0 + missing] = np.int32(i)
        record_of[arrival0 + missing] = accesses[c, RECORD]
        table_of_row[arrival0 + missing] = tables[c]
        missing += np.uint64(slots[row0 + i] < 0)
    return int(missing)


@nb.njit(nogil=True, cache=True)
def _arrive(
    rows: Rows, lane: int, step: int, waiting: int, window: Window, parts: Partitions, fill: np.ndarray, moves: Moves
) -> int:
    """Give a slot to every row that `_slots_held` found without: an unused one, or that of the row whose next use is furthest.

    Before: as `_slots_held` leaves it. After: the rows that left have in their records the boundary and the tag of their write-back; the rows that
    arrived have their slots, and the arrivals are whole. The slots are in no stack and no queue yet. Returns residencies ended | initial
    arrivals << 32, or -1 where all slots are needed.
    """
    records, keys, bases, direct = rows.records, rows.keys, rows.bases, rows.direct
    base, size = np.uint64(parts.firsts[lane]), parts.firsts[lane + 1] - parts.firsts[lane]
    held, tags, stored = parts.record, parts.tag, parts.stored
    row0, end0, arrival0 = np.uint64(fill[ROWS_USED]), np.uint64(fill[ENDS]), np.uint64(fill[ARRIVALS])
    ahead = np.uint64(AHEAD)
    unused = parts.scalars[lane, USED]
    into_unused = np.uint64(min(size - unused, waiting))
    ends = np.uint64(waiting) - into_unused
    if not _choose(lane, step, ends, end0, window, parts, moves):
        return -1
    for n in range(ends):
        e = end0 + np.uint64(n)
        near = np.uint64(moves.ends[min(e + ahead, end0 + ends - np.uint64(1))])
        prefetch(records, held[base + near] * FIELDS)
        slot = np.uint64(moves.ends[e])
        left = np.uint64(held[base + slot])
        records[left, PLACE] = np.int32(-(step + 2))
        records[left, TAG] = tags[base + slot]
    initial = 0
    last = arrival0 + np.uint64(waiting) - np.uint64(1)
    for n in range(np.uint64(waiting)):
        k = np.uint64(n)
        a = arrival0 + k
        prefetch(records, moves.ordinal[min(a + ahead, last)] * FIELDS)
        slot = np.uint64(unused) + k if k < into_unused else np.uint64(moves.ends[end0 + k - into_unused])
        i = np.uint64(moves.slot[a])
        record = moves.ordinal[a]
        r = np.uint64(record)
        tag, table = records[r, TAG], moves.table[a]
        after = np.int32(-1) if tag == 0 else np.int32(-records[r, PLACE] - 2)
        moves.slot[a] = np.int32(slot)
        moves.ordinal[a] = records[r, ORDINAL] - 1
        moves.id[a] = keys[r - np.uint64(direct), 1] if record >= direct else record - bases[np.uint64(table)]
        moves.tag[a] = tag
        moves.after[a] = after
        if tag == 0:
            initial += 1
            parts.ordinals[lane, table] += 1
        held[base + slot] = record
        stored[base + slot] = tag
        records[r, PLACE] = np.int32(slot)
        records[r, TAG] = np.int32(step + 1)  # what it is while the row has the slot, the slot says
        # A row that left at the boundary before the previous step is written back only once that step's gradients are in.
        if tag != 0 and after == step - 1:
            moves.early[row0 + i] = 0
        moves.slots[row0 + i] = np.int32(slot)
    parts.scalars[lane, USED] = unused + np.int64(into_unused)
    return int(np.int64(ends) | np.int64(initial) << HIGH)


@nb.njit(nogil=True, cache=True)
def _choose(lane: int, step: int, wanted: np.uint64, end0: np.uint64, window: Window, parts: Partitions, moves: Moves) -> bool:
    """Take so many slots from the rows whose next use is furthest, into moves.ends from end0 on; False where that many do not exist.

    Belady's choice: rows with no use known first, those that wait longest before others, then the rows of the furthest step, and so on down to
    the step after this one; a step's own stack is empty by then. Before: no step after FURTHEST has a slot in its stack, and queue places before
    OLDEST hold nothing. After: likewise, and the slots taken are in no stack and no queue.
    """
    stacks, stack_sizes, held, tags, queue = window.stacks, parts.stack_sizes, parts.record, parts.tag, parts.queue
    ring, steps = np.uint64(len(stacks) - 1), len(window.starts) - 1
    base = np.uint64(parts.firsts[lane])
    waiting = base + base
    oldest, end, far = parts.scalars[lane, OLDEST], parts.scalars[lane, END], parts.scalars[lane, FURTHEST]
    taken = np.uint64(0)
    while taken < wanted and oldest < end:
        slot = queue[waiting + np.uint64(oldest)]
        oldest += 1
        if slot >= 0:
            prefetch(held, np.int64(base) + slot)
            prefetch(tags, np.int64(base) + slot)
            moves.ends[end0 + taken] = slot
            taken += np.uint64(1)
    while taken < wanted:
        while far > step and stack_sizes[lane, far & steps] == 0:
            far -= 1
        if far <= step:
            return False
        bottom, height = np.uint64(window.starts[far & steps, lane]), np.uint64(stack_sizes[lane, far & steps])
        some = min(height, wanted - taken)
        for k in range(some):
            slot = np.int32(stacks[(bottom + height - np.uint64(1) - np.uint64(k)) & ring] & LOW)
            prefetch(held, np.int64(base) + slot)
            prefetch(tags, np.int64(base) + slot)
            moves.ends[end0 + taken + np.uint64(k)] = slot
        taken += some
        stack_sizes[lane, far & steps] = np.int32(height - some)
    parts.scalars[lane, OLDEST], parts.scalars[lane, FURTHEST] = oldest, far
    return True


@nb.njit(nogil=True, cache=True)
def _wait_for_next(lane: int, step: int, used: int, window: Window, parts: Partitions, slots: np.ndarray) -> None:
    """Put the slots of a step's rows, int32 [used], on the stacks of their next use, or at the end of those with none known.

    Before: every row of the step has a slot, which is in no stack and no queue. After: each is in one, with the place among that step's accesses
    for which it waits; a stack has room for it, since a step has a place there for each of its accesses.
    """
    accesses, members, stacks, starts = window.accesses, window.lane_accesses, window.stacks, window.starts
    ring, steps = np.uint64(len(stacks) - 1), np.uint64(len(starts) - 1)
    start, front = np.uint64(starts[np.uint64(step) & steps, lane]), np.uint64(starts[np.uint64(step) & steps, 0])
    base, v = np.uint64(parts.firsts[lane]), np.uint64(lane)
    tags, stack_sizes, queue, place_of = parts.tag, parts.stack_sizes, parts.queue, parts.place
    waiting, room = base + base, 2 * (parts.firsts[lane + 1] - parts.firsts[lane])
    furthest, end = parts.scalars[lane, FURTHEST], parts.scalars[lane, END]
    for k in range(np.uint64(used)):
        i = np.uint64(k)
        slot = slots[i]
        tags[base + np.uint64(slot)] = np.int32(step + 1)
        access = accesses[(front + np.uint64(members[(start + i) & ring])) & ring, NEXT]
        if access >= 0:
            following = access >> HIGH
            far = np.uint64(following) & steps
            height = stack_sizes[v, far]
            stacks[(np.uint64(starts[far, v]) + np.uint64(height)) & ring] = np.int64(slot) | (access & LOW) << HIGH
            stack_sizes[v, far] = height + np.int32(1)
            furthest = max(furthest, following)
        else:
            if end == room:
                parts.scalars[v, END] = end
                _close_ranks(parts, lane)
                end = parts.scalars[v, END]
            queue[waiting + np.uint64(end)] = slot
            place_of[base + np.uint64(slot)] = end
            end += 1
    parts.scalars[lane, END] = end
    parts.scalars[lane, FURTHEST] = furthest


@nb.njit(nogil=True, cache=True)
def plan_evaluation(
    rows: Rows, lane_accesses: np.ndarray, s: Scratch, first_slot: int, fill: np.ndarray, moves: Moves, counts: np.ndarray
) -> None:
    """One lane's part of an evaluation step: rows in slots are read there, others arrive in evaluation slots from `first_slot` on.

    lane_accesses int32 [rows]: the lane's distinct rows in s. Fills moves and counts int64 [4] as `plan_steps` does; changes nothing else.
    """
    arrivals = fill[ARRIVALS]
    for i in range(lane_accesses.size):
        d = lane_accesses[i]
        record = s.record[d]
        row = fill[ROWS_USED] + i
        moves.early[row] = 0
        moves.next_users[row] = 0
        if record >= 0 and rows.records[record, PLACE] >= 0:
            moves.slots[row] = rows.records[record, PLACE]
        else:
            slot = first_slot + arrivals - fill[ARRIVALS]
            moves.slots[row] = slot
            moves.slot[arrivals] = slot
            moves.table[arrivals] = s.table[d]
            moves.id[arrivals] = s.id[d]
            moves.ordinal[arrivals] = rows.records[record, ORDINAL] - 1 if record >= 0 else -1
            moves.tag[arrivals] = rows.records[record, TAG] if record >= 0 else 0
            moves.after[arrivals] = -rows.records[record, PLACE] - 2 if record >= 0 else -1
            counts[INITIAL] += moves.tag[arrivals] == 0
            arrivals += 1
    counts[ROWS_USED], counts[ENDS], counts[ARRIVALS] = lane_accesses.size, 0, arrivals - fill[ARRIVALS]
    fill[ROWS_USED] += lane_accesses.size
    fill[ARRIVALS] = arrivals
