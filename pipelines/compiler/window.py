"""The window of accesses between the serial pass and the oracle: the next use of an access is known once the row's next access is in it.

One lane's, in a ring that grows to what the settings allow: access number n stands at place n modulo the ring's size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.prefetch import prefetch
from foreload.pipelines.compiler.oracle import FURTHEST, NEVER, SLOT, Accesses, Lane, leave_queue, push
from foreload.pipelines.compiler.row_table import AHEAD


class Window(NamedTuple):
    """A lane's accesses that the oracle has not planned yet: TAIL .. FRONT - 1."""

    bounds: np.ndarray  # int64 [2]: the number of the oldest access kept, and of the next one to come
    accesses: Accesses
    lasts: np.ndarray  # int64 [rows]: by number: the row's last access, -1 none


TAIL, FRONT = range(2)  # places in Window.bounds


def empty_window(ring: int, mask: np.dtype) -> Window:
    """Room for `ring` accesses, a power of two; mask: an unsigned type with a bit for every lane."""
    accesses = Accesses(np.full(ring, -1, np.int32), np.full(ring, NEVER, np.int32), np.full(ring, 0, mask), np.uint64(ring - 1))
    return Window(np.zeros(2, np.int64), accesses, np.zeros(0, np.int64))


def with_room(window: Window, more: int) -> Window:
    """The same window with room for so many accesses more."""
    need = int(window.bounds[FRONT] - window.bounds[TAIL]) + more
    if need <= len(window.accesses.numbers):
        return window
    wider = empty_window(1 << (need - 1).bit_length(), window.accesses.next_users.dtype)
    kept = np.arange(window.bounds[TAIL], window.bounds[FRONT])
    old, new = kept & int(window.accesses.ring), kept & int(wider.accesses.ring)
    for source, grown in zip(window.accesses[:3], wider.accesses[:3], strict=True):
        grown[new] = source[old]
    return window._replace(accesses=wider.accesses)


def with_rows(window: Window, more: int) -> Window:
    """The same window for so many rows more."""
    return window._replace(lasts=np.concatenate([window.lasts, np.full(more, -1, np.int64)]))


@nb.njit(nogil=True, cache=True)
def link(lane: Lane, window: Window, step: int, previous: int, numbers: np.ndarray, users: np.ndarray) -> None:
    """Append the accesses of a training step, for which there is room, and link each row's last access to this one.

    step: counted from the schedule's first; previous: the number of the first access of the step before; numbers int32 [rows], users unsigned [rows]:
    the lane's rows used, and by whom. After: a row's last access, if kept, says when the row is used next; a row that sat in a slot with no use known
    was taken out of the queue, and its slot stands in this step's stack. So the slots of all of this step's rows get there, now or when the access
    before is planned.
    """
    tail, front = window.bounds[TAIL], window.bounds[FRONT]
    accesses, lasts, ring = window.accesses, window.lasts, window.accesses.ring
    end = np.uint64(numbers.size)
    for k in range(end):
        i = np.uint64(k)
        near = np.int64(numbers[min(i + np.uint64(AHEAD), end - np.uint64(1))])
        prefetch(lasts, near)
        prefetch(lane.rows, near * 2)
        number = np.uint64(numbers[i])
        last = lasts[number]
        if last >= tail:
            accesses.nexts[np.uint64(last) & ring] = step
            if last >= previous:
                accesses.next_users[np.uint64(last) & ring] = users[i]
        elif lane.rows[number, SLOT] >= 0:
            slot = np.uint64(lane.rows[number, SLOT])
            leave_queue(lane, slot)
            push(lane, slot, np.uint64(step))
            lane.scalars[FURTHEST] = step
        at = np.uint64(front + np.int64(i)) & ring
        accesses.numbers[at], accesses.nexts[at], accesses.next_users[at] = numbers[i], NEVER, 0
        lasts[number] = front + np.int64(i)
    window.bounds[FRONT] = front + numbers.size
