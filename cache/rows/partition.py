"""The cache of one lane: arrays over slots, and who sits in each slot."""

from __future__ import annotations

from dataclasses import replace

import numba as nb
import numpy as np
import torch

from foreload.cache.errors import CacheError
from foreload.cache.rows.staging import (
    EndedRows,
    Rows,
    Staged,
    copies_of_rows,
    put_rows,
)
from foreload.pipelines.base.memory import HUGE_BYTES, zeros_in_huge_pages
from foreload.pipelines.base.prefetch import prefetch
from foreload.pipelines.schedule.format import Arrivals

FREE = -1
_AHEAD = 32  # slots that are asked for early


@nb.njit(nogil=True, cache=True)
def _admit(slots, bound, new, table, ordinal, row_id, tag, stored_tag):  # type: ignore[no-untyped-def]
    """Note who takes which slot; new: their (table, ordinal, id, tag). Returns the place of the first training slot that is taken, or -1."""
    for i in range(slots.size):
        if slots[i] < bound and table[slots[i]] != FREE:
            return i
    for i in range(slots.size):
        slot = slots[i]
        table[slot] = new[0][i]
        ordinal[slot] = new[1][i]
        row_id[slot] = new[2][i]
        tag[slot] = new[3][i]
        stored_tag[slot] = new[3][i]
    return -1


@nb.njit(nogil=True, cache=True)
def _leave(slots, table, ordinal, row_id, tag, stored_tag, left):  # type: ignore[no-untyped-def]
    """Note who leaves, into `left` (table, ordinal, id, tag, stored tag), and free the slots. Returns the place of the first free one, or -1."""
    for i in range(slots.size):
        if table[slots[i]] == FREE:
            return i
    for i in range(slots.size):
        slot = slots[i]
        left[0][i] = table[slot]
        left[1][i] = ordinal[slot]
        left[2][i] = row_id[slot]
        left[3][i] = tag[slot]
        left[4][i] = stored_tag[slot]
        table[slot] = FREE
    return -1


@nb.njit(nogil=True, cache=True)
def _train(slots, tag, new_tag, table, tables):  # type: ignore[no-untyped-def]
    last = slots.size - 1
    for i in range(slots.size):
        ahead = slots[min(i + _AHEAD, last)]
        prefetch(tag, ahead)
        prefetch(table, ahead)
        tag[slots[i]] = new_tag
        tables[i] = table[slots[i]]


def _zeros(count: int, width: int, device: torch.device) -> torch.Tensor:
    """float32 [count, width]; on the CPU in huge pages where the kernel has them, since rows are touched at random."""
    if device.type != "cpu" or 4 * count * width < HUGE_BYTES:
        return torch.zeros((count, width), dtype=torch.float32, device=device)
    return torch.from_numpy(zeros_in_huge_pages((count, width), np.float32))


