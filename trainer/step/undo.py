"""What a training step changed, so that it can be undone: the rows of the hosted lanes, and the dense part, as they were before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreload.cache.rows.partition import Partition
from foreload.trainer.step.parts import TrainerParts


@dataclass(slots=True)
class _Saved:
    """Memory for what one step changes, used again for later ones.

    memory: by lane and "weights" or "state", flat, as large as was ever needed. rows: a lane's partition, slots, and their tags, weights and states.
    parameters, optimizer: the dense part, in memory of its own. What of all this is in force says `StepUndo`.
    """

    memory: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    rows: list[tuple[Partition, np.ndarray, np.ndarray, Tensor, Tensor]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    optimizer: dict[Tensor, dict[str, Any]] = field(default_factory=dict)

    def room(self, lane: int, name: str, rows: Tensor, slots: np.ndarray) -> Tensor:
        """Room for rows[slots], in this memory."""
        size, memory = slots.size * rows.shape[1], self.memory.get((lane, name))
        if memory is None or memory.numel() < size:
            memory = self.memory[lane, name] = torch.empty(size + size // 4, device=rows.device)
        return memory[:size].view(slots.size, rows.shape[1])


class StepUndo:
    """The state before the last step applied, wholly or in part. Rows are kept by what changes them, which reads them anyway; the dense part is saved
    while the trainer waits for others, when the step before may still have to be undone.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self._parts = parts
        self._current, self._next = _Saved(), _Saved()
        self._in_force = False

    def save_dense(self) -> None:
        """Save the dense part before the next step changes it."""
        saved = self._next
        saved.rows.clear()
        parameters, optimizer = self._parts.parameters, self._parts.optimizer
        with torch.no_grad():
            if not saved.parameters:
                saved.parameters = [torch.empty_like(parameter) for parameter in parameters]
            torch._foreach_copy_(saved.parameters, list(parameters))
            for parameter in parameters:
                _copy_state(optimizer.state.get(parameter, {}), saved.optimizer.setdefault(parameter, {}))

    def begin(self) -> None:
        """The step of which was saved begins to change what it changes: from now on it is the one that can be undone."""
        self._current, self._next, self._in_force = self._next, self._current, True

    def keep(self, lane: int, partition: Partition, slots: np.ndarray) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """Room for the tags, int32, and for weights and state of rows of a lane that the step which has begun is about to change: whoever changes
        them puts there what they were. slots: int32, of all these rows.
        """
        saved = self._current
        tags = np.empty(slots.size, np.int32)
        weights, state = (saved.room(lane, name, getattr(partition, name), slots) for name in ("weights", "state"))
        saved.rows.append((partition, slots, tags, weights, state))
        return tags, (weights, state)

    def restore(self) -> None:
        """Undo the step that began last, if that was not committed since."""
        if not self._in_force:
            return
        saved, kernels, optimizer = self._current, self._parts.kernels, self._parts.optimizer
        for partition, slots, tags, weights, state in saved.rows:
            partition.occupants.tag[slots] = tags
            for rows, before in ((partition.weights, weights), (partition.state, state)):
                if before.numel():
                    kernels.put_rows(rows, slots, before)
        with torch.no_grad():
            torch._foreach_copy_(list(self._parts.parameters), saved.parameters)
        for parameter, state_before in saved.optimizer.items():
            optimizer.state.pop(parameter, None)
            if state_before:
                # Copies: this memory is used again.
                _copy_state(state_before, optimizer.state[parameter])
        self._in_force = False

    def forget(self) -> None:
        """The step that began last is committed."""
        self._in_force = False


def _copy_state(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Make target what source is, tensors in its own memory."""
    for key in target.keys() - source.keys():
        del target[key]
    for key, value in source.items():
        if isinstance(value, Tensor):
            if key not in target:
                target[key] = torch.empty_like(value)
            target[key].copy_(value)
        else:
            target[key] = value
