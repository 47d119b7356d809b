"""Finding rows in a schedule's row table by table and id, without going through all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.pipelines.schedule.reader import Schedule


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of one table that the row table has: places int64 [k] among those that were asked for, lane uint8, ordinal int64, id int64, tag int32."""

    places: np.ndarray
    lane: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray


class RowIndex:
    """A complete schedule's row table, mapped and checked once. Raises ScheduleError where it is damaged."""

    def __init__(self, schedule: Schedule) -> None:
        whole = 1 << 62  # a batch of the file at a time: views on it
        self._batches = list(schedule.rows(whole))

    def find(self, table: int, ids: np.ndarray) -> FoundRows:
        """Those of the rows with these ids (int64 [n], in any order) that were ever trained."""
        parts = [self._in_batch(batch, table, ids) for batch in self._batches]
        columns = [np.concatenate([part[k] for part in parts]) if parts else np.empty(0, np.int64) for k in range(5)]
        return FoundRows(*columns)

    @staticmethod
    def _in_batch(batch: dict[str, np.ndarray], table: int, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        # Rows stand by (table, id): those of a table are a range, in which ids ascend.
        first, last = np.searchsorted(batch["table"], (table, table + 1))
        known = batch["id"][first:last]
        at = np.searchsorted(known, ids)
        places = np.flatnonzero(at < len(known))
        places = places[known[at[places]] == ids[places]]
        rows = first + at[places]
        return places, *(batch[name][rows] for name in ("lane", "ordinal", "id", "tag"))
