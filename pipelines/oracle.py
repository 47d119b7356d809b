"""The oracle: which row sits in which slot, when it arrives and when it leaves, by Belady's MIN over a lookahead window.

Pure kernels over arrays. The serial pass appends the accesses of a step, lane by lane, to a ring (`link`), which tells every pending access
its row's next use; `plan_steps` then takes one lane's part of the oldest steps and decides. Rows of one step all sit in slots; among the
others the one whose next use is furthest leaves (Belady 1966), one with no known next use first, oldest first. Slots stand in stacks, one
per step of next use, so a decision costs O(1) and nothing is sorted. A stack says for which access each slot waits, so the row table is
looked at for rows that arrive or leave, and not for those that stay.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from pipelines.numbering import Scratch
from pipelines.prefetch import prefetch
from pipelines.row_table import ACCESS_MASK, AHEAD, FIELDS, ORDINAL, OWNER, PLACE, TAG, Rows, table_of

UNKNOWN = np.int64(-1)
FRONT, TAIL = range(2)  # places in Window.scalars
RECORD, NEXT = range(2)  # columns of Window.accesses
USED, FAR, UNKNOWN_HEAD, UNKNOWN_TAIL = range(4)  # columns of Partitions.scalars
BEHIND, BEFORE = range(2)  # columns of Partitions.links
_HIGH = np.int64(32)
_LOW = np.int64(0xFFFFFFFF)


class Window(NamedTuple):
    """The accesses between the serial pass and the oracle, by step and first lookup.

    Access numbers count up from 0; number c is at c modulo the ring's size. Lists of a step's accesses lane by lane lie in the same places.
    """

    scalars: np.ndarray  # int64 [2]
    accesses: (
        np.ndarray
    )  # int64 [ring, 2]: record, and its next access: step << 32 | place among its lane's of that step, or UNKNOWN
    tables: np.ndarray  # int16 [ring]
    recent: np.ndarray  # uint8 [ring]: 1: the step before changes the row
    next_users: np.ndarray  # unsigned [ring]: the lanes of the next use, where that is the step after
    mine: np.ndarray  # int32 [ring], lane by lane: the lane's accesses in a step, counted from the step's first one
    stacks: np.ndarray  # int64 [ring], lane by lane: the slots that a step uses: slot | place among the lane's accesses << 32
    starts: np.ndarray  # int64 [steps ring, V + 1]: where each lane's lists for a step begin, and where the last one ends


class Partitions(NamedTuple):
    """The slots of all lanes, those of lane v from firsts[v] on; slots are numbered within their lane."""

    scalars: np.ndarray  # int64 [V, 4]
    heights: np.ndarray  # int32 [V, steps ring]: slots in the stack of a step
    firsts: np.ndarray  # int64 [V + 1]
    record: np.ndarray  # int64 [slots]: -1 free
    tag: np.ndarray  # int32 [slots]: 1 + step of the occupant's last use
    stored: np.ndarray  # int32 [slots]: tag of the version in the store, 0 never written
    links: np.ndarray  # int32 [slots, 2]: neighbours in the list of slots with no known next use
    trained: np.ndarray  # int64 [V, tables]: ordinals that the oracle has passed


class Moves(NamedTuple):
    """What `plan_steps` writes: one lane's parts of consecutive steps, one after the other."""

    slots: np.ndarray  # int32
    early: np.ndarray  # uint8
    next_users: np.ndarray  # unsigned
    ends: np.ndarray  # int32
    slot: np.ndarray  # int32: arrivals
    table: np.ndarray  # int16
    ordinal: np.ndarray  # int64
    id: np.ndarray  # int64
    tag: np.ndarray  # int32
    after: np.ndarray  # int32


def empty_window(ring: int, steps: int, lanes: int, mask: np.dtype) -> Window:
    """Room for `ring` accesses and `steps` steps (powers of two); mask: an unsigned type with a bit for every lane.

    The arrays are filled, so that what they take does not depend on the data.
    """
    return Window(
        np.zeros(2, np.int64),
        np.full((ring, 2), -1, np.int64),
        np.full(ring, -1, np.int16),
        np.full(ring, 0, np.uint8),
        np.full(ring, 0, mask),
        np.full(ring, -1, np.int32),
        np.full(ring, -1, np.int64),
        np.zeros((steps, lanes + 1), np.int64),
    )


