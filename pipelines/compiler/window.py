"""What the oracle's kernels work on: the window of accesses still to be planned, the lanes' slots, and the moves decided.

Arrays only, in named tuples, as numba takes them; `oracle` has the kernels. At all times, between two of them:

- Access number c stands at place c modulo the ring's size; the ring has accesses TAIL .. FRONT - 1, step after step, within a step by first
  lookup. A step's accesses of one lane are also listed by lane (`lane_accesses`), and as many places stand ready for its stack (`stacks`).
- An access knows its row's next one, or that none is in the ring.
- A slot that a row has stands once: in the stack of the step of its row's next use, or, where none is known, in its lane's queue.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from foreload.pipelines.compiler.row_table import ORDINAL, TAG, Rows, table_of

UNKNOWN = np.int64(-1)
FRONT, TAIL = range(2)  # places in Window.scalars
RECORD, NEXT = range(2)  # columns of Window.accesses
USED, FURTHEST, OLDEST, END = range(4)  # columns of Partitions.scalars
ROWS_USED, ENDS, ARRIVALS, INITIAL = range(4)  # columns of a step's counts; the first three are places in `fill`, too
HIGH = np.int64(32)
"""Two numbers are packed into one int64, as first << HIGH | second ..."""
LOW = np.int64(0xFFFFFFFF)
"""... of which this has the second."""


class Window(NamedTuple):
    """The accesses between the serial pass and the oracle, by step and first lookup.

    Access numbers count up from 0; number c is at c modulo the ring's size. Lists of a step's accesses lane by lane lie in the same places.
    """

    scalars: np.ndarray  # int64 [2]: the number of the next access to come, and of the oldest one kept
    # int64 [ring, 2]: record, and the row's next access: step << 32 | place among its lane's accesses of that step, or UNKNOWN
    accesses: np.ndarray
    tables: np.ndarray  # int16 [ring]
    recent: np.ndarray  # uint8 [ring]: 1: the step before changes the row
    next_users: np.ndarray  # unsigned [ring]: the lanes of the next use, where that is the step after
    lane_accesses: np.ndarray  # int32 [ring], lane by lane: the lane's accesses in a step, counted from the step's first one
    stacks: np.ndarray  # int64 [ring], lane by lane: the slots that a step uses: slot | place among the lane's accesses << 32
    starts: np.ndarray  # int64 [steps ring, V + 1]: where each lane's lists for a step begin, and where the last one ends


class Partitions(NamedTuple):
    """The slots of all lanes, those of lane v from firsts[v] on; slots are numbered within their lane."""

    scalars: np.ndarray  # int64 [V, 4]: slots taken, furthest step with a slot in its stack, first and end place of the queue
    stack_sizes: np.ndarray  # int32 [V, steps ring]: slots in the stack of a step
    firsts: np.ndarray  # int64 [V + 1]
    record: np.ndarray  # int64 [slots]: -1 free
    tag: np.ndarray  # int32 [slots]: 1 + step of the occupant's last use
    stored: np.ndarray  # int32 [slots]: tag of the version in the store, 0 never written
    # int32 [2 x slots]: slots with no known next use, oldest first, those of lane v from 2 x firsts[v] on; -1 where one was called to a stack
    queue: np.ndarray
    place: np.ndarray  # int32 [slots]: the place in its lane's queue of a slot that is in it
    ordinals: np.ndarray  # int64 [V, tables]: ordinals that the oracle has passed


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
    firsts = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(slots, out=firsts[1:])
    return Partitions(
        scalars,
        np.zeros((len(slots), steps), np.int32),
        firsts,
        np.full(firsts[-1], -1, np.int64),
        np.full(firsts[-1], 0, np.int32),
        np.full(firsts[-1], 0, np.int32),
        np.full(2 * firsts[-1], -1, np.int32),
        np.full(firsts[-1], -1, np.int32),
        np.zeros((len(slots), tables), np.int64),
    )


def with_ring(window: Window, ring: int) -> Window:
    """The same window with room for more accesses."""
    numbers = np.arange(window.scalars[TAIL], window.scalars[FRONT])
    old, new = numbers & (len(window.tables) - 1), numbers & (ring - 1)
    grown = {}
    for name in ("accesses", "tables", "recent", "next_users", "lane_accesses", "stacks"):
        source = getattr(window, name)
        grown[name] = np.zeros((ring, *source.shape[1:]), source.dtype)
        grown[name][new] = source[old]
    return window._replace(**grown)


def with_steps(window: Window, parts: Partitions, steps: int, first: int, last: int) -> tuple[Window, Partitions]:
    """The same with room for more steps; first .. last - 1 are kept."""
    numbers = np.arange(max(first, 0), last)
    old, new = numbers & (len(window.starts) - 1), numbers & (steps - 1)
    starts = np.zeros((steps, window.starts.shape[1]), np.int64)
    stack_sizes = np.zeros((len(parts.stack_sizes), steps), np.int32)
    starts[new] = window.starts[old]
    stack_sizes[:, new] = parts.stack_sizes[:, old]
    return window._replace(starts=starts), parts._replace(stack_sizes=stack_sizes)


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
