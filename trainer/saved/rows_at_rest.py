"""The rows of a saved run, found on its store shards and read there by table and id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreload.cache.protocol.shards.reading import Expected, StoredRows, read_rows
from foreload.pipelines.schedule.kept import ordinals_after
from foreload.pipelines.schedule.row_index import RowIndex
from foreload.trainer.saved.saved_model import SavedModel, initial_rows


class StoreRowReader:
    """The rows of a saved run's tables, also those that were never trained: a RowSource. stored, last_batches: its rows on the store, and per lane
    the number of its last write-back batch.
    """

    def __init__(self, model: SavedModel, stored: StoredRows, last_batches: Sequence[int]) -> None:
        self._model, self._stored, self._last_batches = model, stored, last_batches
        schedule = model.schedule
        self._index = RowIndex(schedule)
        self._ordinals = None
        if model.step < schedule.header.end_step - 1:
            self._ordinals = ordinals_after(schedule, model.step)

    def read(self, table: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See RowSource."""
        weights = initial_rows(self._model, table, ids)
        trained = np.zeros(len(ids), bool)
        located = self._index.find(table, ids)
        reached = np.ones(len(located.places), bool)
        if self._ordinals is not None:
            reached = located.ordinal < self._ordinals[located.lane, table]
        for lane in np.unique(located.lane[reached]):
            chosen = np.flatnonzero(reached & (located.lane == lane))
            tags = np.minimum(located.tag[chosen], self._model.step + 1)
            # The last change of a row that changes after the run's step is not known, so any tag up to that is taken.
            tables = np.full(len(chosen), table, np.int16)
            expected = Expected(tables, located.ordinal[chosen], located.id[chosen], tags, int(lane), tag_at_most=True)
            read = read_rows(self._stored, expected, self._last_batches[lane]).weights
            weights[located.places[chosen]] = read[:, : weights.shape[1]]
            trained[located.places[chosen]] = True
        return weights, trained