class Partition:
    """Rows of one lane in trainer memory.

    Training slots are 0 .. slots-1, evaluation slots follow. weights: float32 [slots + evaluation_slots, width], state: float32
    [slots + evaluation_slots, state_width], on `device`; on the CPU `weights.numpy()` shares their memory. Occupants, on the CPU always:
    table int16 (-1: the slot is free), ordinal int64, id int64, tag int32 (of the row as it is here), stored_tag int32 (of the version that
    the store holds, 0: never written), all [slots + evaluation_slots].

    with_base: the *base* of each row in a training slot is kept too, its value as the store has it: base_weights float32 [slots, width],
    base_state float32 [slots, state_width], on the CPU; undefined where the stored tag is 0.
    """

    def __init__(
        self,
        slots: int,
        evaluation_slots: int,
        width: int,
        state_width: int,
        device: torch.device | str = "cpu",
        with_base: bool = False,
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
        self.weights = _zeros(count, width, self.device)
        self.state = _zeros(count, state_width, self.device)
        self.table = np.full(count, FREE, np.int16)
        self.ordinal = np.zeros(count, np.int64)
        self.id = np.zeros(count, np.int64)
        self.tag = np.zeros(count, np.int32)
        self.stored_tag = np.zeros(count, np.int32)
        cpu = torch.device("cpu")
        self.base_weights = _zeros(slots, width, cpu).numpy() if with_base else None
        self.base_state = _zeros(slots, state_width, cpu).numpy() if with_base else None

    @property
    def bytes(self) -> int:
        """Memory of all arrays together."""
        arrays = (self.table, self.ordinal, self.id, self.tag, self.stored_tag)
        base = sum(array.nbytes for array in (self.base_weights, self.base_state) if array is not None)
        return self.weights.nbytes + self.state.nbytes + base + sum(array.nbytes for array in arrays)

    def reserve_evaluation(self, count: int) -> None:
        """Have at least `count` evaluation slots; the arrays are new ones if there were fewer."""
        more = count - self.evaluation_slots
        if more <= 0:
            return
        self.evaluation_slots = count
        for name in ("weights", "state"):
            old = getattr(self, name)
            grown = _zeros(old.shape[0] + more, old.shape[1], self.device)
            grown[: old.shape[0]] = old
            setattr(self, name, grown)
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
        new = (arrivals.table, arrivals.ordinal, arrivals.id, arrivals.tag)
        taken = _admit(slots, self.slots, new, self.table, self.ordinal, self.id, self.tag, self.stored_tag)
        if taken >= 0:
            slot = slots[taken]
            raise CacheError(
                f"slot {slot}: must be free when a row arrives, but table {self.table[slot]} id {self.id[slot]} sits there: "
                "the schedule is damaged; prepare it again"
            )
        _put(self.weights, slots, staged.weights)
        _put(self.state, slots, staged.state)
        # An event's arrivals take training slots only, or evaluation slots only, whose rows are not written back.
        if self.base_weights is not None and self.base_state is not None and slots[0] < self.slots:
            put_rows(staged.weights, slots, self.base_weights)
            put_rows(staged.state, slots, self.base_state)

    def end(self, slots: np.ndarray) -> EndedRows:
        """Copy out the rows in `slots` (integers [E], distinct) for their write-back, and free the slots. Raises CacheError for a free one."""
        kinds = (np.int16, np.int64, np.int64, np.int32, np.int32)
        who = tuple(np.empty(len(slots), kind) for kind in kinds)
        left = (who[0], who[1], who[2], who[3], who[4])
        free = _leave(slots, self.table, self.ordinal, self.id, self.tag, self.stored_tag, left)
        if free >= 0:
            raise CacheError(
                f"slot {slots[free]}: a residency ends there, but it is free: the schedule is damaged; prepare it again"
            )
        rows = EndedRows(_take(self.weights, slots), _take(self.state, slots), *left)
        if self.base_weights is None or self.base_state is None:
            return rows
        return replace(
            rows,
            base_weights=copies_of_rows(self.base_weights, slots),
            base_state=copies_of_rows(self.base_state, slots),
        )

    def mark_trained(self, slots: np.ndarray, step: int) -> np.ndarray:
        """Note that training step `step` changes the rows in `slots`: their tag is step + 1. Returns their tables, int16."""
        tables = np.empty(len(slots), np.int16)
        _train(slots, self.tag, step + 1, self.table, tables)
        return tables

    def occupied(self) -> np.ndarray:
        """The training slots that hold a row, ascending: int32."""
        return np.flatnonzero(self.table[: self.slots] != FREE).astype(np.int32)


def _take(source: torch.Tensor, slots: np.ndarray) -> np.ndarray:
    if source.device.type == "cpu":
        return copies_of_rows(source.numpy(), slots)
    return source.index_select(0, _index(slots, source.device)).cpu().numpy()


def _put(target: torch.Tensor, slots: np.ndarray, rows: np.ndarray) -> None:
    if target.device.type == "cpu":
        put_rows(rows, slots, target.numpy())
    else:
        target.index_copy_(0, _index(slots, target.device), torch.from_numpy(rows).to(target.device))


def _index(slots: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64)).to(device)
