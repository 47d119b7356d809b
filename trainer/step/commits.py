"""Commit and undo training steps, on one trainer's side (docs/internals/trainer.md, Copies).

A step is *committed* when every trainer has applied it and every replica has received its changes.
No trainer sends its gradients of the next step before the replicas that it holds have the changes
of this one. So a trainer that has everyone's gradients of the next step knows that this step is
committed. Until then the step can be undone, together with the boundaries around it.
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
    """Memory for what one step changes, reused by later steps.

    `StepUndo` decides which of its contents are in force.

    Attributes:
        memory: by lane and "weights" or "state", a flat tensor, as large as any step has needed so
            far.
        rows: per lane, its partition, the slots of the changed rows, and their tags, weights and
            states before the step.
        parameters: the trained parameters, in memory of their own.
        optimizer: the optimizer's state by parameter, in memory of its own.
    """

    memory: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    rows: list[tuple[Partition, np.ndarray, np.ndarray, Tensor, Tensor]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    optimizer: dict[Tensor, dict[str, Any]] = field(default_factory=dict)

    def room(self, lane: int, name: str, rows: Tensor, slots: np.ndarray) -> Tensor:
        """Return room for `rows[slots]` in this memory."""
        size, memory = slots.size * rows.shape[1], self.memory.get((lane, name))
        if memory is None or memory.numel() < size:
            memory = self.memory[lane, name] = torch.empty(size + size // 4, device=rows.device)
        return memory[:size].view(slots.size, rows.shape[1])


class StepUndo:
    """The state before the last step, which was applied completely or in part.

    The kernel that changes rows saves them, since it reads them anyway. The dense part is saved
    while the trainer waits for others. At that time the step before may still have to be undone, so
    there are two sets of saved state.
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
        """Make the step whose dense part was saved last the one that can be undone.

        The step starts to change the model after this call.
        """
        self._current, self._next, self._in_force = self._next, self._current, True

    def keep(self, lane: int, partition: Partition, slots: np.ndarray) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """Return room for the old values of a lane's rows that the current step is about to change.

        The code that changes the rows writes their old values there.

        Args:
            slots: int32, the slots of all these rows.

        Returns:
            Room for the tags, int32, and for (weights, state).
        """
        saved = self._current
        tags = np.empty(slots.size, np.int32)
        weights, state = (saved.room(lane, name, getattr(partition, name), slots) for name in ("weights", "state"))
        saved.rows.append((partition, slots, tags, weights, state))
        return tags, (weights, state)

    def restore(self) -> None:
        """Undo the step that began last, unless it was committed since."""
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
            # An optimizer that had no state for the parameter before the step makes it anew.
            optimizer.state.pop(parameter, None)
            if state_before:
                # Copy the values, since later steps reuse the saved memory.
                _copy_state(state_before, optimizer.state[parameter])
        self._in_force = False

    def forget(self) -> None:
        """Note that the step that began last is committed and can no longer be undone."""
        self._in_force = False


