"""The oracle: which row sits in which slot, when it arrives and when it leaves, by Belady's MIN over a lookahead window.

Pure kernels over the arrays of one lane. The serial pass appends accesses to a ring (`link`), which tells every pending access its row's
next use; `plan_step` then takes one step from the ring's tail and decides. Rows of one step all sit in slots; among the others the one whose
next use is furthest leaves (Belady 1966), one with no known next use first, oldest first. Slots stand in doubly linked lists, one per step
of next use, so a decision costs O(1) and nothing is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from pipelines.numbering import Scratch
from pipelines.row_table import ACCESS, ORDINAL, PLACE, TAG, Rows, table_of

UNKNOWN = np.int32(2**31 - 1)
# Places in Lane.scalars.
FRONT, TAIL, USED, FAR, UNKNOWN_HEAD, UNKNOWN_TAIL = range(6)
SCALARS = 6


class Lane(NamedTuple):
    """One lane's state. Access numbers count up from 0; number c is at c modulo the ring's size."""

    scalars: np.ndarray  # int64 [SCALARS]
    row: np.ndarray  # int64 [ring]: record of an access
    next_step: np.ndarray  # int32 [ring]: step of the row's next use, UNKNOWN
    next_users: np.ndarray  # unsigned [ring]: the lanes of the next use, where that is the step after
    step_ends: np.ndarray  # int64 [steps ring]: access number after the last one of a step
    heads: np.ndarray  # int32 [steps ring]: first slot used next in a step, -1
    slot_row: np.ndarray  # int64 [slots]: record, -1 free
    slot_tag: np.ndarray  # int32 [slots]: 1 + step of the occupant's last use
    slot_stored: np.ndarray  # int32 [slots]: tag of the version in the store, 0 never written
    slot_next: np.ndarray  # int32 [slots]: step of next use
    before: np.ndarray  # int32 [slots]: list links
    behind: np.ndarray  # int32 [slots]


class Moves(NamedTuple):
    """What `plan_step` writes: one lane's part of a step, for room of the step's rows."""

    slots: np.ndarray  # int32 [U]
    early: np.ndarray  # uint8 [U]
    next_users: np.ndarray  # unsigned [U]
    ends: np.ndarray  # int32
    slot: np.ndarray  # int32: arrivals
    table: np.ndarray  # int16
    ordinal: np.ndarray  # int64
    id: np.ndarray  # int64
    tag: np.ndarray  # int32
    after: np.ndarray  # int32


def lane_state(slots: int, ring: int, steps: int, mask: np.dtype) -> Lane:
    """An empty partition of `slots` slots, with rings of `ring` accesses and `steps` steps (powers of two).

    mask: an unsigned type with a bit for every lane. The arrays are filled, so that what they take does not depend on the data.
    """
    scalars = np.zeros(SCALARS, np.int64)
    scalars[[UNKNOWN_HEAD, UNKNOWN_TAIL]] = -1
    return Lane(
        scalars,
        np.full(ring, -1, np.int64),
        np.full(ring, 0, np.int32),
        np.full(ring, 0, mask),
        np.zeros(steps, np.int64),
        np.full(steps, -1, np.int32),
        np.full(slots, -1, np.int64),
        np.full(slots, 0, np.int32),
        np.full(slots, 0, np.int32),
        np.full(slots, 0, np.int32),
        np.full(slots, -1, np.int32),
        np.full(slots, -1, np.int32),
    )


def with_ring(lane: Lane, ring: int) -> Lane:
    """The same lane with a larger ring of accesses."""
    numbers = np.arange(lane.scalars[TAIL], lane.scalars[FRONT])
    old, new = numbers & (lane.row.size - 1), numbers & (ring - 1)
    grown = {}
    for name, fill in (("row", -1), ("next_step", 0), ("next_users", 0)):
        source = getattr(lane, name)
        grown[name] = np.full(ring, fill, source.dtype)
        grown[name][new] = source[old]
    return lane._replace(**grown)


@nb.njit(nogil=True, cache=True)
def _push(lane: Lane, slot: int, step: int) -> None:
    lane.slot_next[slot] = step
    scalars = lane.scalars
    if step == UNKNOWN:
        tail = scalars[UNKNOWN_TAIL]
        lane.before[slot] = tail
        lane.behind[slot] = -1
        if tail >= 0:
            lane.behind[tail] = slot
        else:
            scalars[UNKNOWN_HEAD] = slot
        scalars[UNKNOWN_TAIL] = slot
        return
    place = step & (lane.heads.size - 1)
    head = lane.heads[place]
    lane.before[slot] = -1
    lane.behind[slot] = head
    if head >= 0:
        lane.before[head] = slot
    lane.heads[place] = slot
    if step > scalars[FAR]:
        scalars[FAR] = step


@nb.njit(nogil=True, cache=True)
def _remove(lane: Lane, slot: int) -> None:
    before, behind = lane.before[slot], lane.behind[slot]
    if lane.slot_next[slot] == UNKNOWN:
        if before >= 0:
            lane.behind[before] = behind
        else:
            lane.scalars[UNKNOWN_HEAD] = behind
        if behind >= 0:
            lane.before[behind] = before
        else:
            lane.scalars[UNKNOWN_TAIL] = before
        return
    if before >= 0:
        lane.behind[before] = behind
    else:
        lane.heads[lane.slot_next[slot] & (lane.heads.size - 1)] = behind
    if behind >= 0:
        lane.before[behind] = before


@nb.njit(nogil=True, cache=True)
def link(rows: Rows, owner: int, step: int, count: int, s: Scratch, lane: Lane) -> None:
    """Append the accesses of a training step to its owner lane's ring, which has room, and tell each row's last access about this one.

    step: the training step's number; count and s: its distinct rows, with lanes assigned.
    """
    ring = lane.row.size - 1
    steps = lane.step_ends.size - 1
    front, tail = lane.scalars[FRONT], lane.scalars[TAIL]
    previous = lane.step_ends[(step - 2) & steps]  # first access of the step before
    c = front
    for d in range(count):
        if s.lane[d] != owner:
            continue
        record = s.record[d]
        row = rows.records[record]
        # The record keeps the low 32 bits of the row's last access number; the ring entry there is the row's own only if it is pending.
        last = front - 1 - ((front - 1 - np.int64(row[ACCESS])) & np.int64(0xFFFFFFFF))
        if last >= tail and lane.row[last & ring] == record:
            lane.next_step[last & ring] = step
            if last >= previous:
                lane.next_users[last & ring] = s.users[d]
        elif row[TAG] != 0 and row[PLACE] >= 0 and lane.slot_row[row[PLACE]] == record:
            slot = row[PLACE]
            _remove(lane, slot)
            _push(lane, slot, step)
        row[ACCESS] = np.int32(np.uint32(c & 0xFFFFFFFF))
        lane.row[c & ring] = record
        lane.next_step[c & ring] = UNKNOWN
        lane.next_users[c & ring] = 0
        c += 1
    lane.scalars[FRONT] = c
    lane.step_ends[step & steps] = c


@nb.njit(nogil=True, cache=True)
def _free_slot(rows: Rows, lane: Lane, step: int, moves: Moves, ends: int) -> tuple[int, int]:
    """A slot for an arrival: an unused one, or that of the row whose next use is furthest. (-1, ends): every slot is needed by this step."""
    scalars = lane.scalars
    if scalars[USED] < lane.slot_row.size:
        slot = int(scalars[USED])
        scalars[USED] = slot + 1
        return slot, ends
    slot = int(scalars[UNKNOWN_HEAD])
    if slot < 0:
        steps = lane.heads.size - 1
        while scalars[FAR] > step and lane.heads[scalars[FAR] & steps] < 0:
            scalars[FAR] -= 1
        if scalars[FAR] <= step:
            return -1, ends
        slot = int(lane.heads[scalars[FAR] & steps])
    _remove(lane, slot)
    rows.records[lane.slot_row[slot], PLACE] = -(step + 2)
    moves.ends[ends] = slot
    return slot, ends + 1


@nb.njit(nogil=True, cache=True)
def plan_step(rows: Rows, step: int, lane: Lane, moves: Moves) -> tuple[int, int, int]:
    """Take a training step from the ring's tail and decide its moves.

    Returns (rows used, residencies ended, arrivals); rows used is negative where the slots do not suffice (its absolute value is what the
    step needs).
    """
    ring = lane.row.size - 1
    steps = lane.step_ends.size - 1
    first, last = lane.scalars[TAIL], lane.step_ends[step & steps]
    used = int(last - first)
    ends = 0
    arrivals = 0
    if used > lane.slot_row.size:
        return -used, ends, arrivals
    # The rows in slots that this step uses are exactly those in its list: taken out, they cannot leave.
    lane.heads[step & steps] = -1
    for i in range(used):
        record = lane.row[(first + i) & ring]
        row = rows.records[record]
        tag = row[TAG]
        early = tag == 0 or tag != step
        if tag != 0 and row[PLACE] >= 0:
            moves.slots[i] = row[PLACE]
        else:
            slot, ends = _free_slot(rows, lane, step, moves, ends)
            if slot < 0:
                return -used, ends, arrivals
            after = -1 if tag == 0 else -int(row[PLACE]) - 2
            table = table_of(rows, record)
            moves.slot[arrivals] = slot
            moves.table[arrivals] = table
            moves.ordinal[arrivals] = row[ORDINAL] - 1
            moves.id[arrivals] = rows.keys[record - rows.direct, 1] if record >= rows.direct else record - rows.bases[table]
            moves.tag[arrivals] = tag
            moves.after[arrivals] = after
            arrivals += 1
            lane.slot_row[slot] = record
            lane.slot_stored[slot] = tag
            row[PLACE] = slot
            moves.slots[i] = slot
            # A row that left at the boundary before the previous step is written back only once that step's gradients are in.
            if tag != 0 and after == step - 1:
                early = False
        moves.early[i] = early
    for i in range(used):
        c = (first + i) & ring
        slot = moves.slots[i]
        rows.records[lane.row[c], TAG] = step + 1
        lane.slot_tag[slot] = step + 1
        moves.next_users[i] = lane.next_users[c]
        _push(lane, slot, lane.next_step[c])
    lane.scalars[TAIL] = last
    return used, ends, arrivals


@nb.njit(nogil=True, cache=True)
def plan_evaluation(rows: Rows, owner: int, count: int, s: Scratch, first_slot: int, moves: Moves) -> tuple[int, int]:
    """One lane's part of an evaluation step: rows in slots are read there, others arrive in evaluation slots from `first_slot` on.

    Fills moves.slots and arrivals; changes nothing. Returns (rows used, arrivals).
    """
    used = 0
    arrivals = 0
    for d in range(count):
        if s.lane[d] != owner:
            continue
        record = s.record[d]
        moves.early[used] = 0
        moves.next_users[used] = 0
        if record >= 0 and rows.records[record, PLACE] >= 0:
            moves.slots[used] = rows.records[record, PLACE]
        else:
            moves.slots[used] = first_slot + arrivals
            moves.slot[arrivals] = first_slot + arrivals
            moves.table[arrivals] = s.table[d]
            moves.id[arrivals] = s.id[d]
            moves.ordinal[arrivals] = s.ordinal[d]
            moves.tag[arrivals] = rows.records[record, TAG] if record >= 0 else 0
            moves.after[arrivals] = -rows.records[record, PLACE] - 2 if record >= 0 else -1
            arrivals += 1
        used += 1
    return used, arrivals


@nb.njit(nogil=True, cache=True)
def occupants(
    rows: Rows, lane: Lane, table: np.ndarray, ordinal: np.ndarray, row_id: np.ndarray, tag: np.ndarray, stored: np.ndarray
) -> None:
    """Who sits in slots 0 .. USED-1: fills table int16, ordinal int64, id int64, tag int32 and stored tag int32."""
    for slot in range(lane.scalars[USED]):
        record = lane.slot_row[slot]
        table[slot] = table_of(rows, record)
        ordinal[slot] = rows.records[record, ORDINAL] - 1
        row_id[slot] = rows.keys[record - rows.direct, 1] if record >= rows.direct else record - rows.bases[table[slot]]
        tag[slot] = lane.slot_tag[slot]
        stored[slot] = lane.slot_stored[slot]
