"""Finding rows in a schedule's row table by table and id, without going through all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.pipelines.schedule.reader import Schedule


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of one table that the row table has, k of those that were asked for: places int64 (among the ids asked for), lane uint8, ordinal int64,
    id int64, tag int32, all [k]."""

    places: np.ndarray
    lane: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray


class RowIndex:
    """A complete schedule's row table, mapped and checked once. Raises ScheduleError where it is damaged."""

    def __init__(self, schedule: Schedule) -> None:
        no_bound = 1 << 62  # so that each batch of the file comes whole, as views on it
        self._batches = list(schedule.rows(no_bound))

    def find(self, table: int, ids: np.ndarray) -> FoundRows:
        """Those of the rows with these ids (int64 [n], in any order) that were ever trained."""
        parts = [self._in_batch(batch, table, ids) for batch in self._batches]
        columns = [np.concatenate([part[k] for part in parts]) if parts else np.empty(0, np.int64) for k in range(5)]
        return FoundRows(*columns)

    @staticmethod
    def _in_batch(batch: dict[str, np.ndarray], table: int, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        # Rows stand by (table, id): those of a table are a range, in which ids ascend.
        first, last = np.searchsorted(batch["table"], (table, table + 1))
        table_ids = batch["id"][first:last]
        nearest = np.searchsorted(table_ids, ids)  # where each id stands, if it does
        places = np.flatnonzero(nearest < len(table_ids))
        places = places[table_ids[nearest[places]] == ids[places]]
        rows = first + nearest[places]
        return places, *(batch[name][rows] for name in ("lane", "ordinal", "id", "tag"))