def empty_partitions(slots: list[int], steps: int, tables: int) -> Partitions:
    """Partitions of so many slots each, all free, for a window of `steps` steps."""
    scalars = np.zeros((len(slots), 4), np.int64)
    scalars[:, [UNKNOWN_HEAD, UNKNOWN_TAIL]] = -1
    firsts = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(slots, out=firsts[1:])
    return Partitions(
        scalars,
        np.zeros((len(slots), steps), np.int32),
        firsts,
        np.full(firsts[-1], -1, np.int64),
        np.full(firsts[-1], 0, np.int32),
        np.full(firsts[-1], 0, np.int32),
        np.full((firsts[-1], 2), -1, np.int32),
        np.zeros((len(slots), tables), np.int64),
    )


def with_ring(window: Window, ring: int) -> Window:
    """The same window with room for more accesses."""
    numbers = np.arange(window.scalars[TAIL], window.scalars[FRONT])
    old, new = numbers & (len(window.tables) - 1), numbers & (ring - 1)
    grown = {}
    for name in ("accesses", "tables", "recent", "next_users", "mine", "stacks"):
        source = getattr(window, name)
        grown[name] = np.zeros((ring, *source.shape[1:]), source.dtype)
        grown[name][new] = source[old]
    return window._replace(**grown)


def with_steps(window: Window, parts: Partitions, steps: int, first: int, last: int) -> tuple[Window, Partitions]:
    """The same with room for more steps; first .. last - 1 are kept."""
    numbers = np.arange(max(first, 0), last)
    old, new = numbers & (len(window.starts) - 1), numbers & (steps - 1)
    starts = np.zeros((steps, window.starts.shape[1]), np.int64)
    heights = np.zeros((len(parts.heights), steps), np.int32)
    starts[new] = window.starts[old]
    heights[:, new] = parts.heights[:, old]
    return window._replace(starts=starts), parts._replace(heights=heights)


@nb.njit(nogil=True, cache=True)
def _remove_unknown(scalars: np.ndarray, links: np.ndarray, slot: int) -> None:
    before, behind = links[slot, BEFORE], links[slot, BEHIND]
    if before >= 0:
        links[before, BEHIND] = behind
    else:
        scalars[UNKNOWN_HEAD] = behind
    if behind >= 0:
        links[behind, BEFORE] = before
    else:
        scalars[UNKNOWN_TAIL] = before


@nb.njit(nogil=True, cache=True)
def link(rows: Rows, step: int, count: int, owned: np.ndarray, s: Scratch, window: Window, parts: Partitions) -> None:
    """Append the accesses of a training step to the ring, which has room, and tell each row's last access about this one.

    step: the training step's number; count, owned and s: its distinct rows, settled.
    """
    accesses, tables, recent, next_users = window.accesses, window.tables, window.recent, window.next_users
    mine, stacks, starts, numbers = window.mine, window.stacks, window.starts, window.scalars
    order, record_of, table_of_row, users, state = s.order, s.record, s.table, s.users, s.state
    ring = tables.size - 1
    steps = len(starts) - 1
    front, tail = numbers[FRONT], numbers[TAIL]
    previous = starts[(step - 1) & steps, 0]  # first access of the step before
    low = np.int64(ACCESS_MASK)
    start = 0
    for lane in range(owned.size):
        starts[step & steps, lane] = front + start
        scalars = parts.scalars[lane]
        links = parts.links[parts.firsts[lane] : parts.firsts[lane + 1]]
        height = 0
        for k in range(start, start + owned[lane]):
            near = state[order[min(k + AHEAD, count - 1)], OWNER]
            prefetch(accesses, 2 * ((front - 1 - ((front - 1 - near) & low)) & ring))
            d = order[k]
            c = (front + d) & ring
            record = record_of[d]
            # The ring entry where the row's last access would be is the row's own only if that is pending.
            last = front - 1 - ((front - 1 - state[d, OWNER]) & low)
            changed = False
            if last >= tail and accesses[last & ring, RECORD] == record:
                accesses[last & ring, NEXT] = np.int64(step) << _HIGH | (k - start)
                if last >= previous:
                    next_users[last & ring] = users[d]
                    changed = True
            else:
                tag = state[d, TAG]
                changed = tag == step and tag != 0  # by the last step of the schedule that this one continues
                if tag != 0 and state[d, PLACE] >= 0:
                    slot = state[d, PLACE]
                    _remove_unknown(scalars, links, slot)
                    stacks[(front + start + height) & ring] = np.int64(slot) | (k - start) << _HIGH
                    height += 1
            accesses[c, RECORD] = record
            accesses[c, NEXT] = UNKNOWN
            tables[c] = table_of_row[d]
            recent[c] = changed
            next_users[c] = 0
            mine[(front + k) & ring] = d
        parts.heights[lane, step & steps] = height
        scalars[FAR] = step if height else scalars[FAR]
        start += owned[lane]
    starts[step & steps, owned.size] = front + start
    numbers[FRONT] = front + start


