"""Copies of the rows in a partition's slots, in memory that is reused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from foreload.base.memory import zeros_in_huge_pages
from foreload.cache.rows.partition import FREE, Partition
from foreload.pipelines.schedule.format import Occupants, RowColumns


@dataclass(frozen=True, slots=True)
class SlotRows(RowColumns):
    """The rows in slots 0 .. n-1 of a partition; table -1 for a free slot.

    Attributes:
        weights: float32 [n, Wmax].
        state: float32 [n, Smax].
    """

    weights: np.ndarray
    state: np.ndarray


class SlotCopy:
    """Memory for a copy of the training slots of a partition, or of one like it.

    Allocating new memory for each copy would cost several times what the copy does.
    """

    def __init__(self, partition: Partition) -> None:
        slots = partition.slots
        self._columns = Occupants.zeros(slots)
        self._weights, self._state = (
            zeros_in_huge_pages((slots, values.shape[1]), np.float32) for values in (partition.weights, partition.state)
        )
        for array in (*self._columns.columns(), self._weights, self._state):
            # Writing makes the kernel allocate the pages now, while other threads run.
            array[...] = 0

    def of(self, partition: Partition) -> SlotRows:
        """Return a copy of the partition's slots up to the last occupied one.

        The copy is in this object's memory, so the next copy overwrites it.
        """
        taken = np.flatnonzero(partition.occupants.table[: partition.slots] != FREE)
        count = int(taken[-1]) + 1 if len(taken) else 0
        rows = SlotRows(*self._columns.columns(slice(count)), self._weights[:count], self._state[:count])
        for column, values in zip(rows.columns(), partition.occupants.columns(slice(count)), strict=True):
            column[:] = values
        torch.from_numpy(rows.weights).copy_(partition.weights[:count])
        torch.from_numpy(rows.state).copy_(partition.state[:count])
        return rows
