"""The cache of one lane: arrays over slots, and who sits in each slot."""

from __future__ import annotations

import numpy as np
import torch

from cache.errors import CacheError
from cache.staging import EndedRows, Rows, Staged, put_rows, take_rows
from pipelines.schedule_format import Arrivals

FREE = -1


class Partition:
    """Rows of one lane in trainer memory.

    Training slots are 0 .. slots-1, evaluation slots follow. weights: float32 [slots + evaluation_slots, width], state: float32
    [slots + evaluation_slots, state_width], on `device`; on the CPU `weights.numpy()` shares their memory. Occupants, on the CPU always:
    table int16 (-1: the slot is free), ordinal int64, id int64, tag int32 (of the row as it is here), stored_tag int32 (of the version that
    the store holds, 0: never written), all [slots + evaluation_slots].
    """

    def __init__(
        self, slots: int, evaluation_slots: int, width: int, state_width: int, device: torch.device | str = "cpu"
    ) -> None:
        if slots < 1 or evaluation_slots < 0 or width < 1 or state_width < 0:
            raise CacheError(
                "partition: slots and width must be at least 1, evaluation slots and state width at least 0; "
                f"got {slots}, {width}, {evaluation_slots}, {state_width}"
            )
        self.slots = slots
        self.evaluation_slots = evaluation_slots
        self.device = torch.device(device)
        count = slots + evaluation_slots
        self.weights = torch.zeros((count, width), dtype=torch.float32, device=self.device)
        self.state = torch.zeros((count, state_width), dtype=torch.float32, device=self.device)
        self.table = np.full(count, FREE, np.int16)
        self.ordinal = np.zeros(count, np.int64)
        self.id = np.zeros(count, np.int64)
        self.tag = np.zeros(count, np.int32)
        self.stored_tag = np.zeros(count, np.int32)

    @property
    def bytes(self) -> int:
        """Memory of all arrays together."""
        arrays = (self.table, self.ordinal, self.id, self.tag, self.stored_tag)
        return self.weights.nbytes + self.state.nbytes + sum(array.nbytes for array in arrays)

    def reserve_evaluation(self, count: int) -> None:
        """Have at least `count` evaluation slots; the arrays are new ones if there were fewer."""
        more = count - self.evaluation_slots
        if more <= 0:
            return
        self.evaluation_slots = count
        self.weights = torch.cat([self.weights, self.weights.new_zeros((more, self.weights.shape[1]))])
        self.state = torch.cat([self.state, self.state.new_zeros((more, self.state.shape[1]))])
        self.table = np.concatenate([self.table, np.full(more, FREE, np.int16)])
        for name in ("ordinal", "id", "tag", "stored_tag"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, array.dtype)]))

    def admit(self, arrivals: Arrivals, staged: Staged | Rows) -> None:
        """Move arrived rows (or, on a resume, the rows of an entry state) into their slots.

        staged: weights float32 [A, width], state float32 [A, state_width], in the order of the arrivals. A training slot must be free; an
        evaluation slot is taken over. Raises CacheError.
        """
        slots = arrivals.slot
        if not len(slots):
            return
        taken = slots[(slots < self.slots) & (self.table[slots] != FREE)]
        if len(taken):
            raise CacheError(
                f"slot {taken[0]}: must be free when a row arrives, but table {self.table[taken[0]]} id {self.id[taken[0]]} sits there: "
                "the schedule is damaged; prepare it again"
            )
        _put(self.weights, slots, staged.weights)
        _put(self.state, slots, staged.state)
        self.table[slots] = arrivals.table
        self.ordinal[slots] = arrivals.ordinal
        self.id[slots] = arrivals.id
        self.tag[slots] = arrivals.tag
        self.stored_tag[slots] = arrivals.tag

    def end(self, slots: np.ndarray) -> EndedRows:
        """Copy out the rows in `slots` (integers [E], distinct) for their write-back, and free the slots. Raises CacheError for a free one."""
        free = slots[self.table[slots] == FREE]
        if len(free):
            raise CacheError(f"slot {free[0]}: a residency ends there, but it is free: the schedule is damaged; prepare it again")
        ended = EndedRows(
            _take(self.weights, slots), _take(self.state, slots), self.table[slots], self.ordinal[slots], self.id[slots],
            self.tag[slots], self.stored_tag[slots],
        )  # fmt: skip
        self.table[slots] = FREE
        return ended

    def mark_trained(self, slots: np.ndarray, step: int) -> None:
        """Note that training step `step` changed the rows in `slots`: their tag is step + 1."""
        self.tag[slots] = step + 1

    def occupied(self) -> np.ndarray:
        """The training slots that hold a row, ascending: int32."""
        return np.flatnonzero(self.table[: self.slots] != FREE).astype(np.int32)


def _take(source: torch.Tensor, slots: np.ndarray) -> np.ndarray:
    if source.device.type == "cpu":
        return take_rows(source.numpy(), slots)
    return source.index_select(0, _index(slots, source.device)).cpu().numpy()


def _put(target: torch.Tensor, slots: np.ndarray, rows: np.ndarray) -> None:
    if target.device.type == "cpu":
        put_rows(rows, slots, target.numpy())
    else:
        target.index_copy_(0, _index(slots, target.device), torch.from_numpy(rows).to(target.device))


def _index(slots: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64)).to(device)