def _copy_state(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Make `target` equal to `source`, with tensors in memory of its own."""
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

    Attributes:
        step: the last step applied here whose changes the replicas held here have all received.
        copies: the lanes whose replicas here are complete.
        stopping: whether training was about to end, so that an owner may have handed over all rows
            that sat in its slots.
    """

    step: int
    copies: tuple[int, ...]
    stopping: bool


class Commits:
    """The commit state of one trainer in one term.

    It knows which step is committed, undoes the step applied since where needed, and sends the
    replicas what each step changes.

    Attributes:
        copies: the replicas held here, by lane.
        committed: the last committed step.
        applied: the last applied step, which is `committed` or the one after it.
        installed: the step whose state the replicas here have, which is `committed` or the one
            before it.
        on_commit: called with the report of each step when it is committed.
        on_install: called each time the replicas here have advanced to a further step.
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
        """Begin a term at the state after the committed step `step`.

        Args:
            copies: the replicas held here, in the state after `step`.
            step: the last committed step.
            seeded: (lane, rank) of the replicas that already hold every slot, as in `Replication`.
            seeds_first: if true, the other replicas are seeded before training begins, otherwise
                while it goes on.
            stopping: the `TermPosition.stopping` with which the term before ended.
        """
        self._seeds_first = seeds_first
        self._lanes, self._session, self.copies = lanes, session, copies
        self._replication = Replication(
            session.transport, session.lane_map, session.copy_map, parts.kernels, lanes, copies, seeded
        )
        self._undo = StepUndo(parts)
        self.committed = self.applied = self.installed = step
        self._stopping = stopping
        # The replica update of the applied step.
        self._replica: Replica | None = None
        # The exchange of the step after that one, once its rows have arrived.
        self._following: ExchangePlan | None = None
        self._report: StepReport | None = None
        # The update of a committed step that is not yet installed in the replicas here.
        self._due: tuple[Replica, ExchangePlan | None] | None = None
        self.on_commit: Callable[[StepReport], None] = lambda report: None
        self.on_install: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Before training, seed the incomplete replicas if `seeds_first` was set.

        Raises PeerLost.
        """
        if self._seeds_first:
            self._replication.seeding.seed_all(self.committed)

    def save_dense(self) -> None:
        """Save the dense part before a step changes it, while the gradients are in transit."""
        self._undo.save_dense()

    def keep(self, lane: int, slots: np.ndarray) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """Return room for the old values of a lane's rows, as `StepUndo.keep` does."""
        return self._undo.keep(lane, self._lanes.partitions[lane], slots)

    def begin_apply(self, event: Event) -> None:
        """Begin to apply a step to the state that was saved.

        The step before it must be committed.
        """
        assert self.applied == self.committed
        self._undo.begin()
        self.applied, self._stopping = event.step, False
        self._replica = self._following = self._report = None

    def end_apply(self, report: StepReport, plan: ExchangePlan, whole: bool) -> None:
        """Prepare the replica update of the step that was just applied.

        Args:
            report: passed to `on_commit` when the step is committed.
            plan: the exchange of the applied step.
            whole: if true, the update has all weights and is sent at once. Otherwise it goes behind
                the next step's critical rows, when `send` is called.
        """
        self._report = report
        self._replica = self._replication.fill(self.applied, plan.events, whole)
        if whole:
            self.send()

    def send(self) -> None:
        """Send the update that `end_apply` prepared, and install the one committed last.

        The replicas here are brought to the committed step while the rows of other trainers are in
        transit.
        """
        if self._replica is not None and self._replica.work is None:
            self._replication.post(self._replica)
        self._install()

    def _install(self) -> None:
        """Bring the replicas here to the committed step."""
        if self._due is not None:
            due, self._due = self._due, None
            self._replication.install(*due)
            self.installed = due[0].step
            self.on_install()

    def exchanged(self, plan: ExchangePlan) -> None:
        """Note that the rows of the step after the applied one have arrived."""
        self._following = plan

    def wait(self) -> None:
        """Wait until the replicas here have received all changes of the applied step.

        Raises PeerLost.
        """
        if self._replica is not None and not self._replica.arrived:
            self._replication.wait(self._replica)

    def commit(self) -> None:
        """Commit the applied step, which every trainer has applied and every replica has received.

        Rows that ended at the boundary behind it are now handed to the traffic.
        """
        if self.applied == self.committed:
            # This is the first step of a term. The one before it was committed in an earlier term.
            self._lanes.commit(self.committed)
            return
        assert self._replica is not None
        assert self._report is not None
        assert self._due is None
        self._due = self._replica, self._following
        # The content and size of the next update depend on the cursors of replicas that are still
        # being seeded, and installing this update advances those cursors.
        if not all(copy.seeded for copy in self.copies.values()):
            self._install()
        self.committed = self.applied
        self._undo.forget()
        self._lanes.commit(self.committed)
        report, self._replica, self._following, self._report = self._report, None, None, None
        self.on_commit(report)

    def commit_last(self, stopping: bool) -> None:
        """Commit the applied step by a barrier, where no next step will commit it.

        Every trainer of the term calls this.

        Args:
            stopping: whether training ends. If so, there is a barrier in any case. It ensures that
                no trainer ends residencies beyond the schedule while another one does not know that
                this may happen.

        Raises:
            PeerLost: another trainer was lost.
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
        """Stop hosting lanes that migrate to trainers with replicas of them.

        This trainer holds a replica of each of these lanes instead, in the state after the
        committed step. Call this when the term is over, and after `roll_back` if a step is applied
        but not committed. Raises CacheError.
        """
        for lane in lanes:
            self.copies[lane] = self._lanes.give_away(lane)

    def position(self) -> TermPosition:
        """Return what this trainer reports when the term is over."""
        self._install()
        complete = tuple(lane for lane, copy in self.copies.items() if copy.complete)
        return TermPosition(self.applied if self._has_all() else self.committed, complete, self._stopping)

    def _has_all(self) -> bool:
        """Return whether this trainer has everything that it needs to commit the applied step."""
        replica = self._replica
        return replica is not None and replica.arrived and (replica.whole or self._following is not None)

    def roll_back(self, step: int) -> None:
        """Bring lanes, replicas and the dense part to the state after `step`.

        The boundary that follows `step` is then not yet passed.

        Args:
            step: the least step of the positions of all remaining trainers. It is the committed
                step or that of this trainer's position.

        Raises:
            ValueError: `step` is neither of these.
        """
        if step not in (self.committed, self.position().step):
            raise ValueError(f"step: must be {self.committed} or {self.position().step}, got {step}")
        if step > self.committed:
            self.commit()
        self._install()
        # Undo in reverse order: the boundary behind the applied step, the step itself, and then the
        # boundary before it. Rows must sit in the slots they had when the step saved them.
        self._lanes.undo_boundaries(self.applied)
        self._undo.restore()
        self._lanes.undo_boundaries(step)
        self._lanes.commit(step)
        self.applied = step
        self._replica = self._following = self._report = None