@nb.njit(nogil=True, cache=True)
def plan_steps(
    rows: Rows, lane: int, first: int, window: Window, parts: Partitions, fill: np.ndarray, moves: Moves, counts: np.ndarray
) -> int:
    """Decide one lane's moves in consecutive training steps from the ring's tail on.

    first: the first step's number; fill int64 [3]: entries of `moves` that are taken by rows used, ends and arrivals, advanced; moves have
    room for as many more of each as the lane has accesses in these steps; counts int64 [steps, 4]: filled with each step's rows used,
    residencies ended, arrivals, and initial ones. Returns 0, or the rows that a step needs where the slots do not suffice.
    """
    records, keys, bases, direct = rows.records, rows.keys, rows.bases, rows.direct
    accesses, tables, recent, next_users = window.accesses, window.tables, window.recent, window.next_users
    members, stacks, starts = window.mine, window.stacks, window.starts
    slots, early_rows, next_users_rows, end_slots = moves.slots, moves.early, moves.next_users, moves.ends
    slot_in, table_in, ordinal_in = moves.slot, moves.table, moves.ordinal
    id_in, tag_in, after_in = moves.id, moves.tag, moves.after
    ring = tables.size - 1
    steps = len(starts) - 1
    base = parts.firsts[lane]
    size = parts.firsts[lane + 1] - base
    scalars, heights, trained = parts.scalars[lane], parts.heights[lane], parts.trained[lane]
    held, tags = parts.record[base : base + size], parts.tag[base : base + size]
    stored, links = parts.stored[base : base + size], parts.links[base : base + size]
    for k in range(len(counts)):
        step = first + k
        start, end = starts[step & steps, lane], starts[step & steps, lane + 1]
        used = end - start
        if used > size:
            return used
        row0, end0, arrival0 = fill[0], fill[1], fill[2]
        ends, arrivals, initial = end0, arrival0, 0
        front = starts[step & steps, 0]
        mine = slots[row0 : row0 + used]
        mine[:] = -1
        # The rows in slots that this step uses are exactly those in its stack: taken out, they cannot leave.
        for i in range(heights[step & steps]):
            entry = stacks[(start + i) & ring]
            mine[entry >> _HIGH] = entry & _LOW
        heights[step & steps] = 0
        for i in range(used):
            if mine[min(i + AHEAD, used - 1)] < 0:
                ahead = front + members[min(start + i + AHEAD, end - 1) & ring]
                prefetch(records, accesses[ahead & ring, RECORD] * FIELDS)
            c = (front + members[(start + i) & ring]) & ring
            early = recent[c] == 0
            if mine[i] < 0:
                # A slot: an unused one, or that of the row whose next use is furthest.
                if scalars[USED] < size:
                    slot = np.int32(scalars[USED])
                    scalars[USED] += 1
                else:
                    slot = np.int32(scalars[UNKNOWN_HEAD])
                    if slot >= 0:
                        behind = links[slot, BEHIND]
                        scalars[UNKNOWN_HEAD] = behind
                        if behind >= 0:
                            links[behind, BEFORE] = -1
                            prefetch(held, behind)
                            prefetch(tags, behind)
                        else:
                            scalars[UNKNOWN_TAIL] = -1
                    else:
                        while scalars[FAR] > step and heights[scalars[FAR] & steps] == 0:
                            scalars[FAR] -= 1
                        far = scalars[FAR] & steps
                        if scalars[FAR] <= step:
                            return used  # every slot is needed by this step
                        top = heights[far] - 1
                        heights[far] = top
                        bottom = starts[far, lane]
                        slot = np.int32(stacks[(bottom + top) & ring] & _LOW)
                        near = stacks[(bottom + max(top - 2, 0)) & ring] & _LOW
                        prefetch(held, near)
                        prefetch(tags, near)
                    left = held[slot]
                    records[left, PLACE] = -(step + 2)
                    records[left, TAG] = tags[slot]
                    end_slots[ends] = slot
                    ends += 1
                record = accesses[c, RECORD]
                tag, place = records[record, TAG], records[record, PLACE]
                table = tables[c]
                after = np.int32(-1) if tag == 0 else np.int32(-place - 2)
                slot_in[arrivals] = slot
                table_in[arrivals] = table
                ordinal_in[arrivals] = records[record, ORDINAL] - 1
                id_in[arrivals] = keys[record - direct, 1] if record >= direct else record - bases[table]
                tag_in[arrivals] = tag
                after_in[arrivals] = after
                arrivals += 1
                if tag == 0:
                    initial += 1
                    trained[table] += 1
                held[slot] = record
                stored[slot] = tag
                records[record, PLACE] = slot
                records[record, TAG] = step + 1  # what it is while the row has the slot, the slot says
                # A row that left at the boundary before the previous step is written back only once that step's gradients are in.
                if tag != 0 and after == step - 1:
                    early = False
                mine[i] = slot
            early_rows[row0 + i] = early
        for i in range(used):
            c = (front + members[(start + i) & ring]) & ring
            next_users_rows[row0 + i] = next_users[c]
            slot = mine[i]
            tags[slot] = step + 1
            access = accesses[c, NEXT]
            if access >= 0:
                following = access >> _HIGH
                far = following & steps
                stacks[(starts[far, lane] + heights[far]) & ring] = np.int64(slot) | (access & _LOW) << _HIGH
                heights[far] += 1
                scalars[FAR] = max(scalars[FAR], following)
            else:
                tail = scalars[UNKNOWN_TAIL]
                links[slot, BEFORE] = tail
                links[slot, BEHIND] = -1
                if tail >= 0:
                    links[tail, BEHIND] = slot
                else:
                    scalars[UNKNOWN_HEAD] = slot
                scalars[UNKNOWN_TAIL] = slot
        fill[0], fill[1], fill[2] = row0 + used, ends, arrivals
        counts[k, 0], counts[k, 1], counts[k, 2], counts[k, 3] = used, ends - end0, arrivals - arrival0, initial
    return 0


