"""The cache of one lane: arrays over slots, and the occupant of each slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from foreload.base.compiled import nb
from foreload.base.intrinsics import prefetch
from foreload.base.memory import HUGE_BYTES, zeros_in_huge_pages
from foreload.cache.errors import CacheError
from foreload.cache.rows.device_copies import download, put_distinct, upload
from foreload.cache.rows.staging import (
    EndedRows,
    Rows,
    Staged,
    copies_of_rows,
    put_rows,
)
from foreload.pipelines.schedule.format import Arrivals, Occupants

FREE = -1
_AHEAD = 32  # how many slots ahead memory is prefetched


@nb.njit(nogil=True, cache=True)
def _admit(slots, bound, new, here, stored_tag):  # type: ignore[no-untyped-def]
    """Record the new occupants of slots.

    Args:
        slots: [n].
        bound: the number of training slots; a row may not arrive in an occupied one.
        new: the arrivals' columns (table, ordinal, id, tag), [n] each.
        here: the occupants' columns, over all slots.

    Returns:
        -1, or, if a training slot is occupied, its index in `slots`. Then nothing is changed.
    """
    for i in range(slots.size):
        # All slots are checked before any is changed, so that an error leaves the partition as it
        # was.
        if slots[i] < bound and here[0][slots[i]] != FREE:
            return i
    for i in range(slots.size):
        slot = slots[i]
        here[0][slot] = new[0][i]
        here[1][slot] = new[1][i]
        here[2][slot] = new[2][i]
        here[3][slot] = new[3][i]
        stored_tag[slot] = new[3][i]
    return -1


@nb.njit(nogil=True, cache=True)
def _leave(slots, here, stored_tag, left, left_stored_tag):  # type: ignore[no-untyped-def]
    """Record the rows that leave, and free their slots.

    Args:
        slots: [n].
        here: the occupants' columns, over all slots.
        left: filled with the leaving rows' columns (table, ordinal, id, tag), [n] each.

    Returns:
        -1, or, if a slot is free already, its index in `slots`. Then nothing is changed.
    """
    for i in range(slots.size):
        # All slots are checked before any is changed.
        if here[0][slots[i]] == FREE:
            return i
    for i in range(slots.size):
        slot = slots[i]
        left[0][i] = here[0][slot]
        left[1][i] = here[1][slot]
        left[2][i] = here[2][slot]
        left[3][i] = here[3][slot]
        left_stored_tag[i] = stored_tag[slot]
        here[0][slot] = FREE
    return -1


@nb.njit(nogil=True, cache=True)
def _train(slots, tag, new_tag, table, tables, tags_before):  # type: ignore[no-untyped-def]
    """Set tag[slot] = new_tag, and fill in the occupants' tables.

    Args:
        slots: [n].
        tables: int16 [n], filled in.
        tags_before: int32 [n], filled with the previous tags, or [0] if these are not needed.
    """
    keeps = tags_before.size == slots.size
    last = slots.size - 1
    for i in range(slots.size):
        ahead = slots[min(i + _AHEAD, last)]
        prefetch(tag, ahead)
        prefetch(table, ahead)
        if keeps:
            tags_before[i] = tag[slots[i]]
        tag[slots[i]] = new_tag
        tables[i] = table[slots[i]]


def _zeros(count: int, width: int, device: torch.device) -> torch.Tensor:
    """Return zeros, float32 [count, width].

    On the CPU they are in huge pages if the kernel has them, because rows are accessed at random.
    """
    if device.type != "cpu" or 4 * count * width < HUGE_BYTES:
        return torch.zeros((count, width), dtype=torch.float32, device=device)
    return torch.from_numpy(zeros_in_huge_pages((count, width), np.float32))


class Partition:
    """Rows of one lane in trainer memory.

    Training slots are 0 .. slots-1, evaluation slots follow.

    Args:
        with_base: whether to keep the *base* of each row in a training slot: its value in the
            store.

    Attributes:
        weights: float32 [slots + evaluation_slots, width], on `device`. On the CPU
            `weights.numpy()` shares its memory.
        state: float32 [slots + evaluation_slots, state_width], on `device`.
        occupants: the occupant of each of these slots, always on the CPU; table -1 for a free slot.
        base_weights: float32 [slots, width], on the CPU, or None if no base is kept. Undefined if
            the stored tag is 0.
        base_state: float32 [slots, state_width], as base_weights.
        base_known: bool [slots], whether the base is known, for rows whose stored tag is not 0.
            None if all bases are known.
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
        if slots < 1 or min(evaluation_slots, width, state_width) < 0:
            raise CacheError(
                "partition: slots must be at least 1, and evaluation slots, width and state width at least 0; "
                f"got {slots}, {evaluation_slots}, {width}, {state_width}"
            )
        self.slots = slots
        self.evaluation_slots = evaluation_slots
        self.device = torch.device(device)
        count = slots + evaluation_slots
        self.weights = _zeros(count, width, self.device)
        self.state = _zeros(count, state_width, self.device)
        self.occupants = Occupants.zeros(count)
        self.occupants.table[:] = FREE
        cpu = torch.device("cpu")
        self.base_weights = _zeros(slots, width, cpu).numpy() if with_base else None
        self.base_state = _zeros(slots, state_width, cpu).numpy() if with_base else None
        self.base_known: np.ndarray | None = None

    @property
    def bytes(self) -> int:
        """The memory of all arrays."""
        arrays = (*self.occupants.columns(), self.occupants.stored_tag)
        base = sum(array.nbytes for array in (self.base_weights, self.base_state) if array is not None)
        return self.weights.nbytes + self.state.nbytes + base + sum(array.nbytes for array in arrays)

    def reserve_evaluation(self, count: int) -> None:
        """Make sure that at least `count` evaluation slots exist.

        If there were fewer, the arrays are replaced by larger ones.
        """
        more = count - self.evaluation_slots
        if more <= 0:
            return
        self.evaluation_slots = count
        for name in ("weights", "state"):
            old = getattr(self, name)
            grown = _zeros(old.shape[0] + more, old.shape[1], self.device)
            grown[: old.shape[0]] = old
            setattr(self, name, grown)
        before, grown_occupants = self.occupants, Occupants.zeros(len(self.occupants) + more)
        for old, new in zip(
            (*before.columns(), before.stored_tag), (*grown_occupants.columns(), grown_occupants.stored_tag), strict=True
        ):
            new[: len(before)] = old
        grown_occupants.table[len(before) :] = FREE
        self.occupants = grown_occupants

    def admit(self, arrivals: Arrivals, staged: Staged | Rows) -> None:
        """Move arrived rows into their slots, or, on a resume, the rows of an entry state.

        Args:
            arrivals: the rows, each with its slot. A training slot must be free; an evaluation slot
                is taken over.
            staged: weights float32 [A, width], state float32 [A, state_width], in the order of the
                arrivals.

        Raises:
            CacheError: a training slot is occupied.
        """
        slots = arrivals.slot
        if not len(slots):
            return
        self.seat(arrivals)
        self._put(slots, staged.weights, staged.state)
        # The arrivals of one event are all for training slots or all for evaluation slots. Rows in
        # evaluation slots are never written back, so they need no base.
        if self.base_weights is not None and self.base_state is not None and slots[0] < self.slots:
            self._put_base(slots, staged.weights, staged.state)

    def _put_base(self, slots: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        assert self.base_weights is not None
        assert self.base_state is not None
        put_rows(weights, slots, self.base_weights)
        put_rows(state, slots, self.base_state)
        if self.base_known is not None:
            self.base_known[slots] = True

    def keep_base(self, slots: np.ndarray, rows: EndedRows) -> None:
        """Keep bases from now on, after none were kept.

        Only the bases of `rows` are known, and those of rows that arrive later.

        Args:
            slots: the slots of `rows`.
            rows: the rows, with their bases.
        """
        width, state_width, cpu = self.weights.shape[1], self.state.shape[1], torch.device("cpu")
        self.base_weights, self.base_state = (_zeros(self.slots, columns, cpu).numpy() for columns in (width, state_width))
        self.base_known = np.zeros(self.slots, bool)
        if rows.base_weights is not None and rows.base_state is not None:
            self._put_base(slots, rows.base_weights, rows.base_state)

    def forget_base(self) -> None:
        """Stop keeping bases."""
        self.base_weights = self.base_state = self.base_known = None

    def seat(self, arrivals: Arrivals) -> None:
        """Record the new occupants, as `admit` does, and leave the slots' contents to the caller.

        Raises CacheError.
        """
        here, slots = self.occupants, arrivals.slot
        taken = _admit(slots, self.slots, arrivals.columns(), here.columns(), here.stored_tag)
        if taken >= 0:
            slot = slots[taken]
            raise CacheError(
                f"slot {slot}: must be free when a row arrives, but it holds table {here.table[slot]} id {here.id[slot]}: "
                "the schedule is damaged; prepare it again"
            )

    def rows_in(self, slots: np.ndarray) -> EndedRows:
        """Return copies of the rows in `slots`, integers [n], without base. The rows stay."""
        here = self.occupants
        return EndedRows(*here.columns(slots), here.stored_tag[slots], *self._take(slots))

    def end(self, slots: np.ndarray) -> EndedRows:
        """Copy out the rows in `slots` for their write-back, and free the slots.

        Args:
            slots: integers [E], distinct.

        Raises:
            CacheError: a slot is free.
        """
        here, left = self.occupants, Occupants.zeros(len(slots))
        free = _leave(slots, here.columns(), here.stored_tag, left.columns(), left.stored_tag)
        if free >= 0:
            raise CacheError(
                f"slot {slots[free]}: must hold a row when a residency ends, but it is free: the schedule is damaged; prepare it again"
            )
        rows = EndedRows(*left.columns(), left.stored_tag, *self._take(slots))
        if self.base_weights is None or self.base_state is None:
            return rows
        known = None if self.base_known is None else self.base_known[slots] | (left.stored_tag == 0)
        return replace(
            rows,
            base_weights=copies_of_rows(self.base_weights, slots),
            base_state=copies_of_rows(self.base_state, slots),
            base_known=None if known is None or known.all() else known,
        )

    def put_back(self, arrived: np.ndarray, slots: np.ndarray, ended: EndedRows) -> None:
        """Undo a boundary.

        Args:
            arrived: the slots that were taken, which are freed.
            slots: the slots whose residency ended, which are occupied again.
            ended: what `end` returned for `slots`.
        """
        here = self.occupants
        here.table[arrived] = FREE
        for column, values in zip(here.columns(), ended.columns(), strict=True):
            column[slots] = values
        here.stored_tag[slots] = ended.stored_tag
        self._put(slots, ended.weights, ended.state)
        if self.base_weights is not None and self.base_state is not None:
            assert ended.base_weights is not None
            assert ended.base_state is not None
            self._put_base(slots, ended.base_weights, ended.base_state)
            if self.base_known is not None:
                # `_put_base` has marked these bases as known, which may be wrong for some of them.
                self.base_known[slots] = True if ended.base_known is None else ended.base_known

    def mark_trained(self, slots: np.ndarray, step: int, before: np.ndarray | None = None) -> np.ndarray:
        """Record that training step `step` changes the rows in `slots`: their tag becomes step + 1.

        Args:
            before: int32 [n], filled with the previous tags, or None.

        Returns:
            The rows' tables, int16 [n].
        """
        tables = np.empty(len(slots), np.int16)
        _train(
            slots, self.occupants.tag, step + 1, self.occupants.table, tables, np.empty(0, np.int32) if before is None else before
        )
        return tables

    def occupied(self) -> np.ndarray:
        """Return the training slots that hold a row, ascending: int32."""
        return np.flatnonzero(self.occupants.table[: self.slots] != FREE).astype(np.int32)

    def _take(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of weights and states in `slots`."""
        if self.device.type == "cpu":
            return copies_of_rows(self.weights.numpy(), slots), copies_of_rows(self.state.numpy(), slots)
        places = upload(slots, self.device, torch.int64)
        weights, state = download([rows.index_select(0, places) for rows in (self.weights, self.state)])
        return weights, state

    def _put(self, slots: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        """Write weights and states into distinct `slots`."""
        if self.device.type == "cpu":
            put_rows(weights, slots, self.weights.numpy())
            put_rows(state, slots, self.state.numpy())
            return
        places = upload(slots, self.device, torch.int64)
        put_distinct(self.weights, places, upload(weights, self.device))
        put_distinct(self.state, places, upload(state, self.device))
