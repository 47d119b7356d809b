"""Which rows an event of a schedule uses: who sits in each slot, brought along event by event."""

from __future__ import annotations

import numpy as np

from foreload.pipelines.schedule.format import Event, LaneEvent
from foreload.pipelines.schedule.reader import Schedule

ROW = np.dtype([("table", np.int16), ("id", np.int64)])


def empty_slots(schedule: Schedule) -> list[np.ndarray]:
    """Of each lane of a complete schedule its slots, ROW [slots and evaluation slots], as it begins: nobody's."""
    further = schedule.manifest["evaluation_slots"]
    return [np.zeros(slots + more, ROW) for slots, more in zip(schedule.slots, further, strict=True)]


def rows_used(
    schedule: Schedule, event: Event, occupants: list[np.ndarray]
) -> tuple[tuple[LaneEvent, ...], tuple[np.ndarray, ...]]:
    """The lanes' parts of an event, and per lane the row in each slot of its list, ROW [U].

    occupants: as it is before the event; made what it is then.
    """
    lanes = tuple(schedule.lane(event, lane) for lane in range(schedule.header.lanes))
    for moves, rows in zip(lanes, occupants, strict=True):
        rows["table"][moves.arrivals.slot] = moves.arrivals.table
        rows["id"][moves.arrivals.slot] = moves.arrivals.id
    return lanes, tuple(rows[moves.slots] for moves, rows in zip(lanes, occupants, strict=True))


def local_rows(lanes: tuple[LaneEvent, ...], rows: tuple[np.ndarray, ...], lane: int) -> np.ndarray:
    """A lane's local rows in an event (docs/schedule.md): what its `index` points into. lanes, rows: as `rows_used` gives them, or anything else of
    each row in place of ROW.
    """
    bit = np.uint64(lane)
    return np.concatenate([owned[(owner.users >> bit) & np.uint64(1) == 1] for owned, owner in zip(rows, lanes, strict=True)])