@nb.njit(nogil=True, cache=True)
def plan_evaluation(
    rows: Rows, mine: np.ndarray, s: Scratch, first_slot: int, fill: np.ndarray, moves: Moves, counts: np.ndarray
) -> None:
    """One lane's part of an evaluation step: rows in slots are read there, others arrive in evaluation slots from `first_slot` on.

    mine int32 [rows]: the lane's distinct rows in s. Fills moves and counts int64 [4] as `plan_steps` does; changes nothing else.
    """
    arrivals = fill[2]
    for i in range(mine.size):
        d = mine[i]
        record = s.record[d]
        row = fill[0] + i
        moves.early[row] = 0
        moves.next_users[row] = 0
        if record >= 0 and rows.records[record, PLACE] >= 0:
            moves.slots[row] = rows.records[record, PLACE]
        else:
            slot = first_slot + arrivals - fill[2]
            moves.slots[row] = slot
            moves.slot[arrivals] = slot
            moves.table[arrivals] = s.table[d]
            moves.id[arrivals] = s.id[d]
            moves.ordinal[arrivals] = rows.records[record, ORDINAL] - 1 if record >= 0 else -1
            moves.tag[arrivals] = rows.records[record, TAG] if record >= 0 else 0
            moves.after[arrivals] = -rows.records[record, PLACE] - 2 if record >= 0 else -1
            counts[3] += moves.tag[arrivals] == 0
            arrivals += 1
    counts[0], counts[1], counts[2] = mine.size, 0, arrivals - fill[2]
    fill[0] += mine.size
    fill[2] = arrivals


@nb.njit(nogil=True, cache=True)
def occupants(
    rows: Rows,
    lane: int,
    parts: Partitions,
    table: np.ndarray,
    ordinal: np.ndarray,
    row_id: np.ndarray,
    tag: np.ndarray,
    stored: np.ndarray,
) -> None:
    """Who sits in slots 0 .. USED-1 of a lane: fills table int16, ordinal int64, id int64, tag int32 and stored tag int32."""
    base = parts.firsts[lane]
    for slot in range(parts.scalars[lane, USED]):
        record = parts.record[base + slot]
        table[slot] = table_of(rows, record)
        ordinal[slot] = rows.records[record, ORDINAL] - 1
        row_id[slot] = rows.keys[record - rows.direct, 1] if record >= rows.direct else record - rows.bases[table[slot]]
        tag[slot] = parts.tag[base + slot]
        stored[slot] = parts.stored[base + slot]


@nb.njit(nogil=True, cache=True)
def end_residencies(rows: Rows, parts: Partitions) -> None:
    """Enter into the row table the tags of the rows that still sit in slots."""
    records = rows.records
    for slot in range(parts.record.size):
        if parts.record[slot] >= 0:
            records[parts.record[slot], TAG] = parts.tag[slot]
