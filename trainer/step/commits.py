"""Commit and undo, on one trainer's side (docs/internals/trainer.md, Copies).

A step is *committed* when every trainer has applied it, and every copy has what it changed. A trainer knows that when it has everyone's gradients of
the next step, since nobody sends those before it has the copies' parts of this one. Until then the step can be undone, with the boundaries around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreload.cache.rows.partition import Partition
from foreload.pipelines.schedule.format import Event
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.step.exchange import ExchangePlan
from foreload.trainer.step.hosted_lanes import HostedLanes, LaneReplica
from foreload.trainer.step.replication import Replica, Replication
from foreload.trainer.step.term_session import TermSession, TrainerParts


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


@dataclass(frozen=True, slots=True)
class TermPosition:
    """Where a trainer stands when its term is over.

    step: the last step applied here of which its copies have all, too; copies: the lanes whose copies here lack nothing. stopping: training was to
    end, so an owner may have handed over all that sat in its slots.
    """

    step: int
    copies: tuple[int, ...]
    stopping: bool


class Commits:
    """Of one trainer in one term: which step is committed, what of the one applied since can be undone, and what its copies get.

    committed, applied, installed: steps; applied is committed or the one after it; installed, of which the copies here are, committed or the one
    before.
    """

    def __init__(
        self,
        parts: TrainerParts,
        lanes: HostedLanes,
        session: TermSession,
        copies: dict[int, LaneReplica],
        step: int,
        seeded: Iterable[tuple[int, int]],
        seeds_first: bool,
        stopping: bool = False,
    ) -> None:
        """step: the last one committed; copies: those held here, of the state after it; seeded: as `Replication` has it.

        seeds_first: whether the others are seeded before training begins, or while it goes on; stopping: as the term before left it in
        `TermPosition`.
        """
        self._seeds_first = seeds_first
        self._lanes, self._session, self.copies = lanes, session, copies
        self._replication = Replication(
            session.transport, session.lane_map, session.copy_map, parts.kernels, lanes, copies, seeded
        )
        self._undo = StepUndo(parts)
        self.committed = self.applied = self.installed = step
        self._stopping = stopping
        self._replica: Replica | None = None  # of the step applied
        self._following: ExchangePlan | None = None  # of the step after it, once its rows are here
        self._report: StepReport | None = None
        # Of a committed step, what is not yet in the copies.
        self._due: tuple[Replica, ExchangePlan | None] | None = None
        self.on_commit: Callable[[StepReport], None] = lambda report: None
        self.on_install: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Before anyone trains: fill the copies that lack slots, if that is to be done first. Raises PeerLost."""
        if self._seeds_first:
            self._replication.seeding.seed_all(self.committed)

    def save_dense(self) -> None:
        """Save the dense part that a step is about to change, while its gradients are under way."""
        self._undo.save_dense()

    def keep(self, lane: int, slots: np.ndarray) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """Room for what a lane's rows were before the step that begins to change them: as `StepUndo.keep` has it."""
        return self._undo.keep(lane, self._lanes.partitions[lane], slots)

    def begin_apply(self, event: Event) -> None:
        """A step begins to change what was saved; the one before is committed."""
        assert self.applied == self.committed
        self._undo.begin()
        self.applied, self._stopping = event.step, False
        self._replica = self._following = self._report = None

    def end_apply(self, report: StepReport, plan: ExchangePlan, whole: bool) -> None:
        """Send the copies what the step changed: at once where that is all of it (`whole`), else behind the next step's critical rows."""
        self._report = report
        self._replica = self._replication.fill(self.applied, plan.events, whole)
        if whole:
            self.send()

    def send(self) -> None:
        """Send what `end_apply` has left; and bring the copies to the step that was committed last, while the others' rows are under way."""
        if self._replica is not None and self._replica.work is None:
            self._replication.post(self._replica)
        self._install()

    def _install(self) -> None:
        """Bring the copies to the committed step."""
        if self._due is not None:
            due, self._due = self._due, None
            self._replication.install(*due)
            self.installed = due[0].step
            self.on_install()

    def exchanged(self, plan: ExchangePlan) -> None:
        """The rows of the step after the one applied are here."""
        self._following = plan

    def wait(self) -> None:
        """Return when the copies here have all of the step applied. Raises PeerLost."""
        if self._replica is not None and not self._replica.arrived:
            self._replication.wait(self._replica)

    def commit(self) -> None:
        """The step applied is committed: every trainer has it, and every copy what it changed. So rows that ended behind it may go to the store."""
        if self.applied == self.committed:
            # The first step of a term: the one before it was committed in an earlier term.
            self._lanes.commit(self.committed)
            return
        assert self._replica is not None
        assert self._report is not None
        assert self._due is None
        self._due = self._replica, self._following
        if not all(copy.seeded for copy in self.copies.values()):
            # What comes next depends on how far they are.
            self._install()
        self.committed = self.applied
        self._undo.forget()
        self._lanes.commit(self.committed)
        report, self._replica, self._following, self._report = self._report, None, None, None
        self.on_commit(report)

    def commit_last(self, stopping: bool) -> None:
        """Commit the step applied by a barrier, where no next one reports it. Every trainer calls this. Raises PeerLost.

        stopping: training ends. Then there is a barrier in any case, so that nobody ends residencies beyond the schedule of which another does not
        know that it might.
        """
        if self.applied == self.committed and (self._stopping or not stopping):
            return
        self.wait()
        self._stopping = stopping
        self._session.barrier()
        if self.applied > self.committed:
            self.commit()
        self._install()

    def give_away(self, lanes: Iterable[int]) -> None:
        """Host lanes no more that go to trainers with copies of them, and hold copies of them instead, of the step that is committed.

        To be called when the term is over, after `roll_back` where a step is applied that is not committed. Raises CacheError.
        """
        for lane in lanes:
            self.copies[lane] = self._lanes.give_away(lane)

    def position(self) -> TermPosition:
        """What this trainer reports when the term is over."""
        self._install()
        complete = tuple(lane for lane, copy in self.copies.items() if copy.complete)
        return TermPosition(self.applied if self._has_all() else self.committed, complete, self._stopping)

    def _has_all(self) -> bool:
        """Whether the step applied could be committed here."""
        replica = self._replica
        return replica is not None and replica.arrived and (replica.whole or self._following is not None)

    def roll_back(self, step: int) -> None:
        """Bring lanes, copies and the dense part to the state after `step`, before the next boundary.

        step: the least of what all that are there stand at: the committed one, or that of this trainer's position.
        """
        if step not in (self.committed, self.position().step):
            raise ValueError(f"step: must be {self.committed} or {self.position().step}, got {step}")
        if step > self.committed:
            self.commit()
        self._install()
        self._lanes.undo_boundaries(self.applied)
        self._undo.restore()
        self._lanes.undo_boundaries(step)
        self._lanes.commit(step)
        self.applied = step
        self._replica = self._following = self._report = None
